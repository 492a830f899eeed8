"""`threed search`: whole searches, and bounds, that take more than a second or two."""

from __future__ import annotations

from collections import Counter

import pytest

import threed
from tests.layouts import H100, QUIET, TOY, full_s, searched, short_s
from threed.features.zero import matrices
from threed.layout_search.best_first import Search
from threed.layout_search.bounds import Bounds
from threed.layout_search.helps import helps
from threed.layout_search.layout import Layout, config_of
from threed.layout_search.request import ask
from threed.layout_search.short_plan import ShortPlans
from threed.layout_search.space import NO_MEMORY
from threed.planner import facts, owners
from threed.prediction.hardware import Hardware
from threed.schedules.orders import SCHEDULES


def test_nothing_better_is_dropped():
    """The best of a small space is what all of its layouts, timed one by one, say."""
    asked, result = searched(4, "parallel.tp=1", "zero.stage=1", "train.global_batch_size=16")
    best = result.timed[0].step_s
    for pp in (1, 2, 4):
        for size in (1, 2, 4):
            for name in ("1f1b", "zb-v", "zb-h2", "gpipe"):
                layout = Layout(1, pp, 4 // pp, schedule=name if pp > 1 else "1f1b", micro_batch_size=size,
                                virtual_stages=SCHEDULES[name].virtual if pp > 1 else 1,  # type: ignore
                                shard_size=4 // pp)
                assert short_s(asked.config(layout), H100) >= best * 0.999, layout


def test_less_memory():
    """Less memory: other layouts, never faster ones; too little: none, and what is nearest."""
    large = ("model.layers=24", "model.hidden=2048", "model.heads=16", "train.micro_batch_size=2",
             "parallel.axis_order=pp-dp-tp", "parallel.tp=1")
    roomy, tight = (searched(8, *large, memory=size)[1] for size in (80e9, 8e9))
    assert tight.timed and tight.dropped[NO_MEMORY] > roomy.dropped[NO_MEMORY]
    assert tight.timed[0].step_s >= roomy.timed[0].step_s
    assert max(found.bytes for found in tight.timed) <= 8e9
    none = searched(8, *large, memory=2.2e9)[1]
    assert not none.timed and none.nearest is not None and none.nearest[0] > 2.2e9


def test_rounding():
    """Gradients are sent in 16 bits by consent alone: the same search without it never does."""
    bf16 = ("model.layers=4", "precision.dtype=bf16")
    asked, result = searched(4, *bf16, rounding=True)
    best = {found.layout.reduce_dtype: found for found in reversed(result.timed) if found.layout.dp > 1}
    assert {*best} == {"fp32", "bf16"} and best["bf16"].layout.idea != best["fp32"].layout.idea
    assert asked.values_of(best["bf16"].layout)["precision.reduce_dtype"] == "bf16"
    assert asked.values_of(best["fp32"].layout).get("precision.reduce_dtype", "fp32") == "fp32"
    assert "gradients sent in bf16" in best["bf16"].layout.text()
    same = best["fp32"].layout._replace(reduce_dtype="bf16")
    assert short_s(asked.config(same), H100) < best["fp32"].step_s
    asked, result = searched(4, *bf16)
    assert {asked.config(found.layout).precision.reduce_dtype for found in result.timed} == {"fp32"}
    asked, result = searched(4, *bf16, "precision.reduce_dtype=bf16")
    assert {asked.config(found.layout).precision.reduce_dtype for found in result.timed} == {"bf16"}


@pytest.mark.parametrize("fixed", [
    ["parallel.tp=2"], ["parallel.pp=2", "parallel.schedule=zb-v"], ["parallel.dp=2"], ["zero.stage=3"],
    ["zero.stage=2", "zero.reduce_every=2"], ["zero.residency=2"], ["train.micro_batch_size=2"],
    ["activation.policy=full", "activation.every=2"], ["parallel.axis_order=dp-pp-tp"],
    ["offload.optimizer=cpu"], ["zero.shard_size=2"],
    ["parallel.schedule=interleaved", "parallel.virtual_stages=3", "parallel.pp=2"],
    ["parallel.sequence_parallel=false"], ["activation.offload=cpu"],
    ["model.tile_linears=128KiB", "model.tie_embeddings=false"], ["precision.reduce_dtype=fp32"]])
def test_fixed(fixed):
    """A key on the command line that the search changes would not be what the user asked for."""
    asked, result = searched(4, "model.layers=4", *fixed)
    assert result.timed
    wanted = dict(text.split("=") for text in fixed)
    for found in result.timed[:30]:
        values = asked.config(found.layout).to_dict()
        for key, value in wanted.items():
            section, name = key.split(".")
            whole = name == "shard_size" and values["parallel"]["dp"] == 2  # null: all of dp
            assert str(values[section][name]).lower() == value.lower() or whole, (key, found.layout)


def test_tiles():
    """Where whole units take too much memory, tiles are tried; where they do not, tiles are needless."""
    large = ("model.layers=4", "model.hidden=4096", "model.heads=32", "model.tie_embeddings=false",
             "precision.dtype=bf16", "parallel.tp=1", "parallel.pp=1", "zero.stage=3",
             "train.micro_batch_size=1", "offload.optimizer=none", "zero.reduce_every=1",
             "activation.policy=full", "zero.residency=1")
    base = ask(TOY, ["run.device=auto", *large]).base
    bounds = Bounds(base, H100)
    layout = Layout(dp=8, shard_size=8, stage=3, residency=1, reduce_every=1, policy="full")
    some, many = bounds.tiles(layout)
    assert bounds.largest(layout) == 12 * 4096**2 + 13 * 4096 and (some, many) == ("128MiB", "32MiB")
    whole, few_bytes, many_bytes = (ShortPlans(config_of(layout._replace(tile_linears=tiles), base),
                                               H100).peak_bytes() for tiles in (None, some, many))
    assert many_bytes < few_bytes < 0.7 * whole
    for memory, wanted in ((1.1 * whole, {None}), (0.99 * whole, {some}), (0.99 * few_bytes, {many})):
        asked, result = searched(8, *large, memory=memory)
        assert {found.layout.tile_linears for found in result.timed} == wanted, memory
        best = asked.config(result.timed[0].layout)
        assert not threed.config.load.validate(best) and best.model.tile_linears in wanted
    asked, result = searched(8, *large, "model.tile_linears=null", memory=0.99 * whole)
    assert not result.timed and result.nearest is not None


def test_what_would_help():
    """Faster adapters help where nodes talk; memory where something is computed again."""
    base = threed.load("configs/llama3-8b.yaml", ["model.layers=8", "train.global_batch_size=64", *QUIET])
    search = Search(base, H100, int(80e9))
    found = search.run(16, {"dp": 16, "policy": "full", "micro_batch_size": 1}).timed[0]
    gains = helps(ShortPlans(config_of(found.layout, base), H100))
    slow = Hardware.parse("h100-sxm,adapter_gbps=5")
    layout = Search(base, slow, int(80e9)).run(16, {"dp": 16}).timed[0].layout
    assert helps(ShortPlans(config_of(layout, base), slow))[
        "precision.reduce_dtype=bf16 (rounds)"] > 0.1
    assert gains["memory for no recomputation"] > 0.15 and all(0 < gain < 1 for gain in gains.values())


# ---------------------------------------------------------------- what only some layouts use


@pytest.mark.parametrize("keys", [
    ["model.lora_rank=4"],
    ["zero.persist_below=3000"],
    ["activation.budget=40MiB"],
    ["activation.partition=true"],
    ["activation.contiguous=true"],
    ["offload.ratio=0.5"],
    ["offload.parameters=cpu"],
    ["offload.overlap=none"],
    ["offload.gradients=host"],
    ["offload.optimizer=nvme", "offload.nvme_path=disk"],
    ["parallel.activation_limit=64MiB"],
    ["parallel.stage_units=[4,2]", "parallel.pp=2", "parallel.schedule=1f1b"],
    ["parallel.schedule=v-half", "activation.offload=cpu", "activation.partition=true"]],
                         ids=lambda keys: keys[0])
def test_other_keys(keys):
    """Each is in the layouts that are searched, whose times are those of the full plan."""
    small = ("model.layers=4", "train.global_batch_size=32", "train.micro_batch_size=1")
    asked, result = searched(4, *small, *keys)
    assert result.timed
    wanted = dict(text.split("=", 1) for text in keys)
    for found in result.timed[:5]:
        config = asked.config(found.layout)
        assert not threed.config.load.validate(config), found.layout
        written = threed.config.load.of_values(asked.values_of(found.layout), "")
        for key, value in wanted.items():
            section, name = key.split(".")
            for each in (config, written):
                assert str(each.to_dict()[section][name]).lower().replace(" ", "") == value.lower(), key
        config.train.eval_every = config.checkpoint.every = 0
        assert found.step_s == pytest.approx(full_s(config, H100), rel=0.02), found.layout


def test_own_layers():
    """Of a user: their sizes are measured as for a plan."""
    asked = ask("examples/vit.yaml")
    result = Search(asked.base, H100, int(80e9)).run(4, asked.fixed)
    assert {found.layout.pp for found in result.timed} > {1}
    for found in result.timed[:5]:
        config = asked.config(found.layout)
        config.train.eval_every = config.checkpoint.every = 0
        assert found.step_s == pytest.approx(full_s(config, H100), rel=0.02), found.layout


def test_owners_are_dealt_once(monkeypatch: pytest.MonkeyPatch):
    """A search asks at each plan who owns the matrices of a position: those of the same units, laid out
    in the same way, are dealt to the same ranks once."""
    plans, deals = Counter[str](), list[list[object]]()

    def with_owners(*about):
        plans["made"] += 1
        return owners.with_owners(*about)

    def members(*about):
        ranks = matrices.members(*about)
        deals.append([tuple((*each.place.items(), each.shard) for each in ranks)])
        return ranks

    def unit_matrices(laid, *about):
        deals[-1].append(laid)
        return matrices.UnitMatrices(laid, *about)

    monkeypatch.setattr(facts, "with_owners", with_owners)
    monkeypatch.setattr(owners, "members", members)
    monkeypatch.setattr(owners, "UnitMatrices", unit_matrices)
    searched(4, "optimizer.name=muon", "parallel.tp=1", "train.global_batch_size=16")
    different = {(ranks, *map(id, units)) for ranks, *units in deals}
    assert len(different) == len(deals) < plans["made"]

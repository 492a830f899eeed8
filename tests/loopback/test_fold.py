"""A fold: ranks of a position numbered in a second way, for the parameters of some layers.

The MLPs of tests/families/folded.py are cut over `fp`, runs of ranks of dp x tp, and sharded over the ranks
with equal parts; the rest is cut over tp, and sharded over dp.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness import assert_contract, tiny
from tests.layouts import H100, full_s
from tests.loopback.test_axis import train
from threed.base import axes as base_axes
from threed.base import mesh
from threed.base.errors import ConfigError, ThreedError
from threed.base.mesh import Fold, Mesh, fold_problem
from threed.config.load import checked
from threed.layout_search.best_first import Search
from threed.layout_search.layout import config_of
from threed.layout_search.space import NO_FOLD
from threed.planner import make_mesh, make_plan
from threed.schema import Config, ParallelConfig

FOLDED = "model.family=tests/families/folded.py:FOLDED"
POINTWISE = "model.family=tests/families/folded.py:POINTWISE"
SMALL = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16", "train.global_batch_size=8"]
PP, DP, SP = ["parallel.pp=2"], ["parallel.dp=2"], ["parallel.tp=2", "parallel.sequence_parallel=true"]
DP4, FULL = ["parallel.dp=4"], ["activation.policy=full"]
MESHES = {
    "alone": (1, []), "one": (1, DP), "all": (2, DP), "half": (2, DP4), "over-both": (4, [*DP, *SP]),
    "in-tp": (2, [*DP, *SP]), "groups": (2, [*DP4, "zero.shard_size=2"]),
    "groups-of-one": (2, [*DP4, *SP, "zero.shard_size=1"]),
    "order": (2, [*DP, *SP, "parallel.axis_order=pp-tp-dp"]),
}


@pytest.fixture(autouse=True)
def fold(monkeypatch):
    """A row, those of its groups, and its key."""
    fold_along(monkeypatch, "dp", "tp")
    # A real fold has a key: `fp: int = 1` in schema.ParallelConfig.
    monkeypatch.setattr(ParallelConfig, "fp", 1, raising=False)


def fold_along(monkeypatch: pytest.MonkeyPatch, *axes: str) -> None:
    monkeypatch.setitem(mesh.FOLDS, "fp", Fold(axes, "rest"))
    for name, row in mesh.fold_groups("fp").items():
        monkeypatch.setitem(mesh.GROUPS, name, row)


def add_axis(monkeypatch: pytest.MonkeyPatch, divides: str) -> None:
    """An axis xp of two ranks, of which no layer knows."""
    monkeypatch.setitem(mesh.AXES, "xp", divides)
    for module in (base_axes, mesh):
        monkeypatch.setattr(module, "QUIET", {*module.QUIET, "xp"})
    monkeypatch.setitem(mesh.GROUPS, "xp", mesh.GroupRow(("xp",), "xp", "compute"))
    monkeypatch.setattr(ParallelConfig, "xp", 2, raising=False)


def with_fp(size: int, *overrides: str) -> Config:
    config = tiny(*SMALL, FOLDED, *overrides)
    config.parallel.fp = size  # pyright: ignore[reportAttributeAccessIssue]
    return config


# Without shards (stage 0) there are no groups of them.
CELLS = [(name, stage) for name in MESHES for stage in range(4) if stage or "groups" not in name]


@pytest.mark.parametrize("name, stage", CELLS)
def test_contract(name, stage, references):
    size, chosen = MESHES[name]
    assert_contract(with_fp(size, *chosen, f"zero.stage={stage}", "model.tie_embeddings=false"), references)


# Axes of the fold, and of ranks that it does not name, which have copies and tokens of their own.
PARTIAL = {
    "tp-of-dp-tp": (("tp",), [*DP, *SP]), "dp-of-dp-tp": (("dp",), [*DP, *SP]),
    "tp-in-groups": (("tp",), [*DP4, *SP, "zero.shard_size=2"]),
    "dp-in-groups": (("dp",), [*DP4, *SP, "zero.shard_size=2"]),
    "tp-tp-dp": (("tp",), [*DP, *SP, "parallel.axis_order=pp-tp-dp"]),
    "dp-same-tokens": (("dp",), [*DP, "parallel.tp=2"]),  # in all ranks of tp: equal gradients
}


@pytest.mark.parametrize("name, stage", [(name, stage) for name in PARTIAL for stage in range(4)
                                         if stage or "groups" not in name])
def test_axes_that_a_fold_leaves_out(name, stage, references, monkeypatch):
    """Gradients of one run alone, from which copies drift apart."""
    axes, chosen = PARTIAL[name]
    fold_along(monkeypatch, *axes)
    assert_contract(with_fp(2, *chosen, f"zero.stage={stage}", "optimizer.clip_grad=0.1"), references)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("axes, chosen", [
    (("dp", "tp"), [*DP, *SP]), (("tp",), SP), (("dp",), DP), (("xp",), [*DP, *SP]), (("dp", "xp"), DP),
    (("dp", "tp"), [*DP, "zero.shard_size=2"]), (("samples", "tokens", "tp"), [*DP, *SP, *PP])])
def test_an_axis_of_tokens(axes, chosen, stage, references, monkeypatch):
    add_axis(monkeypatch, "tokens")
    fold_along(monkeypatch, *axes)
    assert_contract(with_fp(2, *chosen, f"zero.stage={stage}", POINTWISE), references)


@pytest.mark.parametrize("stage", [0, 2])
def test_an_axis_whose_ranks_have_the_same_tokens(stage, references, monkeypatch):
    add_axis(monkeypatch, "parameters")
    assert_contract(with_fp(2, *DP, f"zero.stage={stage}", "parallel.axis_order=pp-dp-tp-xp"), references)


def test_experts_span_axes_of_tokens(monkeypatch):
    add_axis(monkeypatch, "tokens")
    assert mesh.FOLDS["ep"].axes == ("dp", "cp", "xp", "tp")
    here = Mesh(dp=2, xp=2, tp=2, ep=8)
    assert here.groups("ep") == [tuple(range(8))] and here.group("edp", 3) == (3,)


MORE = {
    "zb-v-full-bf16": [*PP, "parallel.schedule=zb-v", *FULL, "precision.dtype=bf16", "zero.stage=3"],
    "interleaved": [*PP, "parallel.schedule=interleaved", "parallel.virtual_stages=2", "zero.stage=2"],
    "tied": ["zero.stage=2", *PP], "reduce-every": ["zero.stage=2", "zero.reduce_every=2"],
    "offload": ["zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu", *FULL],
    "overlap": ["zero.stage=1", "offload.optimizer=cpu"],
    "no-overlap": ["zero.stage=1", "offload.optimizer=cpu", "offload.overlap=none"],
    "kept-on-host": [*FULL, "activation.offload=cpu", "zero.stage=1"],
    "small-whole": ["zero.stage=3", "zero.persist_below=100"],
    "evaluate-verify": ["train.eval_every=1", "run.verify_every=1", "zero.stage=2"],
    "clip": ["optimizer.clip_grad=0.1"],
}


@pytest.mark.parametrize("name", MORE)
def test_more(name, references):
    assert_contract(with_fp(2, *DP, *SP, *MORE[name]), references)


def test_units_own_their_group():
    """Parts of MLPs are a unit each, sharded over the ranks with equal parts."""
    plan = make_plan(with_fp(2, *DP4, *SP, "zero.stage=2"))
    kinds = {unit.kind: (unit.fold, unit.shard_group, unit.shards, [step.group for step in unit.reductions])
             for unit in plan.table.parameters.values()}
    assert kinds["folded"] == ("fp", "rest", 4, ["rest"])
    assert kinds["own"] == ("", "dp", 4, ["tp", "dp"])
    plan = make_plan(with_fp(2, *DP4, *SP, "zero.shard_size=2"))
    kinds = {unit.kind: (unit.shard_group, unit.shards, [step.group for step in unit.reductions])
             for unit in plan.table.parameters.values()}
    assert kinds["folded"] == ("rest_shard", 2, ["rest_shard", "rest_replica"])
    assert kinds["own"] == ("shard", 2, ["tp", "shard", "replica"])


def test_groups():
    """Runs, the ranks with equal parts, and of these the shard groups and the copies."""
    here = Mesh(dp=4, tp=2, fp=2, shard=2)
    assert here.groups("fp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert here.groups("rest") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert here.groups("rest_shard") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert here.groups("rest_replica") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [here.coordinate(rank).on["fp"] for rank in range(8)] == [0, 1] * 4
    assert str(here.coordinate(3)) == "pp0 dp1 tp1" and here.text() == "pp 1 x dp 4 x tp 2"
    wide = Mesh(("pp", "tp", "dp"), dp=4, tp=2, pp=2, fp=4)
    assert wide.groups("fp") == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert wide.groups("rest")[0] == (0, 4)


def test_checkpoints(tmp_path, references):
    """fp 2 -> 4 -> 1, on other meshes and stages: the losses of a run on one rank."""
    path, want = "auto", references(with_fp(1), 6).losses
    runs = [(2, [*DP, *SP, "zero.stage=1"]), (4, [*DP4, *PP, "zero.stage=3"]),
            (1, [*DP, "zero.stage=2", "offload.optimizer=cpu"])]
    for number, (size, chosen) in enumerate(runs):
        config = with_fp(size, *chosen, f"run.dir={tmp_path / str(number)}", f"train.resume={path}")
        losses, path = train(config, 2)
        assert losses == pytest.approx(want[2 * number:2 * number + 2], rel=1e-5)


def test_what_is_saved_is_equal_to_the_bit(tmp_path):
    """A checkpoint that is read on other meshes and saved again, with no step in between, is the same."""
    sums, path = [], "auto"
    for size, chosen in ((2, [*DP, *SP]), (4, [*DP4, *PP, "zero.stage=3"]), (1, [*DP, "zero.stage=2"])):
        folder = tmp_path / str(size)
        _, path = train(with_fp(size, *chosen, f"run.dir={folder}", f"train.resume={path}"), 2 * (not sums))
        parameters = json.loads((path / "manifest.json").read_text())["parameters"]
        sums.append({name: each["sums"] for name, each in parameters.items()})
    assert sums[0] == sums[1] == sums[2] and "blocks.0.mlp.up" in sums[0]


@pytest.mark.parametrize("axes", [("tp",), ("dp",)])
def test_copies_are_saved_once(axes, tmp_path, references, monkeypatch):
    """Of a fold that leaves ranks with copies out; and those are read on other meshes."""
    fold_along(monkeypatch, *axes)
    path, want = "auto", references(with_fp(1), 4).losses
    for number, chosen in enumerate(([*DP, *SP, "zero.stage=1"], [*DP4, *SP, "zero.stage=3", *PP])):
        config = with_fp(2, *chosen, f"run.dir={tmp_path / str(number)}", f"train.resume={path}")
        losses, path = train(config, 2)
        assert losses == pytest.approx(want[2 * number:2 * number + 2], rel=1e-5)


def test_search():
    """Every layout is one whose ranks the fold divides, and is timed as its whole plan is."""
    base = with_fp(2, "train.global_batch_size=64", "run.device=auto")
    result, alone = (Search(base, H100, 1 << 36).run(4, fixed) for fixed in ({}, {"pp": 1}))
    assert result.timed and result.dropped[NO_FOLD]
    assert {each.layout.tp * each.layout.dp * each.layout.cp for each in alone.timed} == {4}
    for found in (*result.timed[:10], *alone.timed[:5]):
        config = checked(config_of(found.layout, base))
        assert not fold_problem("fp", 2, config.axis_sizes, config.shard_size)
        assert found.step_s == pytest.approx(full_s(config, H100), rel=0.02)


BAD = {
    "does not divide": ((3, [*DP, *SP]), r"fp=3 does not divide the 4 ranks of dp x tp: take a divisor of 4"),
    "none": ((0, DP), r"fp=0 does not divide the 2 ranks"),
    "copies": ((4, [*DP4, "zero.shard_size=2"]),
               r"fp=4 leaves 1 of the ranks of dp x tp with equal parts, which the 2 shard groups do not"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folds(name):
    (size, chosen), message = BAD[name]
    config = with_fp(size, *chosen)
    with pytest.raises(ConfigError, match=message):
        checked(config)
    with pytest.raises(ValueError, match=message):
        make_mesh(config)


def test_folds_along_ranks_with_the_same_tokens(monkeypatch):
    add_axis(monkeypatch, "parameters")
    fold_along(monkeypatch, "dp", "xp")
    with pytest.raises(ConfigError, match=r"parallel\.xp=2 and weights cut over fp: all ranks of xp would "
                                          r"send the same tokens, .*leave xp out"):
        checked(with_fp(2, *DP, *SP))
    fold_along(monkeypatch, "dp", "tp")
    with pytest.raises(ConfigError, match=r"sequence_parallel=false with parallel\.tp=2 and weights"):
        checked(with_fp(2, "parallel.tp=2"))
    fold_along(monkeypatch, "pp", "dp")
    with pytest.raises(ConfigError, match="is of a fold along pp, whose ranks have other layers"):
        checked(with_fp(2, *DP, *PP))


def test_a_parameter_of_two_ways(tmp_path):
    file = tmp_path / "two.py"
    text = Path("tests/families/folded.py").read_text()
    file.write_text(text.replace('(Cut(0, "fp"),)', '(Cut(0, "fp"), Cut(1, "tp"))'))
    config = tiny(*SMALL, *DP, f"model.family={file}:FOLDED")
    with pytest.raises(ThreedError, match=r"mlp\.up is cut over fp, .*cut over fp over nothing else"):
        make_plan(config)

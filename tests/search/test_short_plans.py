"""`threed search`: short plans against the full plan, over 300 random layouts."""

from __future__ import annotations

from operator import add

import pytest

import threed
from tests.layouts import H100, QUIET, compared, full_s, short_s
from threed.base.remember import remembering
from threed.layout_search import cuts
from threed.layout_search.bounds import Bounds
from threed.layout_search.layout import Layout, config_of, schedules
from threed.layout_search.short_plan import ShortPlans, steady_count
from threed.planner import analyse
from threed.prediction.hardware import Hardware
from threed.prediction.peak import fullest, peaks
from threed.schedules.orders import SCHEDULES
from threed.schema import Config


@pytest.fixture(autouse=True)
def shared():
    """What plans of one model share is computed once, as in a search."""
    with remembering():
        yield


def test_bound():
    """A bound above a step, or above its memory, would drop the best."""
    base = threed.load("configs/llama3-8b.yaml", ["model.layers=8", "train.global_batch_size=32", *QUIET])
    bounds = Bounds(base, H100)
    for row in compared(base, H100, 7, 12, 8):
        short = ShortPlans(config_of(row.layout, base), H100)
        filled, each_s = bounds.filled_s(row.layout), bounds.microbatch_s(row.layout)
        bound_s = max(bounds.step_s(row.layout), *filled)
        assert 0.3 * row.full_s < bound_s <= 1.001 * short.free_s() <= 1.002 * row.full_s, row
        assert bounds.sent_s(row.layout, filled) <= row.full_s, row
        assert short.least_s(each_s) <= 1.0001 * row.full_s, row
        for limit in (0.0, 0.5 * row.full_s, 0.98 * row.full_s):  # what a layout is dropped by
            dropped_s = short.step_s(limit=limit, microbatch_s=each_s)
            assert limit < dropped_s <= 1.002 * row.full_s, row
        fixed = bounds.fixed_bytes(row.layout)
        for least in (bounds.saved_bytes(row.layout), bounds.working_bytes(row.layout)):
            assert max(map(add, fixed, least)) <= row.full_bytes, row
        assert 0.4 * row.full_bytes < max(map(add, fixed, short.working_bytes)) <= row.full_bytes, row


@pytest.mark.parametrize("schedule, pp", [("1f1b", 1), ("1f1b", 2), ("zb-h1", 2)])
@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("form, overlap", [("keys", False), ("keys", True), ("heads", False)])
def test_bound_over_cp(form, overlap, policy, schedule, pp):
    """What comes twice is not there all the time."""
    base = threed.load("configs/llama3-8b.yaml", [
        "model.layers=64", "model.hidden=1024", "model.ffn_hidden=1024", "model.kv_heads=32",
        "model.vocab=1024", "model.seq_len=32768", "train.global_batch_size=4", *QUIET])
    layout = Layout(1, pp, 1, schedule=schedule, cp=4, cp_form=form, cp_overlap=overlap, shard_size=4,
                    policy=policy)
    bounds, plan = Bounds(base, H100), analyse(config_of(layout, base))
    whole = peaks(plan, H100)
    for least in (bounds.saved_bytes(layout), bounds.working_bytes(layout)):
        least = map(add, bounds.fixed_bytes(layout), least)
        assert all(size <= row.total for size, row in zip(least, whole, strict=True))


@pytest.mark.parametrize("overrides, units", [
    (["model.layers=12"], 3), (["model.layers=12", "model.tie_embeddings=true", "model.vocab=4096"], 3),
    (["model.layers=13", "parallel.layers_per_unit=3"], 4),
    (["model.layers=12", "model.lora_rank=4", "model.lora_targets=[q_proj]"], 3),
    (["model.layers=9", "model.name=mixtral-8x7b"], 5),
    (["model.layers=9", "model.name=mixtral-8x7b", "model.moe_every=2", "model.first_dense=1"], 6),
    (["model.layers=12", "activation.policy=full", "activation.every=2"], 14)])
def test_few_layers_stand_for_all(overrides, units, monkeypatch):
    """Bounds by the kinds of units are those by all units."""
    base = threed.load("configs/llama3-8b.yaml", ["model.seq_len=2048", "train.global_batch_size=32", *QUIET,
                                                  *overrides])
    every = base.activation.every or 1
    layouts = [Layout(tp, pp, dp, shard_size=dp, schedule="interleaved" if pp > 1 else "1f1b",
                      virtual_stages=2 if pp > 1 else 1, policy=policy, every=every, stage=stage,
                      residency=1 if stage == 3 else None)
               for tp, pp, dp, stage in ((1, 1, 8, 1), (2, 2, 2, 3), (4, 1, 2, 2))
               for policy in ("none", "selective", "full")]

    def bounds() -> list[list[float]]:
        by = Bounds(base, H100)
        return [[by.step_s(each), by.sent_s(each, by.filled_s(each)), by.microbatch_s(each),
                 *by.fixed_bytes(each), *by.saved_bytes(each)] for each in layouts]

    few = bounds()
    assert len({*Bounds(base, H100).few(layouts[0]).units}) == units
    monkeypatch.setattr(cuts, "_FEW", 1)
    for some, whole in zip(few, bounds(), strict=True):
        assert some == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("hardware", ["h100-sxm", "a100-sxm,adapter_gbps=25"])  # computation, and traffic
@pytest.mark.parametrize("name, layers, batch, most", [
    ("llama3-8b", 10, 64, 16), ("llama3-8b", 16, 256, 64), ("gpt2-small", 12, 64, 16)])
def test_short_against_full(name, layers, batch, most, hardware):
    """A step within 2%, memory within 1%."""
    base = threed.load(f"configs/{name}.yaml", [f"model.layers={layers}", f"train.global_batch_size={batch}",
                                                *QUIET])
    rows = list(compared(base, Hardware.parse(hardware), 11, 50, most))
    errors = sorted(row.error for row in rows)
    assert errors[len(errors) // 2] < 0.001 and errors[-1] < 0.02, max(rows, key=lambda row: row.error)
    sizes = [row.fast_bytes / row.full_bytes for row in rows]
    assert min(sizes) > 0.99 and max(sizes) < 1.01


def with_experts(*overrides: str) -> Config:
    """Blocks of Mixtral 8x7B."""
    return threed.load("configs/llama3-8b.yaml", [
        "model.name=mixtral-8x7b", "model.layers=10", "model.seq_len=4096", "train.global_batch_size=64",
        *QUIET, *overrides])


EXPERTS = {"all": [], "some": ["model.moe_every=2", "model.first_dense=1"],
           "shared": ["model.shared_expert_ffn=4096", "model.experts=16", "model.balance=bias"]}


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(name):
    """Layouts with several values of ep, against the full plan. No bound is above the step."""
    base = with_experts(*EXPERTS[name])
    bounds, rows = Bounds(base, H100), list(compared(base, H100, 5, 25))
    assert {1, 2, 4} <= {row.layout.ep for row in rows}
    errors = sorted(row.error for row in rows)
    assert errors[len(errors) // 2] < 0.001 and errors[-1] < 0.02, max(rows, key=lambda row: row.error)
    for row in rows:
        filled, each_s = bounds.filled_s(row.layout), bounds.microbatch_s(row.layout)
        for bound_s in (bounds.step_s(row.layout), *filled, bounds.sent_s(row.layout, filled)):
            assert bound_s <= row.full_s * 1.000001, row
        short = ShortPlans(config_of(row.layout, base), H100)
        least_s = [short.least_s(each_s), short.step_s(limit=0.98 * row.full_s, microbatch_s=each_s)]
        assert max(least_s) <= row.full_s * 1.002, row
        least = map(add, bounds.fixed_bytes(row.layout), bounds.working_bytes(row.layout))
        assert max(least) <= row.full_bytes, row


@pytest.mark.parametrize("hardware", ["h100-sxm", "h100-sxm,exchange_efficiency=0.2"])
@pytest.mark.parametrize("layout", [
    Layout(8, 1, 1, sequence_parallel=True, policy="full", ep=8),
    Layout(2, 1, 4, "pp-tp-dp", sequence_parallel=True, ep=4, shard_size=4),
    Layout(2, 2, 4, "dp-pp-tp", sequence_parallel=True, ep=4, shard_size=4)], ids=Layout.text)
def test_bounds_of_experts(layout, hardware):
    """Ranks are as near to each other as on the layout's mesh. A bound counts no exchange."""
    base, machine = with_experts("model.moe_capacity=1.25"), Hardware.parse(hardware)
    bound_s = Bounds(base, machine).step_s(layout)
    assert 0.2 * full_s(config_of(layout, base), H100) < bound_s <= full_s(config_of(layout, base), machine)


@pytest.mark.parametrize("stage, residency", [(1, None), (2, None), *((3, each) for each in (1, 2, "stage",
                                                                                             "step"))])
@pytest.mark.parametrize("pp, schedule, stages", [(1, "1f1b", 1), (2, "interleaved", 4)])
@pytest.mark.parametrize("overlap", [False, True])
def test_fixed_bytes_of_experts(overlap, pp, schedule, stages, stage, residency):
    """The bound is near the plan, and not above it: experts are cut over ranks of tp and cp, with few of dp;
    and of the units of a stage some are far larger than others."""
    base = with_experts("model.seq_len=8192")
    layout = Layout(4, pp, 1, schedule=schedule, virtual_stages=stages, sequence_parallel=True, ep=8, cp=2,
                    cp_overlap=overlap, stage=stage, shard_size=2, residency=residency, policy="full",
                    reduce_every=1 if stage >= 2 else None)
    bound = max(Bounds(base, H100).fixed_bytes(layout))
    planned = max(ShortPlans(config_of(layout, base), H100).fixed_bytes())
    assert 0.8 * planned < bound <= planned


@pytest.mark.parametrize("layout", [
    *(Layout(1, 2, 4, "dp-pp-tp", name, SCHEDULES[name].virtual or 2, shard_size=4, policy="selective", ep=4,
             pair=True) for name in ("1f1b", "interleaved", "zb-h1", "dualpipe-v")),
    *(Layout(4, 2, 1, sequence_parallel=True, ep=ep) for ep in (1, 2, 4))], ids=str)
def test_memory_of_experts(layout):
    """1f1b and zb-h1 run a forward ahead for pairs. Ranks of tp with the same experts add up gradients, which
    arrive in a buffer, without dp, too."""
    config = config_of(layout, with_experts())
    full = fullest(peaks(analyse(config), H100)).total
    assert ShortPlans(config, H100).peak_bytes() == pytest.approx(full, rel=0.01)


def test_reductions_that_no_period_ends():
    """A bound of short plans is not above the step, where some of the micro-batches are not reduced."""
    base = with_experts("train.global_batch_size=48", "model.moe_every=2", "model.seq_len=512",
                        "precision.grad_dtype=bf16")
    layout = Layout(1, 2, 2, "dp-pp-tp", "v-half", 2, 2, stage=2, shard_size=2, reduce_every=3,
                    policy="selective", offload_optimizer=True)
    bounds, config = Bounds(base, H100), config_of(layout, base)
    true_s = ShortPlans(config, H100).step_s()
    limited_s = ShortPlans(config, H100).step_s(limit=1.02 * true_s, microbatch_s=bounds.microbatch_s(layout))
    assert limited_s == pytest.approx(true_s)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-min", "interleaved"])
def test_many_exchanges(name):
    """Exchanges take time in each of many micro-batches."""
    base = with_experts("train.global_batch_size=92")
    layout = Layout(1, 3, 4, "dp-pp-tp", name, SCHEDULES[name].virtual or 2, shard_size=4, policy="full",
                    ep=4)
    assert steady_count(name, 3, 23) < 23
    config = config_of(layout, base)
    assert short_s(config, H100) == pytest.approx(full_s(config, H100), rel=0.005)


def test_parts_of_a_step():
    config = config_of(Layout(1, 2, 4, schedule="interleaved", virtual_stages=2, shard_size=4, ep=4),
                       with_experts("train.global_batch_size=12"))
    parts = ShortPlans(config, H100).parts()
    assert parts.ep_s > 0.01 * parts.step_s and 0 < parts.bubble < 0.5


@pytest.mark.parametrize("layout", [
    Layout(1, 3, 2, "pp-dp-tp", "interleaved", 2, 2, False, 1, 2, None, None, "full"),
    Layout(4, 3, 8, "dp-pp-tp", "interleaved", 2, 1, True, 0, 8, None, None, "full", offload_optimizer=True)])
def test_a_last_turn_that_is_shorter(layout):
    """Where p does not divide the micro-batches, interleaved runs the last unit's last forwards before their
    backwards: they are computed again."""
    base = threed.load("configs/gpt2-small.yaml", ["train.global_batch_size=64", "model.layers=12"])
    hardware, config = Hardware.parse("h100-sxm"), config_of(layout, base)
    assert config.num_microbatches % layout.pp
    assert short_s(config, hardware) == pytest.approx(full_s(config, hardware), rel=0.005)


@pytest.mark.parametrize("name, layers", [("llama3-8b", 8), ("gpt2-small", 6)])  # untied, and tied
def test_time_and_memory(name, layers):
    """Other times than the plan's: the search would rank other layouts than those that will run."""
    base = threed.load(f"configs/{name}.yaml", [f"model.layers={layers}", "train.global_batch_size=32",
                                                *QUIET])
    rows = list(compared(base, H100, 5, 20, 8))
    errors = sorted(row.error for row in rows)
    assert errors[len(errors) // 2] < 0.001 and errors[-1] < 0.02, max(rows, key=lambda row: row.error)
    assert all(0.99 < row.fast_bytes / row.full_bytes < 1.01 for row in rows)


@pytest.mark.parametrize("name", schedules())
@pytest.mark.parametrize("often", [False, True], ids=["once", "often"])
def test_many_microbatches(name, often):
    """Short plans stand for many micro-batches."""
    base = threed.load("configs/llama3-8b.yaml", ["model.layers=10", "train.global_batch_size=46", *QUIET])
    layout = Layout(4, 3, 2, schedule=name, virtual_stages=SCHEDULES[name].virtual or 2, shard_size=2,
                    stage=2 if often else 1, reduce_every=1 if often else None, policy="full")
    assert steady_count(name, 3, 23) < 23
    config = config_of(layout, base)
    assert short_s(config, H100) == pytest.approx(full_s(config, H100), rel=0.01)

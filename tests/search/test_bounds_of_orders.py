"""Bounds of a search, order by order: what a position holds, and what it gathers, against its plan."""

from __future__ import annotations

from operator import le

import pytest

import threed
from tests.layouts import H100, QUIET, full_s
from threed.base.remember import remembering
from threed.layout_search.bounds import Bounds
from threed.layout_search.layout import Layout, config_of, schedules
from threed.layout_search.short_plan import ShortPlans, priced, short_plan
from threed.prediction.contention import step
from threed.prediction.hardware import Hardware
from threed.prediction.peak import peaks
from threed.program.effects import effects
from threed.program.instruction import Op
from threed.schedules.orders import SCHEDULES

MODELS = {"dense": ["model.name=llama3-8b"], "tied": ["model.name=llama3-8b", "model.tie_embeddings=true"],
          "experts": ["model.name=mixtral-8x7b"]}


@pytest.fixture(autouse=True)
def shared():
    with remembering():
        yield


def base_of(model: str, *more: str):
    return threed.load("configs/llama3-8b.yaml", ["model.layers=12", "model.seq_len=16384",
                                                  "train.global_batch_size=24", *QUIET, *MODELS[model],
                                                  *more])


def layout_of(schedule: str, model: str, **more) -> Layout:
    ep = 2 if model == "experts" else 1
    return Layout(1, 4, 2, schedule=schedule, virtual_stages=SCHEDULES[schedule].virtual or 2, ep=ep,
                  **{"shard_size": 2, **more})


@pytest.mark.parametrize("schedule", schedules())
@pytest.mark.parametrize("policy, away", [("none", False), ("selective", False), ("full", False),
                                          ("full", True)])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_held(model, policy, away, schedule):
    """The last unit is computed again where its backward does not follow at once, and halves of backwards
    leave operands to others: a bound that counted neither was above the plan, or a seventh of it."""
    base = base_of(model)
    layout = layout_of(schedule, model, policy=policy, offload_activations=away).of_activations()
    bounds, config = Bounds(base, H100), config_of(layout, base)
    rows = peaks(short_plan(config, config.num_microbatches), H100)
    planned = [row.total - row.fixed_bytes for row in rows]
    taken = bounds.taken_bytes(layout)
    for held in (bounds.saved_bytes(layout), bounds.working_bytes(layout)):
        assert all(size + taken <= row for size, row in zip(held, planned, strict=True))
    assert max(held) + taken > 0.7 * max(planned)


@pytest.mark.parametrize("schedule", schedules())
@pytest.mark.parametrize("residency", [1, 2, "stage", "step"])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_sent(model, residency, schedule):
    """Gathers and reductions over dp, one after another: those of the busiest position, as in its plan; and
    computation takes longer beside them."""
    base = base_of(model)
    layout = layout_of(schedule, model, policy="full", stage=3, residency=residency, reduce_every=1)
    analysis = short_plan(config_of(layout, base), 12)
    price = priced(analysis, H100)
    sent = [sum(price(position, item) for item in program if item.op in (Op.GATHER, Op.REDUCE)
                and effects(item, analysis.table, position).lane == "dp")
            for position, program in enumerate(analysis.plan.programs["train"])]
    bounds, step_s = Bounds(base, H100), step(analysis, price, H100).total_s
    assert 0.8 * max(sent) < bounds.sent_s(layout, bounds.filled_s(layout)) <= 1.000001 * step_s
    alike = ShortPlans(config_of(layout.of_activations(), base), H100)
    assert alike.least_s(bounds.microbatch_s(layout)) <= 1.000001 * step_s


@pytest.mark.parametrize("schedule", schedules())
@pytest.mark.parametrize("stage, residency, every", [
    (1, None, None), (2, None, 1), (2, None, "step"), (3, 1, "step"), (3, "stage", 1), (3, "step", "step")])
@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_what_stays(model, away, stage, residency, every, schedule):
    """Whole gradients of several stages wait at a time where their backwards take turns; but breadth-first,
    and with few micro-batches, one stage ends before another begins. A tied embedding is gathered once.
    Gradients that go to the host, and those that are cast, have buffers."""
    for size in (1, 3):  # sequences of a micro-batch: 12 micro-batches, and as many as positions
        base = base_of(model, "model.layers=24", f"precision.reduce_dtype={'bf16' if size == 1 else 'fp32'}")
        layout = layout_of(schedule, model, stage=stage, residency=residency, reduce_every=every,
                           offload_optimizer=away, micro_batch_size=size)
        if SCHEDULES[schedule].fills(layout.pp, 12 // size):
            planned = ShortPlans(config_of(layout, base), H100).fixed_bytes()
            bound = Bounds(base, H100).fixed_bytes(layout)
            assert all(map(le, bound, planned)) and max(bound) > 0.6 * max(planned)


@pytest.mark.parametrize("hardware, model, layout", [
    ("a100-sxm,adapter_gbps=25", "dense", Layout(4, 3, 2, "dp-pp-tp", sequence_parallel=True, stage=0)),
    ("h100-sxm", "experts", Layout(1, 4, 8, schedule="zb-v", virtual_stages=2, micro_batch_size=2,
                                        policy="full", stage=0, cp=2, cp_form="heads", ep=8))],
    ids=["messages in turn", "another is busiest"])
def test_least_by_few_micro_batches(hardware, model, layout):
    """Where three positions wait for messages in turn, three more micro-batches are slower than the next
    three; and at first the busiest position may have time left."""
    machine = Hardware.parse(hardware)
    base = base_of(model, "model.layers=16", "train.global_batch_size=384")
    config = config_of(layout, base)
    short, analysis = ShortPlans(config, machine), short_plan(config, config.num_microbatches)
    price = priced(analysis, machine, (Op.GATHER, Op.REDUCE, Op.CLIP, Op.STEP))
    whole_s = step(analysis, price, machine).total_s
    assert 0.7 * whole_s < short.least_s(Bounds(base, machine).microbatch_s(layout)) <= 1.0001 * whole_s


def small(model: str, *more: str):
    return base_of(model, "model.layers=13", "model.seq_len=4096", "train.global_batch_size=48", *more)


def test_least_of_updates_that_differ():
    """Whole matrices that go to their owners are a part of the update: each ZeRO stage sends others."""
    machine = Hardware.parse("h100-sxm,exchange_efficiency=0.3")
    base = small("experts", "optimizer.name=muon")
    layout = Layout(4, 4, 8, schedule="zb-v", virtual_stages=2, sequence_parallel=True, stage=3, shard_size=8,
                    residency="step", policy="selective")
    alike = ShortPlans(config_of(layout.of_activations(), base), machine)
    least_s = alike.least_s(Bounds(base, machine).microbatch_s(layout))
    assert least_s <= full_s(config_of(layout, base), machine)


def test_traffic_that_more_micro_batches_hide():
    """Of a step of two micro-batches more traffic is exposed than of one of six."""
    machine, base = Hardware.parse("a100-sxm,adapter_gbps=25"), small(
        "dense", "model.lora_rank=8", "model.lora_targets=[q_proj]")
    layout = Layout(8, 1, 8, stage=3, shard_size=8, residency="stage")
    config, bounds = config_of(layout, base), Bounds(base, machine)
    alike, whole_s = ShortPlans(config_of(layout.of_activations(), base), machine), full_s(config, machine)
    limit, each_s = 0.98 * whole_s, bounds.microbatch_s(layout)
    assert limit < ShortPlans(config, machine).step_s(alike, limit, each_s) <= 1.002 * whole_s

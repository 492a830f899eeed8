"""fp16 with a dynamic loss scale: an overflow anywhere skips the step everywhere, and costs a step and
nothing else."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tests.harness import batches, tiny
from threed.comm.group import Comm
from threed.engine.diagnose import find_nonfinite
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.features.zero.clip import Clipped
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import BACKWARDS, Op, Slot
from threed.schema import Config

FP16 = ["model.layers=2", "precision.dtype=fp16", "precision.initial_loss_scale=1024"]


class Seen(NamedTuple):
    """One step on one rank."""

    clipped: Clipped
    scale: float  # of the next step
    updates: int
    lr: float
    moved: tuple[bool, ...]  # weights as they are gathered or read, master weights and moments


def state_of(engine: Engine) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    states = engine.states.values()
    return [s.weights.at_home.clone() for s in states], [
        t.clone() for s in states for t in (s.optimizer_state.master, *s.optimizer_state.buffers.values())]


def poison(engine: Engine, steps: dict[int, int], value: float) -> None:
    """Put a value into the gradient that this rank makes in micro-batch `steps[step]` of its last unit."""
    unit = max(engine.plan.table.units_of(engine.position))

    def wrap(handler):
        def handle(instruction, slots):
            handler(instruction, slots)
            if (instruction.unit, instruction.microbatch) == (unit, steps.get(engine.zero.step_number, -1)):
                state = engine.states[engine.plan.table.units[unit].parameters[0]]
                state.gradient.whole()[0] = value

        return handle

    for op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
        engine.handlers[op] = wrap(engine.handlers[op])


def run(config: Config, steps: int, rank: int = -1, at: dict[int, int] | None = None) -> list[list[Seen]]:
    """What each rank sees, by rank and step; on one rank gradients overflow in the steps `at` (step ->
    micro-batch)."""
    plan = make_plan(config)
    torch.set_num_threads(1)

    def work(comm: Comm) -> list[Seen]:
        engine, seen = Engine(Analysis(plan), comm), []
        if comm.rank == rank:
            poison(engine, at or {}, torch.inf)
        for step in range(steps):
            before = state_of(engine)
            clipped, _ = engine.train_step(batches(config, comm, step))
            moved = tuple(not all(map(torch.equal, a, b)) for a, b in zip(before, state_of(engine)))
            seen.append(Seen(clipped, engine.zero.scaler.scale, engine.zero.updates, engine.zero.lr, moved))
        return seen

    return run_loopback(plan, make_mesh(config), work)


MESH = ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2"]
CASES = {
    "stage-0": [*MESH, "zero.stage=0"], "stage-1": [*MESH, "zero.stage=1"],
    "stage-2": [*MESH, "zero.stage=2"],
    "stage-3": [*MESH, "zero.stage=3"],
    "sequence-parallel": [*MESH, "parallel.sequence_parallel=true", "zero.stage=3"],
    "split-backward": [*MESH, "parallel.schedule=zb-v", "zero.stage=2"],
    "groups": ["parallel.dp=4", "parallel.pp=2", "zero.shard_size=2", "zero.stage=2",
               "precision.grad_dtype=fp16"],
    "travels-in-fp16": [*MESH, "zero.stage=3", "precision.reduce_dtype=fp16"],
}


@pytest.mark.parametrize("rank", [1, 6])
@pytest.mark.parametrize("name", CASES)
def test_an_overflow_on_one_rank(name, rank):
    """Gradients overflow on one stage of one rank, in one micro-batch: every rank skips the step, or shards
    of one model are at different steps. With hysteresis 2 the second overflow halves the scale. Weights,
    moments, Adam's count and the learning rate stay where they were; the step goes on."""
    config = tiny(*FP16, *CASES[name], "optimizer.warmup_steps=10", "optimizer.clip_grad=1")
    assert config.num_microbatches > 1
    for seen in run(config, 5, rank, {1: 0, 3: config.num_microbatches - 1}):
        assert [step.clipped.finite for step in seen] == [True, False, True, False, True]
        assert [step.moved for step in seen] == [(step.clipped.finite,) * 2 for step in seen]
        assert [step.clipped.loss_scale for step in seen] == [1024, 1024, 1024, 1024, 512]
        assert [step.scale for step in seen] == [1024, 1024, 1024, 512, 512]
        assert [step.updates for step in seen] == [1, 1, 2, 2, 3]
        assert [step.lr for step in seen] == pytest.approx([2e-4, 2e-4, 3e-4, 3e-4, 4e-4])


@pytest.mark.parametrize("rank, unit, others", [
    (3, 1, MESH),  # what tp rank 0 counts for all: a bias
    # what the first shard group counts for all
    (7, 1, ["parallel.dp=8", "zero.shard_size=2", "zero.stage=3"]),
    (3, 4, MESH[:1] + MESH[2:]),  # what the first position counts for both: the tied embedding
])
def test_an_overflow_in_one_copy(rank, unit, others):
    """Copies that should be equal and are not (atomics on a GPU round as they please): one whose overflow is
    not counted steps with it, and its rank alone has other weights from then on."""
    config = tiny(*FP16, *others)
    plan = make_plan(config)

    def work(comm: Comm) -> bool:
        engine = Engine(Analysis(plan), comm)
        clip = engine.handlers[Op.CLIP]

        def handle(instruction, slots):
            if comm.rank == rank:
                state = engine.states[unit]
                copies = [segment for segment in state.part.segments()
                          if not segment.axes or config.parallel.tp == 1 or unit == 4]
                state.part.range(state.gradient.values, copies[-1])[-1] = torch.nan
            clip(instruction, slots)

        engine.handlers[Op.CLIP] = handle
        return engine.train_step(batches(config, comm, 0))[0].finite

    assert not any(run_loopback(plan, make_mesh(config), work))


@pytest.mark.parametrize("name", CASES)
def test_what_comes_after_a_skipped_step(name):
    """A skipped step that leaves something behind (a sum that the next adds to, half an update) makes the
    next ones differ from those of a run that never saw that step's data."""
    config = tiny(*FP16, *CASES[name])
    plan = make_plan(config)

    def work(comm: Comm, order: tuple[int, ...], spoilt: int) -> list[tuple[float, float]]:
        engine = Engine(Analysis(plan), comm)
        if comm.rank == 0:
            poison(engine, {spoilt: 0}, torch.nan)
        return [(clipped.loss, clipped.grad_norm) for step in order
                for clipped in [engine.train_step(batches(config, comm, step))[0]] if clipped.finite]

    runs = [run_loopback(plan, make_mesh(config), lambda comm, order=order,
                         spoilt=spoilt: work(comm, order, spoilt))[0]
            for order, spoilt in (((0, 9, 1, 2), 1), ((0, 1, 2), -1))]
    assert runs[0] == runs[1] and len(runs[0]) == 3


def test_a_huge_scale_finds_its_level():
    """No injection: with a scale of 2^28 every fp16 gradient overflows until it is halved often enough; the
    loss does not, and is the same whatever the scale."""
    config = tiny(*FP16, *MESH, "zero.stage=2", f"precision.initial_loss_scale={2**28}",
                  "precision.hysteresis=1")
    seen = run(config, 20)[0]
    skipped = sum(not step.clipped.finite for step in seen)
    assert 2 < skipped < 18 and seen[-1].scale == 2.0 ** (28 - skipped) and seen[-1].updates == 20 - skipped
    assert not any(step.clipped.finite for step in seen[:3])
    assert sum(step.clipped.finite for step in seen[-6:]) > 3
    assert all(torch.isfinite(torch.tensor(step.clipped.loss)) for step in seen)


def test_the_scale_is_in_no_number():
    """A scale that reaches the norm, the clipping or the update. fp32 is exact under powers of two: equal to
    the bit."""
    runs = [run(tiny("model.layers=2", *MESH, f"precision.loss_scale={scale}", "optimizer.clip_grad=0.5"),
                3)[0]
            for scale in (1, 1024)]
    assert [step.clipped.loss for step in runs[0]] == [step.clipped.loss for step in runs[1]]
    assert [step.clipped.grad_norm for step in runs[0]] == [step.clipped.grad_norm for step in runs[1]]
    assert [step.clipped.loss_scale for step in runs[1]] == [1024] * 3


def test_small_gradients_survive():
    """What the scale is for: with weights so small that fp16 gradients vanish, only the scaled run learns."""
    def norm(*overrides: str) -> float:
        config = tiny("model.layers=2", "model.init_std=1e-4", "model.seq_len=64", *overrides)
        return run(config, 1)[0][0].clipped.grad_norm

    exact = norm()
    scaled, plain = (norm("precision.dtype=fp16", f"precision.loss_scale={scale}") for scale in (4096, 1))
    assert scaled == pytest.approx(exact, rel=5e-3) and abs(plain - exact) > 10 * abs(scaled - exact)


@pytest.mark.parametrize("schedule, op", [("1f1b", Op.BACKWARD), ("zb-h1", Op.BACKWARD_INPUT),
                                          ("zb-h1", Op.BACKWARD_WEIGHT)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_diagnosis_finds_either_half(schedule, op, stage):
    """A gradient that is first not finite in a half of a backward was blamed on the hardware."""
    config = tiny("model.layers=4", "parallel.dp=2", "parallel.pp=2", f"parallel.schedule={schedule}",
                  f"zero.stage={stage}")
    plan, place = make_plan(config), (2, 1)  # unit, micro-batch

    def work(comm: Comm) -> str:
        engine = Engine(Analysis(plan), comm)
        handler = engine.handlers[op]

        def handle(instruction, slots):
            handler(instruction, slots)
            if (instruction.unit, instruction.microbatch) == place and comm.rank == 1:
                if op == Op.BACKWARD_INPUT:
                    slots.get(Slot("grad", 1, 1))[:] = torch.nan
                else:
                    engine.states[2].gradient.whole()[5] = torch.nan

        engine.handlers[op] = handle
        clipped, _ = engine.train_step(batches(config, comm, 0))
        assert not clipped.finite
        return find_nonfinite(engine, batches(config, comm, 0))

    assert set(run_loopback(plan, make_mesh(config), work)) == {
        f"first in the gradient of u2 (blocks.1), micro-batch 1, {op} on rank 1 (pp0 dp1 tp0)"}
    assert op in BACKWARDS


def test_the_diagnosis_finds_sums():
    """Gradients that are finite on every rank and overflow on their way (fp16 holds 65504) were blamed on the
    hardware."""
    config = tiny("model.layers=2", "parallel.dp=2", "precision.dtype=fp16", "precision.reduce_dtype=fp16",
                  "precision.loss_scale=1")
    plan = make_plan(config)

    def work(comm: Comm) -> str:
        engine = Engine(Analysis(plan), comm)
        handler = engine.handlers[Op.BACKWARD]

        def handle(instruction, slots):
            handler(instruction, slots)
            if instruction.unit == 1:
                engine.states[1].gradient.whole()[3] = 70000.0

        engine.handlers[Op.BACKWARD] = handle
        clipped, _ = engine.train_step(batches(config, comm, 0))
        assert not clipped.finite
        return find_nonfinite(engine, batches(config, comm, 0))

    assert set(run_loopback(plan, make_mesh(config), work)) == {
        "first in the sum over ranks of the gradient of p1 (blocks.0) on rank 0 (pp0 dp0 tp0)"}

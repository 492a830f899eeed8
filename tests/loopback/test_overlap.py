"""The host's updates at the head of the next step (offload.overlap=next) and at the end of the step (none)
are the same training, to the bit; and that without offload."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness import EXPERTS, MICROBATCHES, SETTINGS, batches, tiny, why_refused
from tests.late import be_late
from tests.loopback.test_checkpoint import named
from tests.loopback.test_checkpoint import saved as save
from threed.checkpoint.load import resume
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.features.zero.storage import Storage
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import Instruction, Op
from threed.program.plan import Plan
from threed.schedules.orders import SCHEDULES
from threed.schema import Config

STEPS = 6
SMALL = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16", "train.eval_every=1", "optimizer.warmup_steps=3", "optimizer.lr=0.01",
         "train.steps=6", "checkpoint.every=1"]
DP, PP = "parallel.dp=2", "parallel.pp=2"
CPU, BOTH = ["offload.optimizer=cpu"], ["offload.optimizer=cpu", "offload.parameters=cpu"]
NVME, NVME_BOTH = ["offload.optimizer=nvme"], ["offload.optimizer=nvme", "offload.parameters=nvme"]
CLIPPED, HALF = "optimizer.clip_grad=0.1", "offload.ratio=0.5"
ONCE, HOST = "zero.reduce_every=step", "offload.gradients=host"
ZERO_1, ZERO_2, ZERO_3 = ("zero.stage=1",), ("zero.stage=2", ONCE), ("zero.stage=3", ONCE)
FP16 = ["precision.dtype=fp16", f"precision.initial_loss_scale={2**22}", "precision.hysteresis=1",
        "precision.loss_scale_window=2"]
LORA = ["model.family=llama", "model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false",
        "model.lora_rank=2"]


class Cell(NamedTuple):
    """A config, and what comes between its steps: `evaluate`, `save`, or `resume`, from what was saved."""

    usual: Sequence[str]
    offload: Sequence[str]
    between: str = ""

    def config(self, path: Path, *others: str) -> Config:
        path.mkdir(exist_ok=True)
        files = [f"offload.nvme_path={path}"] if any(text.endswith("=nvme") for text in others) else []
        batch = [] if any("global_batch" in text for text in self.usual) else ["train.global_batch_size=6"]
        return tiny(*SMALL, *batch, f"run.dir={path}", *self.usual, *others, *files)


CELLS = {
    **{f"clipped-{stage}-{tier}": Cell([DP, *zero, CLIPPED], offload)
       for stage, zero, tier, offload in (
           (0, ("zero.stage=0",), "cpu", CPU), (1, ZERO_1, "cpu", CPU), (1, ZERO_1, "nvme", NVME),
           (2, ZERO_2, "cpu", CPU), (2, ZERO_2, "half", [*CPU, HALF]), (3, ZERO_3, "cpu", CPU),
           (3, ZERO_3, "both", BOTH), (3, ZERO_3, "half", [*BOTH, HALF]), (3, ZERO_3, "disk", NVME_BOTH))},
    **{f"{between}-{stage}-{tier}": Cell([DP, PP, *zero, CLIPPED], offload, between)
       for between in ("evaluate", "save", "resume")
       for stage, zero, tier, offload in (
           (1, ZERO_1, "cpu", CPU), (2, ZERO_2, "half", [*CPU, HALF]), (3, ZERO_3, "both", BOTH),
           (3, ZERO_3, "disk", NVME_BOTH))},
    **{f"overflow-{stage}-{tier}": Cell([DP, PP, *zero, *FP16, CLIPPED], offload, "evaluate")
       for stage, zero, tier, offload in (
           (0, ("zero.stage=0",), "cpu", CPU), (1, ZERO_1, "nvme", NVME), (2, ZERO_2, "half", [*CPU, HALF]),
           (3, ZERO_3, "both", BOTH))},
    **{f"schedule-{name}": Cell([DP, PP, *ZERO_3, CLIPPED, *texts,
                                 f"train.global_batch_size={2 * MICROBATCHES.get(name, 4)}"], BOTH)
       for name in (*SCHEDULES, "auto", "file")
       for texts in [SETTINGS["schedule"].get(name, [f"parallel.schedule={name}"])]},
    "groups-of-3": Cell([DP, *ZERO_3, CLIPPED, "parallel.schedule=vertical", "parallel.group=3"], BOTH),
    "experts": Cell([DP, *ZERO_3, CLIPPED, *EXPERTS, "parallel.ep=2"], BOTH, "evaluate"),
    "experts-half": Cell([DP, *ZERO_2, *EXPERTS, "parallel.ep=2"], [*CPU, HALF]),
    "lora": Cell([DP, PP, *ZERO_3, "optimizer.clip_grad=0.001", *LORA], BOTH, "evaluate"),
    "lora-1": Cell([DP, *ZERO_1, *LORA], CPU),
    "groups": Cell(["parallel.dp=4", "zero.shard_size=2", *ZERO_3, "train.global_batch_size=8"], BOTH),
    "persistent": Cell([DP, *ZERO_3, "zero.persist_below=100"], BOTH),
    "recomputed": Cell([DP, PP, *ZERO_3, "activation.policy=full", "activation.offload=cpu"], BOTH),
    "prefetch": Cell([DP, *ZERO_3, "zero.prefetch=3", "zero.residency=2", "model.layers=4"], BOTH),
    "untied": Cell([DP, PP, *ZERO_1, "model.tie_embeddings=false"], CPU),
    "tp": Cell(["parallel.tp=2", "parallel.sequence_parallel=true", *ZERO_1], CPU),
    "lion": Cell([DP, *ZERO_2, "optimizer.name=lion", "model.bias=false"], CPU),
    "bf16": Cell([DP, *ZERO_2, CLIPPED, "precision.dtype=bf16"], CPU, "evaluate"),
}
# The host adds what each reduction gives. (The device adds each rank's part to the sum, in another order.)
ADDED = {
    "2": Cell([DP, "zero.stage=2", CLIPPED], [*CPU, HOST, "zero.reduce_every=1"], "evaluate"),
    "2-pp": Cell([DP, PP, "zero.stage=2"], [*CPU, HOST, "zero.reduce_every=2"], "resume"),
    "3": Cell([DP, "zero.stage=3", CLIPPED], [*BOTH, HOST, "zero.reduce_every=1"], "save"),
    "3-half": Cell([DP, PP, "zero.stage=3"], [*BOTH, HALF, HOST, "zero.reduce_every=1"]),
    "3-disk": Cell([DP, "zero.stage=3"], [*NVME_BOTH, HOST, "zero.reduce_every=1"]),
    "overflow": Cell([DP, "zero.stage=2", *FP16], [*CPU, HOST, "zero.reduce_every=1"], "evaluate"),
    "experts": Cell([DP, "zero.stage=2", *EXPERTS, "parallel.ep=2"], [*CPU, HOST, "zero.reduce_every=1"]),
    "lora": Cell([DP, PP, "zero.stage=3", *LORA], [*BOTH, HOST, "zero.reduce_every=1"]),
    "schedule": Cell([DP, PP, "zero.stage=3", "parallel.schedule=zb-v"],
                     [*BOTH, HOST, "zero.reduce_every=1"]),
    "groups": Cell(["parallel.dp=4", "zero.shard_size=2", "zero.stage=2", "train.global_batch_size=8"],
                   [*CPU, HOST, "zero.reduce_every=1"]),
}


def trained(config: Config, between: str) -> list[Any]:
    """Of each rank: the numbers of each step, and the weights and the optimizer's state after the last."""
    saved: list[Path] = []
    numbers: list[list[Any]] = []
    if between == "resume":
        *numbers, _ = [run(config, "", range(STEPS // 2), saved), None]
        config, numbers = named(config, saved[0]), numbers[0]
    rest = run(config, between, range(len(saved) * STEPS // 2, STEPS), [])
    return [(before + after, state) for before, (after, state) in zip(
        [seen for seen, _ in numbers] or [[]] * len(rest), rest, strict=True)]


def run(config: Config, between: str, steps: range, saved: list[Path]) -> list[Any]:
    plan, resumes = make_plan(config), steps.start > 0

    def work(comm: Comm) -> tuple[list[Any], dict[Any, list[float]]]:
        engine, seen = Engine(Analysis(plan), comm), list[Any]()
        zero = engine.zero
        if resumes:
            resume(config, zero)
        for step in steps:
            clipped, _ = engine.train_step(batches(config, comm, step))
            seen.append((clipped.loss, str(clipped.grad_norm), clipped.finite, zero.scaler.scale, zero.lr,
                         zero.updates, zero.step_number))
            if between == "evaluate" and step % 2:
                seen.append(engine.run("evaluate", batches(config, comm, 9, train=False))[0].loss)
            if between == "save" and step % 2:
                save(engine)
        path = save(engine) if steps.stop < STEPS else None
        if path is not None and comm.rank == 0:
            saved.append(path)
        engine.settle()
        state = {(unit, kind): whole.float().tolist() for unit, state in engine.states.items()
                 for kind, whole in state.kept().items()}
        engine.close()
        return seen, state

    return run_loopback(plan, make_mesh(config), work)


def same(runs: Sequence[list[Any]]) -> None:
    """To the bit, and with numbers that are some: all of them, whichever rank has them."""
    first, *others = runs
    for other in others:
        assert [seen for seen, _ in other] == [seen for seen, _ in first]
        for (_, mine), (_, theirs) in zip(first, other, strict=True):
            assert mine.keys() == theirs.keys()
            wrong = [key for key, values in mine.items() if values != theirs[key]]
            assert not wrong, wrong
    assert any(any(values) for values in first[0][1].values())


# Each value of each thing that may go wrong; `make matrix` has all cells.
FEW = {"clipped-0-cpu", "clipped-2-half", "clipped-3-disk", "evaluate-2-half", "save-3-disk", "resume-1-cpu",
       "resume-3-both", "overflow-1-nvme", "overflow-3-both", "schedule-1f1b", "schedule-zb-v",
       "schedule-vertical", "schedule-dualpipe-v", "experts-half", "lora", "groups", "persistent",
       "recomputed", "untied", "bf16", "adds 2-pp", "adds 3-half", "adds overflow"}


def some(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", some([*CELLS, *(f"adds {name}" for name in ADDED)]))
def test_next_is_none(name, tmp_path):
    """At the head of a step or at its end: the same bits on any device; with fake GPUs, no race. (The tests
    below add the bits of no offload, which another kernel steps on a GPU: they stay on the CPU.)"""
    cell = ADDED[name.removeprefix("adds ")] if name.startswith("adds ") else CELLS[name]
    same([trained(cell.config(tmp_path / when, *cell.offload, f"offload.overlap={when}"), cell.between)
          for when in ("next", "none")])


@pytest.mark.parametrize("name", some(CELLS))
def test_to_the_bit(name, tmp_path):
    """A stale weight, an update that is lost, taken twice, or taken with another step's rate, scale or
    factor."""
    cell = CELLS[name]
    ways = [[*cell.offload, f"offload.overlap={when}"] for when in ("next", "none")]
    runs = [trained(cell.config(tmp_path / str(number), *way), cell.between)
            for number, way in enumerate([*ways, []])]
    assert "next" in ways[0][-1] and not any(isinstance(each, str) for each in runs[0])
    same(runs)
    steps = [each for each in runs[0][0][0] if isinstance(each, tuple)]
    assert len(steps) == STEPS and len({loss for loss, *_ in steps}) == STEPS
    assert {finite for _, _, finite, *_ in steps} == ({True, False} if "overflow" in name else {True})
    limit = cell.config(tmp_path).optimizer.clip_grad
    assert not limit or any(float(norm) > limit for _, norm, *_ in steps)


@pytest.mark.parametrize("name", ADDED)
def test_the_host_adds(name, tmp_path):
    """At the head of a step or at its end: the same bits; within rounding those of the device; and to the bit
    those where there is nothing to add."""
    cell = ADDED[name]

    def each(*ways: Sequence[str]) -> list[list[Any]]:
        return [trained(cell.config(tmp_path / str(number), *way), cell.between)
                for number, way in enumerate(ways)]

    runs = each([*cell.offload, "offload.overlap=next"], [*cell.offload, "offload.overlap=none"],
                cell.offload[-1:])
    same(runs[:2])
    for (mine, _), (theirs, _) in zip(runs[0], runs[2], strict=True):
        for ours, other in zip(mine, theirs, strict=True):
            ours, other = (each if isinstance(each, tuple) else (each,) for each in (ours, other))
            assert ours[0] == pytest.approx(other[0], rel=1e-5) and ours[2:] == other[2:]
            assert [*map(float, ours[1:2])] == pytest.approx([*map(float, other[1:2])], rel=1e-4, nan_ok=True)
    same(each([*cell.offload[:-1], ONCE], [ONCE]))


@pytest.mark.parametrize("name", ["evaluate-1-cpu", "resume-3-both", "overflow-2-half", "schedule-zb-v",
                                  "untied", "prefetch"])
def test_late_and_copied(name, tmp_path, monkeypatch):
    """The same, where lanes are late and the tiers are two memories, as on a GPU."""
    cell = CELLS[name]
    quiet = trained(cell.config(tmp_path / "quiet"), cell.between)
    monkeypatch.setattr(Storage, "one_memory", False)
    be_late(monkeypatch, seed=7)
    same([quiet, trained(cell.config(tmp_path / "late", *cell.offload), cell.between)])


# ---------------------------------------------------------------- what is refused


def plan_of(*others: str) -> Plan:
    return make_plan(tiny(*SMALL, DP, "model.tie_embeddings=false", "train.global_batch_size=4", *others))


def first(program: Sequence[Instruction], op: Op, unit: int, kind: str | None = None) -> int:
    return next(index for index, item in enumerate(program)
                if (item.op, item.unit) == (op, unit) and kind in (None, item.kind))


STALE = "with the gradient of the step before, after an instruction of this step has read it"


@pytest.mark.parametrize("others, moved, op, slot", [
    ([*CPU, "zero.stage=0"], Op.FETCH, Op.FORWARD, "param p1"),
    ([*CPU, "zero.stage=1"], Op.FETCH, Op.GATHER, "pshard p1"),
    ([*CPU, "zero.stage=3"], Op.FETCH, Op.GATHER, "pshard p1"),
    ([*BOTH, "zero.stage=3"], Op.STEP, Op.FETCH, "host_pshard p1"),
    ([*CPU, "zero.stage=3", "zero.persist_below=100000"], Op.FETCH, Op.GATHER, "pshard p1")], ids=str)
def test_a_weight_is_not_read_before_its_update(others, moved, op, slot):
    """FORWARD, GATHER or FETCH of a unit in front of the update of the step before."""
    plan = plan_of(*others)

    def edit(program: list[Instruction]) -> None:
        update, read = first(program, moved, 1), first(program, op, 1)
        assert update < read
        program.insert(read, program.pop(update))  # behind the one that reads

    assert f"updates '{slot}' {STALE}" in why_refused(plan, edit)


@pytest.mark.parametrize("name", ["train", "settle"])
@pytest.mark.parametrize("edit, words", [
    (lambda program: program.pop(first(program, Op.STEP, 1)), "STEP runs for|is not alive|has lost|behind"),
    (lambda program: program.pop(first(program, Op.OFFLOAD, 1)), "reads 'host_gprev p1', which is not alive"),
    (lambda program: program.insert(first(program, Op.STEP, 1), program[first(program, Op.STEP, 1)]),
     "reads 'host_gprev p1', which is not alive"),
    (lambda program: program.insert(0, program.pop(first(program, Op.STEP, 1))),
     "reads 'host_gprev p1', which is not alive"),
    (lambda program: program.insert(0, program.pop(first(program, Op.FETCH, 1))),
     "reads 'host_pshard p1', which is not alive")], ids=range(5))
def test_each_update_once_and_in_order(name, edit, words):
    assert re.search(words, why_refused(plan_of(*CPU, "zero.stage=1"), edit, name))


def test_no_update_before_there_is_one():
    """`enter` has no gradients of a step before; and no other program steps those that wait."""
    plan = plan_of(*CPU, "zero.stage=1", "checkpoint.every=0")
    down = [Instruction(Op.OFFLOAD, 1, kind="gprev"), Instruction(Op.STEP, 1, age="prev")]
    for name in ("enter", "evaluate"):
        assert "'gprev p1', which is not alive" in why_refused(
            plan, lambda program: program.__setitem__(slice(0, 0), down), name)


def test_a_gradient_does_not_leave_before_its_norm():
    """CLIP reads it on the device; and it waits there, where the next program takes it."""
    plan = plan_of(*CPU, "zero.stage=1", "offload.overlap=none")

    def early(program: list[Instruction]) -> None:
        reduced, down = first(program, Op.REDUCE, 1), first(program, Op.OFFLOAD, 1)
        program.insert(reduced + 1, program.pop(down))

    assert "'gshard p1', which is not alive" in why_refused(plan, early)
    later = plan_of(*CPU, "zero.stage=1")
    assert "leaves 'host_gprev p1' behind" in why_refused(
        later, lambda program: program.append(Instruction(Op.OFFLOAD, 1, kind="gprev")))


# ---------------------------------------------------------------- whoever reads weights between two steps


@pytest.mark.parametrize("offload", [CPU, BOTH], ids=" ".join)
def test_settle_is_once(offload, tmp_path):
    """What a program leaves is applied before any other, once; then there is nothing to apply."""
    config = tiny(*SMALL, DP, *ZERO_3, *offload, "train.global_batch_size=4", "run.verify_every=2")
    plan = make_plan(config)

    def work(comm: Comm) -> list[str]:
        engine, names = Engine(Analysis(plan), comm), list[str]()
        original = engine._run

        def spied(name: str, batch: Any) -> Any:
            names.append(name)
            return original(name, batch)

        engine._run = spied  # pyright: ignore[reportAttributeAccessIssue]
        for step in range(3):
            engine.train_step(batches(config, comm, step))
        engine.run("evaluate", batches(config, comm, 9, train=False))
        engine.settle()
        engine.train_step(batches(config, comm, 3))
        engine.rehearse(batches(config, comm, 4))
        engine.train_step(batches(config, comm, 4))
        engine.snapshot()
        engine.settle()
        assert engine.zero.waiting is None and engine.zero.updates == engine.zero.step_number == 5
        engine.close()
        return names

    for names in run_loopback(plan, make_mesh(config), work):
        assert names == ["enter", "train", "train", "evaluate", "settle", "enter", "verify", "settle",
                         "enter", "settle", "snapshot"]


def test_a_step_that_is_no_next_one():
    """Without an optimizer on the host there is one program of a step, and nothing to settle."""
    for others in ([], [*CPU, "offload.overlap=none"]):
        plan = plan_of(*others, "zero.stage=1")
        assert not {"enter", "settle"} & plan.programs.keys() and not plan.table.waiting(0)
    assert {"enter", "settle", "train"} <= plan_of(*CPU, "zero.stage=1").programs.keys()

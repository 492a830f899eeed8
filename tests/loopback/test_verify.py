"""Steps that are computed twice: the run is as without, to the bit, and a rank that computes wrongly once is
named."""

from __future__ import annotations

import copy
import itertools
import re
import socket
from collections.abc import Callable

import pytest
import torch

from tests.harness import (
    FILES,
    Ranks,
    batches,
    cell_config,
    collect,
    covering,
    drive,
    loopback,
    same_bits,
    tiny,
)
from threed.base.errors import RunError
from threed.comm.group import Comm
from threed.engine.diagnose import find_nonfinite
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.engine.verify import COLUMNS, Verifier, checksum
from threed.models.layers.experts import Routes
from threed.optim.muon import Muon
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import Instruction, Op, Slot
from threed.schema import Config
from threed.tensor import experts

SMALL = ["model.layers=3", "model.hidden=16", "model.heads=4", "model.seq_len=8", "run.verify_every=1"]
Break = Callable[[Engine], None]


def verified(config: Config, steps: int, broken: Break | None = None, exact: bool | None = None) -> Ranks:
    """As `harness.loopback`, but each step is computed twice. `broken` is done to each rank's engine."""
    plan = make_plan(config)
    torch.set_num_threads(1)

    def work(comm: Comm):
        engine = Engine(Analysis(plan), comm)
        verifier = Verifier(engine, exact)
        if broken is not None:
            broken(engine)

        def step(batch):
            verifier.rehearse(batch)
            return verifier.step(batch)

        results = drive(config, engine, comm, steps, step)
        assert verifier.verified == steps
        return results

    return collect(config, run_loopback(plan, make_mesh(config), work))


def twice(config: Config) -> Config:
    config = copy.deepcopy(config)
    config.run.verify_every = 1
    return config


# ---------------------------------------------------------------- the run is as without


@pytest.mark.parametrize("cell", [pytest.param(cell, marks=[pytest.mark.slow] * (number % 4 > 0), id=cell.id)
                                  for number, cell in enumerate(covering())])
def test_a_rehearsal_leaves_nothing_behind(cell):
    """A gradient that is counted twice, a buffer that is not given back, a moment that has moved: in any
    combination."""
    config = cell_config(cell, ranks=8)
    same_bits([loopback(config, 2), verified(twice(config), 2)])


@pytest.mark.parametrize("overrides", [
    ["offload.optimizer=cpu", "zero.stage=1"], ["offload.optimizer=cpu", "zero.stage=2"],
    ["offload.optimizer=cpu", "zero.stage=2", "offload.overlap=none"],
    ["offload.optimizer=cpu", "zero.stage=2", "offload.gradients=host", "zero.reduce_every=1"],
    ["offload.optimizer=cpu", "zero.stage=3", "offload.parameters=cpu", "offload.ratio=0.5"],
    ["offload.optimizer=nvme", FILES, "zero.stage=3", "parallel.schedule=zb-h1"],
    ["offload.optimizer=cpu", "zero.stage=2", "parallel.dp=4", "zero.shard_size=2", "zero.reduce_every=2"],
], ids=lambda overrides: "-".join(text.rpartition(".")[2] for text in overrides if text != FILES))
def test_updates_that_wait(overrides):
    """What waits from the step before is overwritten by the rehearsal, or stepped in it."""
    usual = ["parallel.pp=2", "parallel.dp=2", "train.steps=5"]
    config = tiny(*SMALL[:-1], *usual, *overrides)
    same_bits([loopback(config, 5), verified(twice(config), 5)])


@pytest.mark.parametrize("overrides", [["zero.stage=0"], ["zero.stage=3", "parallel.tp=2"],
                                       ["zero.stage=2", "offload.optimizer=cpu"]])
def test_turns_are_computed_twice(overrides):
    """A turn overwrites its matrix, and moments change in `begin`: the second of two has its own."""
    config = tiny(*SMALL[:-1], "parallel.dp=2", "optimizer.name=muon", *overrides)
    same_bits([loopback(config, 3), verified(twice(config), 3)])


def test_a_turn_that_differs(monkeypatch):
    """One element of one matrix, on its owner."""
    turn, calls = Muon.turn, itertools.count()

    def wrong(self, matrix, by):
        turned = turn(self, matrix, by)
        if next(calls) == 12:
            turned = turned.clone()
            turned[0, 0] += 1
        return turned

    monkeypatch.setattr(Muon, "turn", wrong)
    config = tiny(*SMALL[:-1], "parallel.dp=2", "zero.stage=1", "optimizer.name=muon")
    assert "first in the update of p" in message(twice(config), lambda engine: None)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_dynamic_loss_scale(stage):
    """A scale that is halved or doubled by the rehearsal, too. It begins so high that steps overflow."""
    config = tiny(*SMALL[:-1], "parallel.dp=2", "parallel.tp=2", f"zero.stage={stage}",
                  "precision.dtype=fp16",
                  f"precision.initial_loss_scale={2**24}", "precision.hysteresis=1",
                  "precision.loss_scale_window=1")

    def run(verify: bool) -> list:
        plan = make_plan(twice(config) if verify else config)

        def work(comm: Comm):
            engine, numbers = Engine(Analysis(plan), comm), []
            verifier = Verifier(engine)
            for step in range(6):
                if verify:
                    verifier.rehearse(batches(config, comm, step))
                clipped, _ = (verifier.step if verify else engine.train_step)(batches(config, comm, step))
                numbers.append((clipped.loss, str(clipped.grad_norm), clipped.finite,
                                engine.zero.scaler.scale,
                                engine.zero.updates))
            return numbers, {unit: state.optimizer_state.master.tolist()
                             for unit, state in engine.states.items()}

        return run_loopback(plan, make_mesh(config), work)

    usual, verified = run(False), run(True)
    assert usual == verified
    numbers = usual[0][0]
    assert len({scale for _, _, _, scale, _ in numbers}) > 2
    assert {finite for _, _, finite, _, _ in numbers} == {True, False}


def test_within_tolerance():
    """The comparison of a GPU, on a run that changes nothing."""
    config = tiny(*SMALL[:-1], "parallel.pp=2", "parallel.tp=2", "model.dropout=0.1")
    same_bits([loopback(config, 2), verified(twice(config), 2, exact=False)])


# ---------------------------------------------------------------- who computes wrongly is named

MESH = ["parallel.pp=2", "parallel.dp=2", "parallel.tp=2"]
RANK = 5  # of MESH: pp1 dp0 tp1


def flip(values: torch.Tensor, bit: int = 0) -> None:
    """Change one bit of one element."""
    with torch.no_grad():
        values.view(-1).view(torch.int32)[values.numel() // 2] ^= 1 << bit


def after(op: Op, unit: int, microbatch: int, do: Callable[[Engine, Instruction], None], time: int = 1,
          rank: int = RANK) -> Break:
    """Once, at the `time`-th run of an instruction on a rank: 0 is that of the first step's rehearsal."""

    def broken(engine: Engine) -> None:
        handler, runs = engine.handlers[op], []

        def handle(instruction, slots):
            handler(instruction, slots)
            if instruction[1:3] == (unit, microbatch):
                runs.append(0)
                if len(runs) == time + 1:
                    do(engine, instruction)

        if engine.comm.rank == rank:
            engine.handlers[op] = handle

    return broken


def message(config: Config, broken: Break, exact: bool | None = None, steps: int = 3) -> str:
    """What all ranks say."""
    plan, said = make_plan(config), []

    def work(comm: Comm) -> None:
        engine = Engine(Analysis(plan), comm)
        verifier = Verifier(engine, exact)
        broken(engine)
        try:
            for step in range(steps):
                verifier.rehearse(batches(config, comm, step))
                verifier.step(batches(config, comm, step))
        except RunError as error:
            said.append(str(error))
        finally:
            engine.close()

    run_loopback(plan, make_mesh(config), work)
    assert len(said) in (0, config.world_size) and len(set(said)) <= 1, said
    return said[0] if said else ""


def act(engine: Engine, instruction: Instruction) -> None:
    flip(engine.slots.get(Slot("act", instruction.unit, instruction.microbatch)))


def grad(engine: Engine, instruction: Instruction) -> None:
    flip(engine.slots.get(Slot("grad", instruction.unit - 1, instruction.microbatch)))


def weight_grad(engine: Engine, instruction: Instruction) -> None:
    flip(next(iter(engine.states[instruction.unit].gradient.written())))


@pytest.mark.parametrize("time", [0, 1, 2])
@pytest.mark.parametrize("op, do, what", [
    (Op.FORWARD, act, "output"), (Op.BACKWARD, grad, "gradient"), (Op.BACKWARD, weight_grad, "gradient")],
    ids=["forward", "backward", "weight-gradient"])
@pytest.mark.parametrize("stage", [1, 3])
def test_one_bit_of_one_rank(stage, op, do, what, time):
    """In one of two runs of one instruction. Everybody's losses and gradients differ then; the one whose
    fault it is is named."""
    config = tiny(*SMALL, *MESH, f"zero.stage={stage}", "parallel.stage_units=[2,3]")
    said = message(config, after(op, 3, 1, do, time))
    assert re.match(rf"step {1 + time // 2} was computed twice, with two results: first in the {what} of u3 "
                    rf"\(blocks.2\), "
                    rf"micro-batch 1, {op}, on rank {RANK} \(pp1 dp0 tp1\) on host {socket.gethostname()}: "
                    rf"at least 1 of \d+ "
                    "elements differ. .* take it out\\. The last step that was verified", said), said


@pytest.mark.parametrize("rank, unit, op", [(0, 1, "FORWARD"), (1, 1, "BACKWARD"), (4, 3, "FORWARD"),
                                            (7, 2, "BACKWARD")])
@pytest.mark.parametrize("sp", [False, True])
def test_a_wrong_part_of_a_sum_over_tp(sp, rank, unit, op):
    """All tp ranks have the same wrong sum: whose part of it was wrong?"""
    config = tiny(*SMALL, *MESH, f"parallel.sequence_parallel={sp}", "parallel.stage_units=[2,3]")

    def broken(engine: Engine) -> None:
        group = engine.comm.groups["tp"]
        done = []

        def spoil(call):
            def wrong(first, *others):
                name, index, _ = engine.current or ("", 0, 0.0)
                item = engine.plan.programs[name][engine.position][index] if name else None
                if item is not None and item[:3] == (op, unit, 2) and name == "verify" and not done:
                    done.append(0)
                    flip(others[0] if others and isinstance(others[0], torch.Tensor) else first)
                return call(first, *others)
            return wrong

        if engine.comm.rank == rank:
            for name in ("all_reduce", "reduce_scatter"):
                setattr(group, name, spoil(getattr(group, name)))

    where = f"u{unit} (blocks.{unit - 1}), micro-batch 2, {op}, on rank {rank} ("
    assert f"first in the part of a sum over tp in {where}" in (said := message(config, broken)), said


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_a_backward_in_two_halves(schedule):
    """The weights' half comes after others' input halves, and the embedding shares a weight with the head."""
    config = tiny(*SMALL, "parallel.pp=2", "parallel.dp=2", f"parallel.schedule={schedule}")
    tied = len(make_plan(config).table.units)

    def wrong(engine: Engine, instruction: Instruction) -> None:
        flip(next(iter(engine.states[tied].gradient.written())))

    said = message(config, after(Op.BACKWARD_WEIGHT, 0, 0, wrong, rank=1))
    assert ("first in the gradient of u0 (embedding), micro-batch 0, BACKWARD_WEIGHT, on rank 1 "
            "(pp0 dp1 tp0)") in said, said
    said = message(config, after(Op.BACKWARD_INPUT, 2, 3, grad, rank=make_plan(config).table.position(2) * 2))
    assert "first in the gradient of u2 (blocks.1), micro-batch 3, BACKWARD_INPUT" in said, said


def comes_wrong(op: Op, unit: int, slot: Slot, rank: int | None = None, bit: int = 0) -> Break:
    """Once, what an instruction of micro-batch 0 reads, on a rank, or on the first that comes to it."""
    seen: list[int] = []

    def broken(engine: Engine) -> None:
        handler = engine.handlers[op]

        def handle(instruction, slots):
            if instruction[1:3] == (unit, 0) and not seen and rank in (None, engine.comm.rank):
                seen.append(0)
                flip(slots.get(slot), bit)
            handler(instruction, slots)

        engine.handlers[op] = handle

    return broken


@pytest.mark.parametrize("op, unit, slot, text", [
    (Op.FORWARD, 2, Slot("act", 1, 0),
     "received from pp0, of u2 (blocks.1), micro-batch 0, FORWARD, on rank 1"),
    (Op.BACKWARD, 1, Slot("grad", 1, 0),
     "received from pp1, of u1 (blocks.0), micro-batch 0, BACKWARD, on rank 0")], ids=["act", "grad"])
def test_a_message_that_comes_wrong(op, unit, slot, text):
    """Not the receiver's fault: it says what it has received."""
    config = tiny(*SMALL, "parallel.pp=2", "parallel.stage_units=[2,3]")
    assert f"first in the input, {text}" in (said := message(config, comes_wrong(op, unit, slot))), said


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_wrong_sum_of_gradients(stage):
    """All gradients were right, and one rank has added them up to something else. At stage 0 all get its
    part."""
    config = tiny(*SMALL, "parallel.dp=4", f"zero.stage={stage}")

    def broken(engine: Engine) -> None:
        clip, seen = engine.handlers[Op.CLIP], []

        def handle(instruction, slots):
            first, state = not seen, engine.states[2]
            seen.append(0)
            if first:
                start = (state.part.layout.shard(3)[0] - state.part.owned[0]) if stage == 0 else 0
                if stage == 0 or engine.comm.rank == 3:
                    flip(state.gradient.values[start:start + 4])
            clip(instruction, slots)

        engine.handlers[Op.CLIP] = handle

    said = message(config, broken)
    assert "first in the sum over ranks of the gradient of p2 (blocks.1), on rank 3 (pp0 dp3 tp0)" in said, (
        said
    )


@pytest.mark.parametrize("overrides", [[], ["offload.optimizer=cpu"],
                                       ["offload.optimizer=cpu", "offload.overlap=none"]],
                         ids=["device", "overlap", "no-overlap"])
def test_a_wrong_update(overrides, monkeypatch):
    """Forward and backward are right, and the optimizer's arithmetic is wrong, once."""
    from threed.optim import step as optimizer

    config = tiny(*SMALL, "parallel.dp=2", "zero.stage=1", *overrides)
    right, seen = optimizer.step, []

    def step(by, view, copy=None):
        right(by, view, copy)
        seen.append(0)
        if len(seen) == 7:
            flip(view.weight)

    monkeypatch.setattr(optimizer, "step", step)
    said = message(config, lambda _: None)
    assert re.search(r"first in the update of p\d+ \(.*\), STEP, on rank [01] \(.*: 1 numbers of weights",
                     said), said


@pytest.mark.parametrize("bit, seen", [(0, False), (30, True)])
def test_a_fault_within_tolerance(bit, seen):
    """Where kernels are not deterministic: a last bit passes for rounding, a high one does not."""
    config = tiny(*SMALL, *MESH, "parallel.stage_units=[2,3]")
    said = message(config, after(Op.FORWARD, 3, 1, lambda engine, item: flip(
        engine.slots.get(Slot("act", item.unit, item.microbatch)), bit)), exact=False)
    assert ("first in the output of u3 (blocks.2), micro-batch 1, FORWARD, on rank 5" in said) == seen, said


# ---------------------------------------------------------------- experts

# Units of a block: 1 routes, 2 the shared expert, 3 the experts, 4 collects.
MOE = ["model.family=moe", "model.layers=1", "model.hidden=16", "model.heads=4", "model.seq_len=8",
       "model.vocab=30", "model.vocab_multiple=16", "model.experts=8", "model.shared_expert_ffn=16",
       "parallel.dp=4", "parallel.ep=2", "model.balance=bias", "optimizer.balance_rate=0.05"]
VERIFIED_MOE = [*MOE, "run.verify_every=1"]


MORE = {
    "plain": [], "zero2": ["zero.stage=2"],
    "zero3-full-zb-v": ["zero.stage=3", "activation.policy=full", "model.layers=2", "parallel.pp=2",
                        "parallel.schedule=zb-v"],
    "folded-bf16": ["parallel.dp=2", "parallel.tp=2", "parallel.sequence_parallel=true", "parallel.ep=4",
                    "model.z_loss=0.1", "precision.dtype=bf16"],
    "offload": ["offload.optimizer=cpu", "zero.stage=2"],
}


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("exact", [True, False])
def test_experts(exact, name):
    """Choices are whole numbers; what a buffer has held before is behind a gradient, and is no result."""
    config = tiny(*MOE, *MORE[name])
    same_bits([loopback(config, 3), verified(twice(config), 3, exact=exact)])


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("op, unit, slot, name", [
    (Op.FORWARD, 3, Slot("arrived", 1, 0), ".experts"), (Op.FORWARD, 4, Slot("returned", 3, 0), ".collect"),
    (Op.BACKWARD, 3, Slot("ganswers", 3, 0), ".experts"), (Op.BACKWARD, 1, Slot("grouted", 1, 0), "")],
    ids=lambda value: value.kind if isinstance(value, Slot) else "")
def test_rows_that_come_wrong(op, unit, slot, name, exact):
    """Not the fault of the rank to which they came, nor of those that have got what it made of them."""
    said = message(tiny(*VERIFIED_MOE), comes_wrong(op, unit, slot, 2, 0 if exact else 30), exact)
    assert (f"first in the '{slot.kind}', received over ep, of u{unit} (blocks.0{name}), micro-batch 0, "
            f"{op}, on rank 2 (pp0 dp2 tp0)") in said, said


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("op, unit, slot, name", [
    (Op.FORWARD, 1, Slot("routed", 1, 0), ""), (Op.FORWARD, 3, Slot("answers", 3, 0), ".experts"),
    (Op.BACKWARD, 4, Slot("greturned", 3, 0), ".collect"),
    (Op.BACKWARD, 3, Slot("garrived", 1, 0), ".experts")],
    ids=lambda value: value.kind if isinstance(value, Slot) else "")
def test_an_expert_that_computes_wrongly(op, unit, slot, name, exact):
    """Others get its rows: it is named, and not they."""
    said = message(tiny(*VERIFIED_MOE), after(op, unit, 0, lambda engine, _: flip(
        engine.slots.get(slot), 0 if exact else 30), rank=2), exact)
    what = "output" if op == Op.FORWARD else "gradient"
    assert (f"first in the {what} of u{unit} (blocks.0{name}), micro-batch 0, {op}, on rank 2 (pp0 dp2 "
            "tp0)") in said, said


@pytest.mark.parametrize("row, seen", [(None, False), (3, True)])
def test_the_weight_of_a_row(row, seen, monkeypatch):
    """In fp32, behind 16-bit numbers: half of its bits may look like a 16-bit number that is not finite,
    which would pass for all other numbers of the tensor."""
    usual = experts.weights_of

    def weights_of(*arguments):
        weights = usual(*arguments)
        bits = weights.detach().view(torch.int32)
        return weights + ((bits & ~0xFFFF | 0x7FC0).view(torch.float32) - weights.detach())

    monkeypatch.setattr(experts, "weights_of", weights_of)
    config = tiny(*VERIFIED_MOE, "precision.dtype=bf16")

    def broken(engine: Engine, _: Instruction) -> None:
        if row is not None:
            engine.slots.get(Slot("routed", 1, 0))[row, -8:].view(torch.float32)[0] *= 2

    said = message(config, after(Op.FORWARD, 1, 0, broken, rank=2), exact=False)
    assert ("first in the output of u1 (blocks.0), micro-batch 0, FORWARD, on rank 2 (" in said) == seen, said

    def work(comm: Comm) -> str:
        engine = Engine(Analysis(make_plan(config)), comm)
        after(Op.BACKWARD, 5, 0, lambda engine, _: engine.slots.get(Slot("grad", 4, 0)).fill_(torch.nan),
              time=0, rank=1)(engine)
        return find_nonfinite(engine, batches(config, comm, 0))

    if not seen:
        assert set(run_loopback(make_plan(config), make_mesh(config), work)) == {
            "first in the gradient of u5 (head), micro-batch 0, BACKWARD on rank 1 (pp0 dp1 tp0)"}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("time", [0, 1])
def test_a_rank_that_routes_wrongly(time, exact, monkeypatch):
    """Other ranks get other numbers of rows then: it is named, and not they."""
    choice, seen = Routes._choice, []

    def wrong(self, scores, batch):
        picks = choice(self, scores, batch)
        if batch.samples_B[0] % 4 == 3:  # those of rank 3
            seen.append(0)
            if len(seen) == 2 * time + 1:
                picks[0] = (picks[0] + 3) % 8
        return picks

    monkeypatch.setattr(Routes, "_choice", wrong)
    said = message(tiny(*VERIFIED_MOE), lambda _: None, exact)
    assert re.match(r"step 1 was computed twice, .* first in the output of u1 \(blocks.0\), micro-batch 0, "
                    r"FORWARD, on rank 3 \(.*: at least \d+ of \d+ elements differ", said), said


# ---------------------------------------------------------------- checksums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("count", [0, 1, COLUMNS - 1, COLUMNS, 3 * COLUMNS + 5])
def test_checksums_see_every_bit(count, dtype):
    """A tail that is left out, a sum that overflows or rounds."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)
    usual = checksum(values, exact=True)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for index in range(count):
        other = values.clone()
        other.view(kind)[index] ^= 1
        assert int((checksum(other, exact=True) != usual).sum()) == 1
        other[index] += 1
        change = (checksum(other, exact=False) - checksum(values, exact=False))[:-1]
        assert change.abs().max().item() == pytest.approx(1, rel=0.02)

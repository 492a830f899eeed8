"""Inspect: the results of each instruction, and the first of all ranks' findings along the flow of data.

A wrong result on one rank makes results wrong on other ranks, too: on those that receive it, and on all that
sum with it. Data flow forward through the units, backward through them, and then into sums over ranks: the
first finding in this order is the origin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from threed.engine.engine import Engine
from threed.models.layers.handing import handing
from threed.program.effects import effects
from threed.program.instruction import BACKWARDS, Instruction, Op, Slot, SlotKind
from threed.program.slots import Slots
from threed.program.table import Table


class Finding(NamedTuple):
    """Something wrong. Findings sort by the flow of data."""

    phase: int  # -1 before the step, 0 forward, 1 backward, 2 sum over ranks, 3 update
    distance: int  # along the flow of data in that phase
    turn: int  # orders findings of the same distance
    text: str


class InstructionResult(NamedTuple):
    """One result of an instruction."""

    phase: int
    distance: int
    what: str  # such as: output of u3 (blocks.2), micro-batch 1, FORWARD
    values: torch.Tensor


# kinds of slots that hold tensors, besides those of `table.handed`
_TENSORS = (SlotKind.ACT, SlotKind.GRAD, SlotKind.LOSS)


def results(engine: Engine, instruction: Instruction, slots: Slots) -> Iterator[InstructionResult]:
    """The results of a forward or backward; at CLIP the reduced gradients, first the part that this rank
    summed."""
    op, unit = instruction.op, instruction.unit
    table = engine.plan.table
    if op == Op.CLIP and instruction.gradients != "none":
        for p, state in engine.zero.stepped.items():
            whole = state.gradient.values[:state.part.unpadded]  # behind it is what a buffer has held before
            start, stop = (at - state.part.owned[0] for at in state.part.shard)
            for values in (whole[start:stop], whole) if stop - start < len(whole) else (whole,):
                name = f"sum over ranks of the gradient of p{p} ({table.parameters[p].name})"
                yield InstructionResult(2, p, name, values)
    if op != Op.FORWARD and op not in BACKWARDS:
        return
    effect, forward = effects(instruction, table, engine.position), op == Op.FORWARD
    place, of = (phase_of(instruction, table), unit if forward else -unit), named(engine, instruction)
    for slot in (*effect.writes, *effect.adds):
        what = "gradient" if not forward else "loss" if slot.kind == SlotKind.LOSS else "output"
        if slot.kind in _TENSORS or slot.kind in table.handed:
            for values in numbers(engine, slot, slots):
                yield InstructionResult(*place, f"{what} of {of}", values)
        elif slot.kind == SlotKind.WEIGHT_GRAD:
            for values in engine.states[slot.unit].gradient.written():
                yield InstructionResult(*place, f"{what} of {of}", values)


def numbers(engine: Engine, slot: Slot, slots: Slots) -> tuple[torch.Tensor, ...]:
    """A slot's tensor; of rows that have numbers in fp32 behind their own, both."""
    values = slots.get(slot)
    if slot.kind in _TENSORS:
        return (values,)
    name = engine.plan.table.handed.get(slot.kind)
    extra = next((way.extra for layer in engine.pipeline.layers.get(slot.unit, ())
                  for leaves, way in handing(layer).travels.items() if name in (leaves, way.becomes)), 0)
    if not extra:
        return (values,)
    width = values.shape[-1] - extra // values.itemsize
    return values[..., :width], values[..., width:].view(torch.float32)


def phase_of(instruction: Instruction, table: Table) -> int:
    """The phase of an instruction, as in Finding."""
    if instruction.of_slot:
        return int(all(made.name != instruction.kind for made in table.units[instruction.unit].makes))
    return 0 if instruction.op == Op.FORWARD else 2 if instruction.op in (Op.REDUCE, Op.CLIP) else 1


def named(engine: Engine, instruction: Instruction) -> str:
    """A compute instruction, or one of a parameter unit, in words."""
    op, (unit, microbatch) = instruction.op, instruction.turn
    if op == Op.REDUCE and not instruction.of_slot:
        return f"p{unit} ({engine.plan.table.parameters[unit].name}), {op}"
    return f"u{unit} ({engine.plan.table.units[unit].name}), micro-batch {microbatch}, {op}"


def me(engine: Engine) -> str:
    return f"rank {engine.comm.rank} ({engine.comm.here})"


def first(engine: Engine, findings: Iterable[Finding]) -> Finding | None:
    """The first of all ranks' findings, on all ranks. All ranks call this together."""
    firsts = engine.comm.all_gather(min(findings, default=None))
    return min((finding for finding in firsts if finding is not None), default=None)

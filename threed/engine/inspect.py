"""Inspect: what each instruction has made, and which of all ranks' findings came first in the order of the
data's way.

What one rank makes wrongly makes others wrong, too: those it sends to, and all who sum with it. The data's
way is forward through the units, backward through them, and the sums over ranks: the first of all findings is
where it began.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from threed.engine.engine import Engine
from threed.program.effects import effects
from threed.program.instruction import BACKWARDS, Instruction, Op
from threed.slots import Slots


class Finding(NamedTuple):
    """Sorts by the data's way."""

    phase: int  # -1 before the step, 0 forward, 1 backward, 2 sum over ranks, 3 update
    distance: int  # along the way in that phase
    turn: int  # of several at one place
    text: str


class Made(NamedTuple):
    """What an instruction has made."""

    phase: int
    distance: int
    what: str  # such as: output of u3 (blocks.2), micro-batch 1, FORWARD
    values: torch.Tensor


_TENSORS = ("act", "grad", "loss")  # kinds of slots that are tensors, as those are that units hand on


def made(engine: Engine, instruction: Instruction, slots: Slots) -> Iterator[Made]:
    """The results of a forward or backward; the reduced gradients at CLIP, first the part whose sum this rank
    took."""
    op, unit, *_ = instruction
    table = engine.plan.table
    if op == Op.CLIP and instruction.gradients != "none":
        for p, state in engine.states.items():
            whole = state.gradient_prev if instruction.gradients == "wait" else state.gradient
            start, stop = (at - state.owned[0] for at in state.shard)
            for values in (whole[start:stop], whole) if stop - start < len(whole) else (whole,):
                yield Made(2, p, f"sum over ranks of the gradient of p{p} ({table.parameters[p].name})",
                           values)
    if op != Op.FORWARD and op not in BACKWARDS:
        return
    effect, forward = effects(instruction, table, engine.position), op == Op.FORWARD
    what = "gradient" if not forward else "output" if unit < table.last else "loss"
    place = way(instruction), unit if forward else -unit, f"{what} of {named(engine, instruction)}"
    for slot in (*effect.writes, *effect.adds):
        if slot.kind in _TENSORS or slot.kind in table.handed:
            yield Made(*place, slots.get(slot))
        elif slot.kind == "wgrad":
            for values in engine.states[slot.unit].written():
                yield Made(*place, values)


def way(instruction: Instruction) -> int:
    """The phase of an instruction."""
    return 0 if instruction.op == Op.FORWARD else 2 if instruction.op in (Op.REDUCE, Op.CLIP) else 1


def named(engine: Engine, instruction: Instruction) -> str:
    """A compute instruction, or one of a parameter unit, in words."""
    op, unit, microbatch, *_ = instruction
    if op == Op.REDUCE:
        return f"p{unit} ({engine.plan.table.parameters[unit].name}), {op}"
    return f"u{unit} ({engine.plan.table.units[unit].name}), micro-batch {microbatch}, {op}"


def me(engine: Engine) -> str:
    return f"rank {engine.comm.rank} ({engine.comm.here})"


def first(engine: Engine, found: Iterable[Finding]) -> Finding | None:
    """The first of all ranks' findings, on all ranks. All call this together."""
    return min((each for each in engine.comm.exchange(min(found, default=None)) if each is not None),
               default=None)

"""Trips: which instructions take tensors that units hand on to other ranks, and their gradients back.

A tensor that travels is made by its unit's FORWARD, and the next instruction takes it over a group:

    GATHER rows u3 m1 (dp)        rows u3 m1 -> allrows u3 m1, which later units read
    REDUCE gallrows u3 m1 (dp)    the gradient, back: gallrows u3 m1 -> grows u3 m1
    EXCHANGE sent u3 m1 (dp)      sent u3 m1 -> came u3 m1
    EXCHANGE gcame u3 m1 (dp)     gcame u3 m1 -> gsent u3 m1

What has left is freed, what has come is freed by the BACKWARD of the unit that reads it, or where forward
uses it up by its FORWARD or RECOMPUTE. RECOMPUTE makes neither again. Without a gradient both stay until
their maker's BACKWARD; in a program that only runs forward, until their last reader's FORWARD.

A tensor may be gathered twice (spec.travel.Gathered.again), so that what has come need not stay in between:

    FORWARD u3 m1   GATHER kv u3 m1 (keys)   FORWARD u4 m1   RELEASE allkv u3 m1
    GATHER kv u3 m1 (keys)   BACKWARD_INPUT u4 m1                          what has come is freed once more
    REDUCE gallkv u3 m1 (keys)   BACKWARD_WEIGHT u4 m1   BACKWARD u3 m1    what has left is freed
"""

from __future__ import annotations

from typing import NamedTuple

from threed.program.entries import ComputeUnit, MadeTensor, gradient_kind, gradient_of
from threed.program.instruction import Instruction, Op, Slot
from threed.program.table import Table


class Trip(NamedTuple):
    """What one instruction takes to other ranks: a tensor there, or its gradient back."""

    tensor: MadeTensor
    back: bool  # whether it is the gradient
    source: Slot
    target: Slot
    counts: tuple[Slot, ...]  # of the rows that this rank gives to each, and that it takes of each


def trip_of(item: Instruction, table: Table) -> Trip:
    """KeyError where nothing travels so."""
    for each in table.units[item.unit].makes if 0 <= item.unit < len(table.units) else ():
        if not each.over or item.group != each.over or item.microbatch < 0:
            continue
        here, there = (Slot(kind, item.unit, item.microbatch) for kind in (each.name, each.becomes))
        counts = tuple(Slot(name, item.unit - before, item.microbatch) for name, before in each.counts)
        if item.kind == each.name and item.op == each.by:
            return Trip(each, False, here, there, counts)
        if each.grad and item.kind == gradient_kind(each.becomes) and item.op == back(each.by):
            return Trip(each, True, gradient_of(there), gradient_of(here), counts[::-1])
    raise KeyError(f"{item}: no such tensor travels")


def leaving(item: Instruction, table: Table) -> list[Instruction]:
    """The instructions behind a compute instruction that take what it makes, or gradients, to other ranks.
    First what has no gradient: it may say how many rows of the others travel."""
    unit = table.units[item.unit]
    if item.op == Op.FORWARD:
        made = sorted(unit.makes, key=lambda each: (each.grad, bool(each.counts)))
        return [Instruction(Op(each.by), item.unit, item.microbatch, each.name, group=each.over)
                for each in made if each.over]
    came = [read for read in unit.reads if read.came and item.op in (Op.BACKWARD, Op.BACKWARD_INPUT)]
    return [Instruction(back(each.by), read.unit, item.microbatch, gradient_kind(read.name), group=each.over)
            for read in came for each in table.units[read.unit].makes if each.becomes == read.name]


def releasing(item: Instruction, table: Table) -> list[Instruction]:
    """The instructions that free what a FORWARD has read, and what comes again."""
    return [Instruction(Op.RELEASE, read.unit, item.microbatch, read.name)
            for read in table.units[item.unit].reads if read.again and item.op == Op.FORWARD]


def comes_again(slot: Slot, table: Table) -> bool:
    """Whether RELEASE may free a slot."""
    makes = table.units[slot.unit].makes if 0 <= slot.unit < len(table.units) else ()
    return slot.microbatch >= 0 and any(each.again and each.becomes == slot.kind for each in makes)


def returning(item: Instruction, table: Table) -> list[Instruction]:
    """The instructions that bring what a compute instruction reads for the second time."""
    if item.op not in (Op.RECOMPUTE, Op.BACKWARD, Op.BACKWARD_INPUT):
        return []
    return [Instruction(Op.GATHER, read.unit, item.microbatch, read.again, group=each.over)
            for read in table.units[item.unit].reads if read.again
            for each in table.units[read.unit].makes if each.name == read.again]


def came_over(slot: Slot, table: Table) -> str | None:
    """The group over which a handed tensor, or its gradient, has come; None if this rank has made it."""
    return next((each.over for each in table.units[slot.unit].makes
                 if each.over and slot.kind in (each.becomes, gradient_kind(each.name))), None)


def depends(tensor: MadeTensor, maker: ComputeUnit) -> bool:
    """Whether how much arrives depends on other ranks: the counts of it have come from them, too."""
    return bool(tensor.counts) and tensor.counts[1] in {(each.becomes, 0) for each in maker.makes}


def back(by: str) -> Op:
    """The op by which the gradient goes back."""
    return Op.REDUCE if by == Op.GATHER else Op(by)

"""Handed: the slots of tensors that units hand on, besides their output, and how these travel to other ranks.

A tensor that travels is made by its unit's FORWARD, and an instruction directly behind takes it over a group:

    GATHER rows u3 m1 (dp)        rows u3 m1 -> allrows u3 m1, which later units read
    REDUCE gallrows u3 m1 (dp)    the gradient, back: gallrows u3 m1 -> grows u3 m1
    EXCHANGE sent u3 m1 (dp)      sent u3 m1 -> came u3 m1
    EXCHANGE gcame u3 m1 (dp)     gcame u3 m1 -> gsent u3 m1

What has left is freed, what has come is freed by the BACKWARD of the unit that reads it, or where forward
uses it up by its FORWARD or RECOMPUTE. RECOMPUTE makes neither again. Without a gradient both stay until
their maker's BACKWARD; in a program that only runs forward, until their last reader's FORWARD.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from threed.program.entries import ComputeUnit, Handed, gradient_kind
from threed.program.instruction import Instruction, Op, Slot
from threed.program.table import Table


class Passed(NamedTuple):
    """The slots of tensors that a unit makes for later units of its stage, and of those that it reads."""

    makes: tuple[Slot, ...]  # what FORWARD makes
    again: tuple[Slot, ...]  # of `makes`, what RECOMPUTE makes again
    fixed: tuple[Slot, ...]  # of `makes`, what it reads: those without a gradient
    held: tuple[Slot, ...]  # what stays until the unit's BACKWARD
    reads: tuple[Slot, ...]
    spent: tuple[Slot, ...]  # of `reads`, what forward uses up: the last of FORWARD and RECOMPUTE frees it
    stays: tuple[Slot, ...]  # the others, which BACKWARD reads, too
    came: tuple[Slot, ...]  # of those, what BACKWARD frees
    made_gradients: tuple[Slot, ...]  # in which the gradients of `makes` are added up
    read_gradients: tuple[Slot, ...]


_NOTHING = Passed((), (), (), (), (), (), (), (), (), ())


def passed(item: Instruction, table: Table) -> Passed:
    """Those of a compute instruction."""
    unit, at = table.units[item.unit], item.microbatch
    if not unit.makes and not unit.reads:  # most units
        return _NOTHING
    makes = [(Slot(each.name, item.unit, at), each) for each in unit.makes]
    reads = [(Slot(each.name, each.unit, at), each) for each in unit.reads]
    arrived = [Slot(each.trip.becomes, item.unit, at) for each in unit.makes if each.trip and not each.grad]
    return Passed(tuple(slot for slot, _ in makes),
                  tuple(slot for slot, each in makes if each.grad and not each.leaves),
                  tuple(slot for slot, each in makes if not each.grad),
                  (*(slot for slot, each in makes if not each.leaves), *arrived),
                  tuple(slot for slot, _ in reads),
                  tuple(slot for slot, each in reads if each.spent),
                  tuple(slot for slot, each in reads if not each.spent),
                  tuple(slot for slot, each in reads if each.came and not each.spent),
                  _gradients(slot for slot, each in makes if each.grad),
                  _gradients(slot for slot, each in reads if each.grad))


def gradient_of(handed: Slot) -> Slot:
    """The slot in which the gradient of a handed tensor is added up."""
    return handed._replace(kind=gradient_kind(handed.kind))


def _gradients(handed: Iterable[Slot]) -> tuple[Slot, ...]:
    return tuple(map(gradient_of, handed))


def leaving(item: Instruction, table: Table) -> list[Instruction]:
    """What takes the tensors that a compute instruction makes, or their gradients, to other ranks: directly
    behind it. First what has no gradient: it may say how many rows of the others travel."""
    unit = table.units[item.unit]
    if item.op == Op.FORWARD:
        made = sorted(unit.makes, key=lambda each: (each.grad, bool(each.trip and each.trip.counts)))
        return [Instruction(Op(each.trip.by), item.unit, item.microbatch, each.name, group=each.trip.over)
                for each in made if each.trip is not None]
    came = [read for read in unit.reads if read.came and item.op in (Op.BACKWARD, Op.BACKWARD_INPUT)]
    return [Instruction(back(each.trip.by), read.unit, item.microbatch, gradient_kind(read.name),
                        group=each.trip.over) for read in came for each in table.units[read.unit].makes
            if each.trip is not None and each.trip.becomes == read.name]


class Move(NamedTuple):
    """What an instruction takes to other ranks."""

    handed: Handed
    back: bool  # whether it is the gradient
    source: Slot
    target: Slot
    counts: tuple[Slot, ...]  # of the rows that this rank gives to each, and that it takes of each


def move_of(item: Instruction, table: Table) -> Move:
    """KeyError where nothing travels so."""
    for each in table.units[item.unit].makes if 0 <= item.unit < len(table.units) else ():
        trip = each.trip
        if trip is None or item.group != trip.over or item.microbatch < 0:
            continue
        here, there = (Slot(kind, item.unit, item.microbatch) for kind in (each.name, trip.becomes))
        counts = tuple(Slot(name, item.unit - before, item.microbatch) for name, before in trip.counts)
        if item.kind == each.name and item.op == trip.by:
            return Move(each, False, here, there, counts)
        if each.grad and item.kind == gradient_kind(trip.becomes) and item.op == back(trip.by):
            return Move(each, True, gradient_of(there), gradient_of(here), counts[::-1])
    raise KeyError(f"{item}: no such tensor travels")


def came_over(slot: Slot, table: Table) -> str | None:
    """The group over which a tensor that a unit hands on, or the gradient of one, has come; None where this
    rank has made it."""
    return next((each.trip.over for each in table.units[slot.unit].makes if each.trip is not None
                 and slot.kind in (each.trip.becomes, gradient_kind(each.name))), None)


def depends(handed: Handed, unit: ComputeUnit) -> bool:
    """Whether how much comes depends on other ranks: the counts of it have come from them, too. `unit`: its
    maker."""
    counts = handed.trip.counts if handed.trip else ()
    return bool(counts) and counts[1] in {(each.trip.becomes, 0) for each in unit.makes if each.trip}


def back(by: str) -> Op:
    """The op by which the gradient goes back."""
    return Op.REDUCE if by == Op.GATHER else Op(by)

"""Travel as a pass: directly behind what makes a tensor, or its gradient, it goes to other ranks. No torch.

Placed after other computation, it would wait for that.
"""

from __future__ import annotations

from collections import defaultdict

from threed.program.entries import ComputeUnit, gradient_kind
from threed.program.handed import back
from threed.program.instruction import Instruction, Op, Programs, insert
from threed.program.table import Table


def travel(programs: Programs, table: Table) -> Programs:
    """The programs with what travels."""
    leave = {u: _leaving(u, unit) for u, unit in enumerate(table.units)}
    if not any(leave.values()):
        return programs
    come_back: dict[int, list[Instruction]] = defaultdict(list)  # unit -> behind its backward
    for u, unit in enumerate(table.units):
        for read in (read for read in unit.reads if read.came):
            trip = next(each.trip for each in table.units[read.unit].makes
                        if each.trip is not None and each.trip.becomes == read.name)
            come_back[u].append(Instruction(back(trip.by), read.unit, kind=gradient_kind(read.name),
                                            group=trip.over))
    behind = {Op.FORWARD: leave, Op.BACKWARD: come_back, Op.BACKWARD_INPUT: come_back}
    after = {(op, unit): items for op, of_unit in behind.items() for unit, items in of_unit.items() if items}
    return [insert(program, {}, {index: [Instruction(each.op, each.unit, item.microbatch, each.kind,
                                                     group=each.group) for each in after[item[:2]]]
                                 for index, item in enumerate(program) if item[:2] in after})
            for program in programs]


def _leaving(unit: int, made: ComputeUnit) -> list[Instruction]:
    """First what has no gradient: it may say how many rows of the others travel."""
    return [Instruction(Op(each.trip.by), unit, kind=each.name, group=each.trip.over)
            for each in sorted(made.makes, key=lambda each: (each.grad, bool(each.trip and each.trip.counts)))
            if each.trip is not None]

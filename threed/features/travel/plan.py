"""Travel as a pass: an instruction directly after the one that makes a tensor, or its gradient, takes it to
other ranks. Placed after other computation, it would wait for that. No torch.

What comes twice is brought one use ahead, as ZeRO-3 gathers parameters: while the backward before it
computes. And its reader's backward is two halves, so that its gradient travels while weights' gradients are
computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product

from threed.program.instruction import BACKWARDS, COMPUTE, Instruction, Op, Programs, insert
from threed.program.table import Table
from threed.program.trips import leaving, returning


def halves(programs: Programs, table: Table) -> Programs:
    """Cut the backwards of units that read what comes twice."""
    cut = {u for u, unit in enumerate(table.units) if any(read.again for read in unit.reads)
           and any(table.parameters[p].trains for p in unit.parameters)}
    if not cut:
        return programs
    return [[half for item in program for half in
             ([item._replace(op=op) for op in BACKWARDS[1:]] if item.op == Op.BACKWARD and item.unit in cut
              else [item])] for program in programs]


def travel(programs: Programs, table: Table) -> Programs:
    """Insert the instructions that take tensors, and their gradients, to other ranks."""
    after = {(op, unit): items for op, unit in product(COMPUTE, range(len(table.units)))
             if (items := leaving(Instruction(op, unit), table))}
    if not after:
        return programs
    return [insert(program, _again(program, table),
                   {index: [Instruction(each.op, each.unit, item.microbatch, each.kind, group=each.group)
                            for each in after[item.op, item.unit]]
                    for index, item in enumerate(program) if (item.op, item.unit) in after})
            for program in programs]


def _again(program: Sequence[Instruction], table: Table) -> dict[int, list[Instruction]]:
    """What brings tensors for the second time: before the instruction that needs the one before, but behind
    the forward that frees it."""
    readers = {u for u, unit in enumerate(table.units) if any(read.again for read in unit.reads)}
    before: defaultdict[int, list[Instruction]] = defaultdict(list)
    freed: dict[tuple[int, int], int] = {}  # the turns that need it again -> their forwards
    last = 0
    for index, item in enumerate(program) if readers else ():
        if item.unit not in readers or item.op not in COMPUTE:
            continue
        if item.op == Op.FORWARD:
            freed[item.turn] = index
        elif item.turn in freed:
            before[max(last, freed.pop(item.turn) + 1)] += returning(item, table)
            last = index
    return before

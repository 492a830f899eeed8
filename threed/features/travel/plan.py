"""Travel as a pass: an instruction directly after the one that makes a tensor, or its gradient, takes it to
other ranks. Placed after other computation, it would wait for that. No torch.

What may come twice is released behind its forward, unless its backward is the next to need any. It is
brought one use ahead, as ZeRO-3 gathers parameters: while the backward before it computes. And its reader's
backward is two halves, so that its gradient travels while weights' gradients are computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product

from threed.program.halves import halves
from threed.program.instruction import COMPUTE, Instruction, Op, Programs, insert
from threed.program.table import Table
from threed.program.trips import leaving, releasing, returning


def in_halves(programs: Programs, table: Table) -> Programs:
    """Cut the backwards of units that read what comes twice."""
    cut = {u for u, unit in enumerate(table.units) if any(read.again for read in unit.reads)}
    if not cut:
        return programs
    return [[half for item in program for half in (halves(item, table) if item.unit in cut else [item])]
            for program in programs]


def travel(programs: Programs, table: Table) -> Programs:
    """Insert the instructions that take tensors, and their gradients, to other ranks."""
    after = {(op, unit): items for op, unit in product(COMPUTE, range(len(table.units)))
             if (items := leaving(Instruction(op, unit), table))}
    if not after:
        return programs
    result = []
    for program in programs:
        before, behind = _again(program, table)
        for index, item in enumerate(program):
            if (item.op, item.unit) in after:
                behind[index] += [Instruction(each.op, each.unit, item.microbatch, each.kind,
                                              group=each.group) for each in after[item.op, item.unit]]
        result.append(insert(program, before, behind))
    return result


_Placed = defaultdict[int, list[Instruction]]  # by the index of an instruction of the program


def _again(program: Sequence[Instruction], table: Table) -> tuple[_Placed, _Placed]:
    """What brings tensors for the second time, before the instruction that needs the one before it; and what
    releases them, behind their forwards."""
    readers = {u for u, unit in enumerate(table.units) if any(read.again for read in unit.reads)}
    before, behind = _Placed(list), _Placed(list)
    forwards: dict[tuple[int, int], tuple[int, int]] = {}  # of turns: index, and how many uses were before it
    uses = [index for index, item in enumerate(program) if item.op in COMPUTE and item.unit in readers]
    needed = 0  # the latest instruction that has needed any for backward
    for number, index in enumerate(uses):
        item = program[index]
        if item.op == Op.FORWARD and item.keep in ("all", "input"):
            forwards[item.turn] = index, number
        elif item.turn in forwards:
            forward, count = forwards.pop(item.turn)
            if number > count + 1:
                behind[forward] += releasing(program[forward], table)
                before[max(needed, forward + 1)] += returning(item, table)
            needed = index
    return before, behind

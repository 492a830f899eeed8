"""Pairs: a forward and a backward of two micro-batches that are computed together. What their instructions
cost against each other, and which programs have any."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.table import Table
from threed.program.traffic import sent_by

_PARTS = {Op.BACKWARD_INPUT: slice(1, 2), Op.BACKWARD_WEIGHT: slice(2, 3), Op.BACKWARD: slice(1, 3)}


def cost_in_pair(item: Instruction, table: Table) -> float:
    """Of a computation, or of what travels, by `Table.pair`."""
    assert table.pair is not None
    if item.op in COMPUTE:
        return sum(table.pair.units[item.unit][_PARTS.get(item.op, slice(1))])
    return sum(sent_by(table, item).values()) * table.pair.byte.get(item.group, 0.0)


def has_pairs(program: Sequence[Instruction], table: Table) -> bool:
    """Whether a program computes anything amid the units of a forward of a stage."""
    if table.pair is None:
        return False
    tasks = groupby((item.op == Op.FORWARD, table.units[item.unit].stage, item.microbatch)
                    for item in program if item.op in COMPUTE)
    forwards = [(stage, microbatch) for (forward, stage, microbatch), _ in tasks if forward]
    return len({*forwards}) < len(forwards)

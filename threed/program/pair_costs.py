"""What instructions cost against each other, where those of two micro-batches are computed together."""

from __future__ import annotations

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

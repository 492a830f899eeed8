"""Halves: a backward as two instructions, the gradient of its input and those of its weights, so that other
work can begin between them."""

from __future__ import annotations

from threed.program.instruction import BACKWARDS, Instruction, Op
from threed.program.table import Table


def halves(item: Instruction, table: Table) -> list[Instruction]:
    """The two halves of a backward that has gradients of weights; any other instruction as it is."""
    if item.op != Op.BACKWARD:  # a collective's unit is of parameters, not of compute
        return [item]
    learns = any(table.parameters[p].trains for p in table.units[item.unit].parameters)
    return [item._replace(op=op) for op in BACKWARDS[1:]] if learns else [item]

"""Steps: the updates at the end of a program, behind CLIP. No torch.

Where an optimizer turns whole matrices, each of them by one rank, its owner, the updates of a position are

    STEP p1 begin  EXCHANGE update p1  STEP p2 begin  EXCHANGE update p2 ...
    STEP p1 turn   EXCHANGE turned p1  STEP p2 turn   EXCHANGE turned p2 ...  STEP p1 end  STEP p2 end ...
"""

from __future__ import annotations

from collections.abc import Mapping

from threed.program.instruction import Instruction, Op, SlotKind
from threed.program.table import Table

Program = list[Instruction]


def steps(table: Table, position: int) -> Program:
    """The updates. Matrices travel to their owners while others begin, are turned while others travel, and
    are back before their steps end."""
    stepped = table.stepped(position)
    ways = {unit: way.group for unit in stepped if (way := table.parameters[unit].turning) is not None}
    return [*_trips(ways, "begin", SlotKind.UPDATE),
            *(Instruction(Op.STEP, unit) for unit in stepped if unit not in ways),
            *_trips(ways, "turn", SlotKind.TURNED),
            *(Instruction(Op.STEP, unit, part="end") for unit in ways)]


def _trips(ways: Mapping[int, str], part: str, kind: str) -> Program:
    """A part of each step, and what takes its result to other ranks."""
    return [each for unit, group in ways.items()
            for each in (Instruction(Op.STEP, unit, part=part),
                         Instruction(Op.EXCHANGE, unit, kind=kind, group=group))]

"""Turning: the step of a parameter unit whose matrices are turned, in three parts.

    STEP p3 begin               gshard p3 -> update p3, this rank's shard of what is to be turned
    EXCHANGE update p3          -> matrix p3, the matrices that this rank owns, whole
    STEP p3 turn                -> turned p3
    EXCHANGE turned p3          -> direction p3, of what this rank updates
    STEP p3 end

With `begin` the update of the weights begins: from then on nothing of the step may read them, and no gathered
copy may be alive.
"""

from __future__ import annotations

from typing import NamedTuple

from threed.program.instruction import TO_OWNERS, Instruction, Slot, SlotKind
from threed.program.table import Table


class StepPart(NamedTuple):
    """What a part of a step does."""

    used: Slot  # is freed
    made: tuple[Slot, ...]
    steps: bool  # whether it updates weights and state


def part_of(item: Instruction, table: Table) -> StepPart:
    """KeyError where the step of the unit has no such part."""
    parts = {"begin": StepPart(table.shards.gradient(item.unit), (Slot(SlotKind.UPDATE, item.unit),), True),
             "turn": StepPart(Slot(SlotKind.MATRIX, item.unit), (Slot(SlotKind.TURNED, item.unit),), False),
             "end": StepPart(Slot(SlotKind.DIRECTION, item.unit), (), True)}
    if table.parameters[item.unit].turning is None or item.part not in parts:
        raise KeyError(f"{item}: p{item.unit} has no such part of a step")
    return parts[item.part]


def arrival_of(item: Instruction, table: Table) -> Slot | None:
    """What EXCHANGE makes of matrices that go to their owners, or back; None where it is about others.
    KeyError where no matrices go so."""
    if item.kind not in TO_OWNERS:
        return None
    unit = table.parameters.get(item.unit)
    if unit is None or unit.turning is None or item.group != unit.turning.group or item.microbatch >= 0:
        raise KeyError(f"{item}: no matrices of p{item.unit} travel so")
    return Slot(TO_OWNERS[item.kind], item.unit)

"""Turning: the step of a parameter unit whose matrices are turned, in three parts.

    STEP p3 begin               gshard p3 -> update p3, this rank's shard of what is to be turned
    EXCHANGE update p3          -> matrix p3, the matrices that this rank owns, whole
    STEP p3 turn                -> turned p3
    EXCHANGE turned p3          -> direction p3, of what this rank updates
    STEP p3 end

With `begin` the update of the weights begins: from then on nothing of the step may read them, and no gathered
copy may be alive.

Where the state is off the device, the host does `begin` and `end`, and weights change with `end`. `FETCH
update p3` takes what is to be turned to the device, and `OFFLOAD direction p3` takes what was turned to the
host.
"""

from __future__ import annotations

from typing import NamedTuple

from threed.program.instruction import CARRIED, TO_OWNERS, Instruction, Op, Slot, SlotKind, Tier
from threed.program.table import Table


class StepPart(NamedTuple):
    """What a part of a step does."""

    used: Slot  # is freed
    made: tuple[Slot, ...]
    steps: bool  # whether it updates weights and state


def part_of(item: Instruction, table: Table) -> StepPart:
    """KeyError where the step of the unit has no such part."""
    gradient, update, matrix, turned, direction = (
        Slot(kind, item.unit) for kind in (SlotKind.GRAD_SHARD, SlotKind.UPDATE, SlotKind.MATRIX,
                                           SlotKind.TURNED, SlotKind.DIRECTION))
    at = Tier.HOST if table.shards.away(item.unit) else Tier.DEVICE
    parts = {"begin": StepPart(gradient.on(at), (update.on(at),), True),
             "turn": StepPart(matrix, (turned,), False),
             "end": StepPart(direction.on(at), (), True)}
    if table.parameters[item.unit].turning is None or item.part not in parts:
        raise KeyError(f"{item}: p{item.unit} has no such part of a step")
    return parts[item.part]


def on_host(item: Instruction, table: Table) -> bool:
    """Whether an instruction is a step, or a part of one, that the host does."""
    return item.op == Op.STEP and item.part != "turn" and table.shards.away(item.unit)


def travels(slot: Slot, table: Table) -> bool:
    """Whether a slot of matrices goes between the host, which steps its unit, and the device."""
    return (slot.kind in CARRIED and table.shards.away(slot.unit)
            and table.parameters[slot.unit].turning is not None)


def arrival_of(item: Instruction, table: Table) -> Slot | None:
    """What EXCHANGE makes of matrices that go to their owners, or back; None where it is about others.
    KeyError where no matrices go so."""
    if item.kind not in TO_OWNERS:
        return None
    unit = table.parameters.get(item.unit)
    if unit is None or unit.turning is None or item.group != unit.turning.group or item.microbatch >= 0:
        raise KeyError(f"{item}: no matrices of p{item.unit} travel so")
    return Slot(TO_OWNERS[item.kind], item.unit)

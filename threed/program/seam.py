"""The seam: what is alive between two programs."""

from __future__ import annotations

from threed.program.instruction import Slot, SlotKind, Tier
from threed.program.names import APPLIES_WAITING, GENERATE, LEAVES_WAITING
from threed.program.table import Table


def seam_of(table: Table, position: int, program: str = "train", end: bool = False) -> set[Slot]:
    """Slots alive before a program, or after its end: the values that a checkpoint saves."""
    slots = {table.shards.weight(p) for p in table.held(position)}
    slots |= {table.shards.state(p) for p in table.stepped(position)}
    if table.update.snapshots:  # the last snapshot may still be in progress
        slots |= {Slot(SlotKind.SNAPSHOT, p, tier=Tier.HOST) for p in table.copied(position)}
    if program in (LEAVES_WAITING if end else APPLIES_WAITING):
        slots |= {*table.waiting(position)}
    if end and program == GENERATE and table.logits:  # the engine hands them out
        slots |= {Slot(SlotKind.LOGITS, unit, microbatch) for unit in table.logits.bytes
                  if table.position(unit) == position for microbatch in range(table.logits.microbatches)}
    return slots

"""Slots at run time: named values, some of which are not ready yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from threed.lanes import Handle
from threed.program.instruction import Slot


class Slots:
    """The values of one rank. Using a slot waits for it."""

    def __init__(self) -> None:
        self._values: dict[Slot, Any] = {}
        self._pending: dict[Slot, Handle] = {}
        self.waiting: Slot | None = None  # what is being waited for now

    def put(self, slot: Slot, value: Any, handle: Handle | None = None) -> None:
        """Set a slot, whose value is ready once `handle` is done."""
        self._values[slot] = value
        if handle is not None:
            self._pending[slot] = handle

    def wait(self, slot: Slot) -> bool:
        """Wait until the slot can be used. Returns whether there was something to wait for."""
        handle = self._pending.pop(slot, None)
        if handle is None:
            return False
        self.waiting = slot
        handle.wait()
        self.waiting = None
        return True

    def get(self, slot: Slot) -> Any:
        self.wait(slot)
        return self._values[slot]

    def free(self, slot: Slot) -> None:
        """Forget a slot, after waiting for it: its buffer will be used again."""
        self.wait(slot)
        self._values.pop(slot, None)

    def alive(self) -> list[Slot]:
        return sorted(self._values)

    def keep(self, seam: Iterable[Slot]) -> None:
        """Forget everything but these slots, which are alive between two programs."""
        self._values = dict.fromkeys(seam, True)
        self._pending = {slot: handle for slot, handle in self._pending.items() if slot in self._values}
        self.waiting = None

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._values

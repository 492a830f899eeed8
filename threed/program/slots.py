"""Slots at run time: named values. Whether a value is ready, the engine knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from threed.program.instruction import Slot


class Late:
    """A value that a job fills in."""

    value: Any = None

    def get(self) -> Any:
        return self.value


class Slots:
    """The values of one rank."""

    def __init__(self) -> None:
        self._values: dict[Slot, Any] = {}

    def put(self, slot: Slot, value: Any) -> None:
        self._values[slot] = value

    def get(self, slot: Slot) -> Any:
        value = self._values[slot]
        return value.value if type(value) is Late else value

    def late(self, slot: Slot) -> Callable[[], Any]:
        """What gives the value of a slot when it is there, which may have been freed by then."""
        value = self._values[slot]
        return lambda: value.value if type(value) is Late else value

    def free(self, slot: Slot) -> None:
        """Forget a slot."""
        self._values.pop(slot, None)

    def alive(self) -> list[Slot]:
        return sorted(self._values)

    def keep(self, seam: Iterable[Slot]) -> None:
        """Forget everything but these slots, which are alive between two programs."""
        self._values = dict.fromkeys(seam, True)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._values

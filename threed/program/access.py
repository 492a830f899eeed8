"""Access: what an instruction does to slots: reads, writes, adds, updates and frees; its lane and groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from threed.program.instruction import Slot


class Effects(NamedTuple):
    """What an instruction does to slots, and where."""

    lane: str
    reads: tuple[Slot, ...] = ()
    writes: tuple[Slot, ...] = ()  # must not be alive before
    adds: tuple[Slot, ...] = ()  # may be alive before; the sum must not have been read yet
    updates: tuple[Slot, ...] = ()  # alive before and after, with another value
    frees: tuple[Slot, ...] = ()  # alive before, not after; happens last
    groups: tuple[str, ...] = ()  # whose members take part; a message has none, only its two ends

    def of(self, microbatch: int) -> Effects:
        """Effects of a form -> of its instruction for a micro-batch."""
        if microbatch <= 0:
            return self
        return self._with([tuple([slot._replace(microbatch=microbatch) if slot.microbatch >= 0 else slot
                                  for slot in slots]) for slots in self.slots])

    def parts(self, first: Callable[[Slot], bool]) -> tuple[Effects | None, Effects | None]:
        """The same with some of the slots, and with the others; None without any."""
        ones = [tuple([slot for slot in slots if first(slot)]) for slots in self.slots]
        if not any(ones):
            return None, self if any(self.slots) else None
        if sum(map(len, ones)) == sum(map(len, self.slots)):
            return self, None
        return self._with(ones), self._with([tuple([slot for slot in slots if not first(slot)])
                                             for slots in self.slots])

    def _with(self, slots: Sequence[tuple[Slot, ...]]) -> Effects:
        """The same with other slots, in the order of the fields."""
        return Effects(self.lane, *slots, groups=self.groups)

    @property
    def slots(self) -> tuple[tuple[Slot, ...], ...]:
        """All that it does to slots, in the order of the fields."""
        return self.reads, self.writes, self.adds, self.updates, self.frees

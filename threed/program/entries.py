"""Entries of the table: what a unit hands to others, what becomes of its gradient, what it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Handed(NamedTuple):
    """A tensor, besides its output, that a unit makes for later units of its stage. `name` is the kind of its
    slot; the kind of its gradient's slot has a g before the name."""

    name: str
    bytes: int


class Read(NamedTuple):
    """A handed tensor that a unit reads. Every reader adds to its gradient."""

    name: str
    unit: int  # the unit that makes it
    last: bool  # whether no later unit reads it


class Reduction(NamedTuple):
    """One sum of a unit's gradient over a group of ranks."""

    group: str
    ranks: int  # in the group
    takes: str  # kind of slot
    makes: str
    numel: int  # elements that are summed
    bytes: int  # of an element in the message
    staged: bool = False  # whether a gradient that travels in another dtype is cast in the staging buffer


@dataclass(frozen=True)
class MessageSettings:
    """Which messages between positions the ranks of a group send a part each of: the pass of
    features/pipeline/parts reads it. (All ranks of the group hold the same.)"""

    group: str = ""  # empty: each rank sends the whole
    parts: int = 1  # ranks in that group
    least: int = 0  # bytes of the smallest message that is cut
    # Position -> its node: messages inside a node are not cut. Empty: all messages are cut.
    nodes: tuple[int, ...] = ()

    def cuts(self, size: int, here: int, there: int) -> bool:
        """Whether a message of so many bytes from one position to another is cut."""
        far = not self.nodes or self.nodes[here] != self.nodes[there]
        return bool(self.group) and far and size >= self.least


WHOLE_MESSAGES = MessageSettings()


@dataclass(frozen=True)
class LogitsSettings:
    """What the program `generate` makes: logits of the last token of each sequence, in the units of the head
    (a head that is cut into tiles is several)."""

    microbatches: int  # of the program
    bytes: dict[int, int]  # unit -> of its logits of a micro-batch, all ranks' parts together
    sent: dict[int, dict[str, int]]  # unit -> axis -> bytes that a rank sends in a FORWARD that makes them

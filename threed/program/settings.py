"""Settings of the table: what passes must know of a config."""

from __future__ import annotations

from dataclasses import dataclass

from threed.optim.base import Buffer


@dataclass(frozen=True)
class Elements:
    """Bytes of an element."""

    param: int = 4  # as compute reads it: 4 or 2 (Shards.param_bytes: of a parameter unit)
    grad: int = 4  # of an accumulated gradient
    reduce: int = 4  # of a gradient in a message over dp


@dataclass(frozen=True)
class ZeroSettings:
    """The settings that the pass in features/zero/plan reads."""

    stage: int = 0
    reduce_every: int = 1  # micro-batches between two reductions of a gradient
    residency: int | str = "step"  # units that may be gathered at a time; stage: as many as the largest has
    prefetch: int = 0  # how many uses ahead of its own a unit is gathered
    # Whether each reduced part of a gradient that is stepped on the host goes there at once (Shards.streams)
    streams: bool = False

    @property
    def sharded(self) -> bool:
        """Whether optimizer state, and so what STEP updates, is cut over the shard group."""
        return self.stage >= 1


@dataclass(frozen=True)
class ActivationSettings:
    """The settings that the passes in features/activation/plan read."""

    partition: str = ""  # the group over which a kept input is cut; empty: it is whole
    parts: int = 1  # ranks in that group
    offload: bool = False  # whether kept inputs go to the host
    contiguous: bool = False  # whether kept inputs are in one arena


@dataclass(frozen=True)
class UpdateSettings:
    """The settings of the optimizer's step that the passes in features/offload/plan read."""

    buffers: tuple[Buffer, ...] = ()  # the optimizer's tensors for each parameter
    master: bool = False  # whether STEP updates an fp32 copy of a 16-bit weight
    overlap: bool = False  # whether the host's STEPs run at the head of the next step's program
    snapshots: bool = False  # whether checkpoints are written from a copy on the host, while the run goes on


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
class PairSettings:
    """What computation and exchanges cost, in one unit: the pass of features/travel/pair puts them in order
    by it."""

    units: tuple[tuple[float, float, float], ...]  # of each: forward, input half, weights' half
    byte: dict[str, float]  # group -> of a byte that a rank sends over it


@dataclass(frozen=True)
class LogitsSettings:
    """What the program `generate` makes: logits of the last token of each sequence, in the units of the head
    (a head that is cut into tiles is several)."""

    microbatches: int  # of the program
    bytes: dict[int, int]  # unit -> of its logits of a micro-batch, all ranks' parts together
    sent: dict[int, dict[str, int]]  # unit -> axis -> bytes that a rank sends in a FORWARD that makes them

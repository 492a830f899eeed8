"""Settings of a plan that passes read, and the bytes of its elements: parts of the table."""

from __future__ import annotations

from dataclasses import dataclass

from threed.optimizers.base import Buffer


@dataclass(frozen=True)
class Elements:
    """Bytes of an element."""

    param: int = 4  # as compute reads it: 4 or 2
    grad: int = 4  # of an accumulated gradient
    reduce: int = 4  # of a gradient in a message over dp


@dataclass(frozen=True)
class ZeroSettings:
    """The settings that the pass in zero/plan reads."""

    stage: int = 0
    reduce_every: int = 1  # micro-batches between two reductions of a gradient
    residency: int | str = "step"  # units that may be gathered at a time; stage: as many as the largest has
    prefetch: int = 0  # how many uses ahead of its own a unit is gathered


@dataclass(frozen=True)
class ActivationSettings:
    """The settings that the passes in activation/plan read."""

    partition: str = ""  # the group over which a kept input is cut; empty: it is whole
    parts: int = 1  # ranks in that group
    offload: bool = False  # whether kept inputs go to the host
    contiguous: bool = False  # whether kept inputs are in one arena


@dataclass(frozen=True)
class UpdateSettings:
    """The settings of the optimizer's step that the passes in offload/plan read."""

    buffers: tuple[Buffer, ...] = ()  # the optimizer's tensors for each parameter
    master: bool = False  # whether STEP updates an fp32 copy of a 16-bit weight
    delayed: bool = False  # whether STEP applies gradients one step later
    snapshots: bool = False  # whether checkpoints are written from a copy on the host, while the run goes on

"""The flat layout of a parameter unit: where each parameter lies in the buffer, and who owns which range. No torch.

    | decayed, cut over tp | decayed, replicated | plain, cut | plain, replicated | padding |
    |<------ shard 0 ------>|<------ shard 1 ------>|<------ shard 2 ------>| ...

All elements of a tp rank's part of a unit lie in one buffer, in four runs, so that weight decay and the gradient norm
(which counts what is replicated over tp once) are slices. The buffer is padded so that every shard has the same length.
"""

from __future__ import annotations

from dataclasses import dataclass

from threed.models.spec import Parameter
from threed.quantity import round_up

ALIGNMENT = 32  # elements: shards begin at multiples of 64 bytes even in 16 bit


@dataclass(frozen=True)
class Placed:
    """A parameter in its unit's buffer."""

    parameter: Parameter
    shape: tuple[int, ...]  # of this tp rank's part
    module_shape: tuple[int, ...]  # the same inside the layer
    start: int
    stop: int


@dataclass(frozen=True)
class Segment:
    """A run of elements that share their treatment."""

    start: int
    stop: int
    decay: bool
    replicated: bool  # over tp


@dataclass(frozen=True)
class Layout:
    placed: tuple[Placed, ...]
    segments: tuple[Segment, ...]
    numel: int  # with padding
    num_shards: int

    @property
    def padding(self) -> int:
        return self.numel - (self.placed[-1].stop if self.placed else 0)

    @property
    def replicated(self) -> int:
        return sum(segment.stop - segment.start for segment in self.segments if segment.replicated)

    def shard(self, index: int) -> tuple[int, int]:
        """(start, stop) of a shard."""
        length = self.numel // self.num_shards
        return index * length, (index + 1) * length

    def segments_of(self, index: int) -> list[Segment]:
        """The parts of the segments that lie in a shard, in buffer coordinates."""
        start, stop = self.shard(index)
        return [Segment(max(start, s.start), min(stop, s.stop), s.decay, s.replicated)
                for s in self.segments if s.start < stop and s.stop > start]


def layout(parameters: tuple[Parameter, ...], tp: int, num_shards: int) -> Layout:
    """Lay out the parameters of a unit for a tp size, cut into `num_shards`."""
    placed, segments, offset = [], [], 0
    for decay, replicated in ((True, False), (True, True), (False, False), (False, True)):
        first = offset
        for parameter in parameters:
            # At tp=1 nothing is replicated, yet the order is kept, so that buffers look alike on all meshes.
            if (parameter.decay, parameter.tp_dim is None) == (decay, replicated):
                shape = parameter.local_shape(tp)
                count = parameter.numel // (tp if parameter.tp_dim is not None else 1)
                placed.append(Placed(parameter, shape, parameter.module_shape(tp), offset, offset + count))
                offset += count
        if offset > first:
            segments.append(Segment(first, offset, decay, replicated))
    return Layout(tuple(placed), tuple(segments), round_up(offset, num_shards * ALIGNMENT), num_shards)

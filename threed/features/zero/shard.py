"""The flat layout of a parameter unit: the range of each parameter in the buffer, and of each shard. No
torch.

    | decayed, cut | decayed, whole | plain, cut | plain, whole | padding |
    |<--- shard 0 --->|<--- shard 1 --->|<--- shard 2 --->| ...

A rank's part of a unit is one buffer. Parameters are grouped by weight decay, by the axes that cut them, and
by those over which their gradients are summed, so that weight decay, these sums and the gradient norm (which
counts copies on several ranks once) work on slices. The buffer is padded so that all shards have the same
length.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from threed.base.axes import axes_of
from threed.base.mesh import FOLDS
from threed.base.quantity import round_up
from threed.spec.parameter import Parameter

ALIGNMENT = 32  # elements: shards begin at multiples of 64 bytes even in 16 bit


@dataclass(frozen=True)
class Placed:
    """A parameter in its unit's buffer."""

    parameter: Parameter
    shape: tuple[int, ...]  # of this rank's part, as stored
    module_shape: tuple[int, ...]  # the same inside the layer
    start: int
    stop: int


@dataclass(frozen=True)
class Segment:
    """A range of elements with the same weight decay, axes and parts of the gradient."""

    start: int
    stop: int
    decay: bool
    axes: tuple[str, ...]  # of the mesh, over which the parameters are cut
    partial_over: tuple[str, ...] = ()  # axes whose ranks have copies, and each a part of the gradient


@dataclass(frozen=True)
class FlatLayout:
    placed: tuple[Placed, ...]
    segments: tuple[Segment, ...]
    numel: int  # with padding
    num_shards: int
    ranks: Mapping[str, int]  # axis -> its size

    @property
    def padding(self) -> int:
        return self.numel - (self.placed[-1].stop if self.placed else 0)

    def partial(self, axes: Collection[str], sequence: Collection[str]) -> list[Segment]:
        """The segments of which all ranks of these axes have copies, each with a part of the gradient.
        `sequence`: axes that cut the sequence of the residual stream."""
        return [each for each in self.segments if not set(axes) & set(each.axes)
                and set(axes) & {*sequence, *each.partial_over}]

    def shard(self, index: int) -> tuple[int, int]:
        """(start, stop) of a shard."""
        length = self.numel // self.num_shards
        return index * length, (index + 1) * length

    def segments_of(self, index: int) -> list[Segment]:
        """The parts of the segments within a shard, in buffer coordinates."""
        start, stop = self.shard(index)
        return [Segment(max(start, s.start), min(stop, s.stop), s.decay, s.axes, s.partial_over)
                for s in self.segments if s.start < stop and s.stop > start]


def layout(parameters: tuple[Parameter, ...], ranks: Mapping[str, int], num_shards: int) -> FlatLayout:
    """Lay out the parameters of a unit for sizes of the axes, cut into `num_shards`."""
    placed, segments, offset = [], [], 0
    # By axes even where an axis has one rank, so that the order in the buffer is the same on all meshes.
    kinds = dict.fromkeys((not parameter.decay, not parameter.axes, bool(parameter.partial_over),
                           parameter.axes, parameter.partial_over) for parameter in parameters)
    for plain, _, _, axes, partial_over in sorted(kinds, key=lambda kind: kind[:3]):
        first = offset
        for parameter in parameters:
            if (parameter.decay, parameter.axes, parameter.partial_over) == (not plain, axes, partial_over):
                shape = parameter.local_shape(ranks)
                count = math.prod(shape)
                placed.append(Placed(parameter, shape, parameter.module_shape(ranks), offset, offset + count))
                offset += count
        segments.append(Segment(first, offset, not plain, axes, partial_over))
    padded = round_up(offset, num_shards * ALIGNMENT)
    return FlatLayout(tuple(placed), tuple(segments), padded, num_shards, ranks)


def counts(axes: tuple[str, ...], place: Mapping[str, int]) -> bool:
    """Whether a rank counts parameters that are cut over these axes: of the ranks that have a copy, the first
    counts it. (Along the axes of a fold all ranks have parts or shards of their own.)"""
    cut = {*axes, *(other for axis in axes if axis in FOLDS for other in FOLDS[axis].axes)}
    return all(place[axis] == 0 for axis in axes_of("parameters") if axis not in cut)

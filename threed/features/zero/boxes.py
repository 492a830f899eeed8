"""Boxes: rectangles of global parameters, of which checkpoints consist, whatever file holds them; and from
which matrices are put together that an optimizer turns.

A rank owns a flat range of its part of a parameter. A range of a row-major array of n dims consists of at
most 2n - 1 rectangles, each contiguous in the buffer. The offset of the rank's part is added, so boxes have
global coordinates: a checkpoint does not depend on the mesh or the tiling that wrote it, and a run on another
mesh reads only the parts of boxes that it needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from threed.features.zero.shard import FlatLayout


@dataclass(frozen=True)
class Box:
    name: str  # global parameter name
    offset: tuple[int, ...]  # in the whole parameter
    shape: tuple[int, ...]
    whole: tuple[int, ...]  # shape of the whole parameter, as stored
    start: int  # in the unit's buffer
    axes: tuple[str, ...]  # of the mesh, over which the parameter is cut

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


def rectangles(shape: tuple[int, ...], start: int,
               stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, shape) of the rectangles that cover elements [start, stop) of a row-major array, in order."""
    if stop <= start:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        for offset, size in rectangles(shape[1:], start - last * row, stop - last * row):
            yield (last, *offset), (1, *size)
        return
    if start % row:
        for offset, size in rectangles(shape[1:], start % row, row):
            yield (first - 1, *offset), (1, *size)
    if last > first:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if stop % row:
        for offset, size in rectangles(shape[1:], 0, stop % row):
            yield (last, *offset), (1, *size)


def boxes(layout: FlatLayout, place: Mapping[str, int], start: int, stop: int) -> list[Box]:
    """The boxes of range [start, stop) of a unit's buffer. `place`: axis -> the rank's index. Padding is in
    no box."""
    covering = []
    for placed in layout.placed:
        low, high = max(start, placed.start), min(stop, placed.stop)
        parameter, flat = placed.parameter, low
        begin, _ = parameter.part(layout.ranks, place)
        for offset, shape in rectangles(placed.shape, low - placed.start, high - placed.start):
            moved = tuple(first + at for first, at in zip(begin, offset, strict=True))
            covering.append(Box(parameter.name, moved, shape, parameter.stored, flat, parameter.axes))
            flat += math.prod(shape)
    return covering


def overlap(offset: tuple[int, ...], shape: tuple[int, ...], other_offset: tuple[int, ...],
            other_shape: tuple[int, ...]) -> tuple[slice, ...] | None:
    """The part of the first box that the second covers, as slices of the first; None if they do not
    overlap."""
    slices = []
    for at, size, other_at, other_size in zip(offset, shape, other_offset, other_shape, strict=True):
        low, high = max(at, other_at), min(at + size, other_at + other_size)
        if low >= high:
            return None
        slices.append(slice(low - at, high - at))
    return tuple(slices)

"""Matrices of a parameter unit, and which piece of each a rank has. No torch.

A rank owns a flat range of its part of a parameter, and a matrix is some rows of the whole parameter: of each
matrix the rank has **pieces**, each a rectangle of the matrix that is contiguous in the rank's buffer.

    parameter [rows, columns], rows of two matrices     buffer of tp rank 0
        a a | a a                                           a a b b a a b b
        b b | b b                                           <--- shard --->  pieces of a: 1 x 2 and 1 x 2
        a a | a a        cut over tp by columns
        b b | b b
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

from threed.base.mesh import FOLDS, Mesh
from threed.features.zero.boxes import rectangles
from threed.features.zero.shard import FlatLayout, Placed, counts
from threed.spec.parameter import Parameter, Rows


class Member(NamedTuple):
    """A rank of the group in which matrices go to their owners."""

    place: Mapping[str, int]  # axis -> its index
    shard: int  # the index of its shard


def members(mesh: Mesh, group: str, shard_group: str, rank: int) -> list[Member]:
    """The ranks of the group of a rank, in order. `shard_group`: over which the unit is sharded."""
    return [Member(mesh.coordinate(each).on, mesh.group(shard_group, each).index(each))
            for each in mesh.group(group, rank)]


class Piece(NamedTuple):
    """A rectangle of a matrix, contiguous in a rank's buffer of the unit."""

    matrix: int  # of the unit's matrices
    rows: tuple[int, int]  # (first, stop)
    columns: tuple[int, int]
    start: int  # in the buffer

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


class WholeMatrix(NamedTuple):
    """A matrix of a unit."""

    placed: int  # its parameter, in the layout
    index: int  # of the matrices of the parameter
    shape: tuple[int, int]


@dataclass(frozen=True)
class UnitMatrices:
    """The matrices of a unit that ranks with this place on the axes of FOLDS have together."""

    layout: FlatLayout
    place: Mapping[str, int]
    heads: bool  # whether each head is a matrix

    @cached_property
    def whole(self) -> tuple[WholeMatrix, ...]:
        """All of them."""
        found = []
        for number, placed in enumerate(self.layout.placed):
            parameter, rows = placed.parameter, _rows(placed.parameter, self.heads)
            height, columns = math.prod(parameter.stored[:-1]), parameter.stored[-1]
            ranks, place = ({axis: each for axis, each in of.items() if axis in FOLDS}
                            for of in (self.layout.ranks, self.place))
            mine = {index for _, _, index, _ in _runs(parameter, rows, *parameter.part(ranks, place))}
            found += [WholeMatrix(number, index, (rows[index].count(height), columns))
                      for index in sorted(mine)]
        return tuple(found)

    @cached_property
    def _numbers(self) -> Mapping[tuple[int, int], int]:
        return {(each.placed, each.index): number for number, each in enumerate(self.whole)}

    def range(self, member: Member, shard: int) -> list[Piece]:
        """The pieces of a rank that lie in one shard of its buffer. `shard`: the index of the shard."""
        start, stop = self.layout.shard(shard)
        return [piece for number, placed in enumerate(self.layout.placed)
                for piece in self._pieces(number, placed, member.place, start, stop)]

    def owned(self, member: Member, sharded: bool) -> list[Piece]:
        """The pieces of what a rank updates: of its shard, or of all shards. They are cut at shard borders: a
        step then gets the same ranges under every ZeRO stage, and rounds in the same way."""
        shards = [member.shard] if sharded else range(self.layout.num_shards)
        return [piece for shard in shards for piece in self.range(member, shard)]

    def sends(self, member: Member) -> list[Piece]:
        """What a rank sends to owners: of its shard, without what another rank has a copy of and sends."""
        return [piece for piece in self.range(member, member.shard)
                if counts(self.parameter(piece).axes, member.place)]

    def parameter(self, piece: Piece) -> Parameter:
        return self.layout.placed[self.whole[piece.matrix].placed].parameter

    def _pieces(self, number: int, placed: Placed, place: Mapping[str, int], start: int,
                stop: int) -> Iterator[Piece]:
        if placed.start >= stop or placed.stop <= start:
            return
        parameter, width = placed.parameter, placed.shape[-1]
        offset, shape = parameter.part(self.layout.ranks, place)
        for local, count, index, row in _runs(parameter, _rows(parameter, self.heads), offset, shape):
            begin = placed.start + local * width
            low, high = max(start, begin) - begin, min(stop, begin + count * width) - begin
            at = begin + low
            for (first, column), (height, across) in rectangles((count, width), low, high):
                left = offset[-1] + column
                yield Piece(self._numbers[number, index], (row + first, row + first + height),
                            (left, left + across), at)
                at += height * across


def _rows(parameter: Parameter, heads: bool) -> Sequence[Rows]:
    return parameter.heads if heads and parameter.heads else parameter.matrices


class _Run(NamedTuple):
    """Rows of a rank's part that are consecutive rows of a matrix."""

    local: int  # the first, in the part
    count: int
    index: int  # of the matrix
    row: int  # the first, in the matrix


@lru_cache(4096)
def _cells(rows: Sequence[Rows], height: int) -> list[tuple[int, int, int, int]]:
    """(first, stop, index of the matrix, row of the first in it) of the rows of a parameter, in order."""
    found = []
    for index, each in enumerate(rows):
        before = 0
        for first, stop in each.cells(height):
            found.append((first, stop, index, before))
            before += stop - first
    return sorted(found)


@lru_cache(4096)
def _runs_of(rows: tuple[Rows, ...], stored: tuple[int, ...], offset: tuple[int, ...],
             shape: tuple[int, ...]) -> list[_Run]:
    height, found, local = math.prod(stored[:-1]), list[_Run](), 0
    for at in product(*map(range, shape[:-2])):
        first = 0
        for size, begin, index in zip(stored[:-2], offset[:-2], at, strict=True):
            first = first * size + begin + index
        first = first * stored[-2] + offset[-2]
        for start, stop, matrix, row in _cells(rows, height):
            low, high = max(start, first), min(stop, first + shape[-2])
            if low < high:
                found.append(_Run(local + low - first, high - low, matrix, row + low - start))
        local += shape[-2]
    return found


def _runs(parameter: Parameter, rows: Sequence[Rows], offset: tuple[int, ...],
          shape: tuple[int, ...]) -> list[_Run]:
    return _runs_of(tuple(rows), parameter.stored, offset, shape)

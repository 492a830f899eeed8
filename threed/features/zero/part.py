"""The part of a parameter unit that one rank owns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from threed.base.quantity import ALIGNMENT, round_up
from threed.features.zero.shard import FlatLayout, Placed, Segment
from threed.program.table import ParameterUnit, Table

BLOCK = 256  # elements whose squares are summed in fp32: few enough for a relative error of about 1e-8


def squared_norm(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a flat tensor: in fp32 within blocks, in fp64 over blocks. (On a CPU torch's fp64
    norm first makes an fp64 copy.) An element above 1e19 counts as an overflow: its square would overflow in
    Adam's moments, too."""
    whole = len(values) - len(values) % BLOCK
    if not whole:  # (what a library of a GPU leaves as the product of vectors of length 0, nobody promises)
        return torch.linalg.vector_norm(values, dtype=torch.float64).square()
    norms = torch.linalg.vector_norm(values[:whole].view(-1, BLOCK), dim=1, dtype=torch.float32).double()
    squared = norms.dot(norms)
    if whole < len(values):
        squared += torch.linalg.vector_norm(values[whole:], dtype=torch.float64).square()
    return squared


@dataclass(frozen=True)
class UnitPart:
    """A parameter unit, and what this rank owns of it: its shard from ZeRO-1 on, all of it under ZeRO-0 and
    of a frozen unit that stays whole."""

    number: int
    unit: ParameterUnit
    layout: FlatLayout
    index: int  # of this rank's shard
    sharded: bool  # whether it owns its shard only
    trains: bool

    @classmethod
    def of(cls, number: int, layout: FlatLayout, index: int, table: Table) -> UnitPart:
        unit = table.parameters[number]
        return cls(number, unit, layout, index, table.shards.is_cut(number), table.trains and unit.trains)

    @property
    def name(self) -> str:
        return f"p{self.number} ({self.unit.name})"

    @cached_property
    def owned(self) -> tuple[int, int]:
        """(start, stop) of the range that this rank owns."""
        return self.shard if self.sharded else (0, self.layout.numel)

    @cached_property
    def shard(self) -> tuple[int, int]:
        """(start, stop) of the range whose gradient norm this rank sums, and that it writes to checkpoints,
        whatever the ZeRO stage."""
        return self.layout.shard(self.index)

    @cached_property
    def count(self) -> int:
        """Elements that this rank owns."""
        return self.owned[1] - self.owned[0]

    @cached_property
    def unpadded(self) -> int:
        """The same without padding, which comes last."""
        return max(0, min(self.owned[1], self.layout.numel - self.layout.padding) - self.owned[0])

    def file_bytes(self, itemsize: int) -> int:
        """Bytes of a file with `itemsize` bytes for each element that this rank owns."""
        return round_up(self.count * itemsize, ALIGNMENT)

    def view(self, placed: Placed, buffer: torch.Tensor) -> torch.Tensor:
        """A parameter's part of a buffer of the whole unit, in its shape inside the layer."""
        return buffer[placed.start:placed.stop].view(placed.module_shape)

    def range(self, owned: torch.Tensor, segment: Segment) -> torch.Tensor:
        """The part of a tensor over `owned` that is in a segment (in buffer coordinates)."""
        return owned[segment.start - self.owned[0]:segment.stop - self.owned[0]]

    def segments(self) -> list[Segment]:
        """The segments that this rank steps, cut at shard borders even when it steps all shards: the kernel
        then gets the same ranges under every ZeRO stage, and rounds in the same way."""
        indices = [self.index] if self.sharded else range(self.layout.num_shards)
        return [segment for index in indices for segment in self.layout.segments_of(index)]

    def squared_norms(self, owned: torch.Tensor) -> list[torch.Tensor]:
        """Of a tensor over `owned`: the squared norm of each segment of this rank's shard."""
        return [squared_norm(self.range(owned, segment)) for segment in self.layout.segments_of(self.index)]

"""Owned: what a plan says of the matrices that are turned, of a pipeline position."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from threed.base.quantity import many, show_bytes
from threed.program.entries import Turning
from threed.program.table import Table


@dataclass(frozen=True)
class Owned:
    """The matrices of a position that one group of its ranks turns."""

    position: int
    group: str
    ranks: int  # among which they are dealt
    matrices: int
    busiest: float  # FLOPs of the owner that has most to do, over the mean
    flops: int  # of that owner's turns
    share: float  # of these in the FLOPs of its step
    owned_bytes: int  # most of an owner, as they travel
    sent_bytes: int  # that a rank sends to owners and back, on average

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        matrices = "1 matrix" if self.matrices == 1 else f"{self.matrices} matrices"
        return (f"pp{self.position} turns {matrices} on {many(self.ranks, 'rank')} ({self.group}), the "
                f"busiest {self.busiest:.2f} times as much as the mean, {self.share:.2%} of its step's FLOPs;"
                f" a rank owns up to {show_bytes(self.owned_bytes)} of them, and sends "
                f"{show_bytes(self.sent_bytes)} for them")


def owned(table: Table) -> Iterator[Owned]:
    """Of each position and group; nothing where no matrix is turned."""
    for position in range(table.num_positions):
        computed = sum(3 * table.units[unit].forward_flops for unit in table.units_of(position))
        groups: dict[str, list[Turning]] = {}
        for number in table.held(position):
            if (way := table.parameters[number].turning) is not None:
                groups.setdefault(way.group, []).append(way)
        for group, ways in groups.items():
            first, all_flops = ways[0], sum(each.flops for way in ways for each in way.matrices)
            flops = math.ceil(all_flops * first.busiest / first.ranks)
            yield Owned(position, group, first.ranks, sum(len(way.matrices) for way in ways), first.busiest,
                        flops, flops / (flops + computed * table.num_microbatches),
                        sum(way.owned * way.element for way in ways),
                        sum((way.sent + way.returned) * way.element for way in ways) // first.ranks)

"""Arrivals: how many rows have come to a rank, where the plan cannot know."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from threed.program.table import Table
from threed.program.trips import Trip, depends


@dataclass
class Arrivals:
    """Load statistics, since `begin`, of the exchanges whose row counts depend on other ranks. A rank sends
    as many rows as the plan says, unless rows are dropped. It receives as many if the load is balanced. The
    plan reserves `MadeTensor.arriving_bytes` for them."""

    table: Table
    imbalance: float = 0.0  # most rows that came in an exchange, over those of balanced ranks; 0: no exchange
    load: float = 0.0  # most of them for one of what this rank has (an expert), over the mean of all
    beyond: int = 0  # exchanges in which more came than the plan has room for
    chosen: int = 0  # rows that would have left, if none were dropped
    dropped: int = 0  # of these, how many were
    worst: str = ""  # the most, in words

    def begin(self) -> None:
        self.imbalance = self.load = 0.0
        self.beyond = self.chosen = self.dropped = 0
        self.worst = ""

    def add(self, trip: Trip, takes: torch.Tensor, leaves: int, row_bytes: int) -> None:
        """`takes` [ranks, ...]: the rows that come; `leaves`: those that leave."""
        made, maker = trip.tensor, self.table.units[trip.source.unit]
        if not depends(made, maker):
            return
        each, balanced = takes.sum(0), max(made.bytes // max(row_bytes, 1), leaves, 1)
        rows, room = int(each.sum()), max(made.arriving_bytes // max(row_bytes, 1), 1)
        self.chosen, self.dropped = self.chosen + balanced, self.dropped + balanced - leaves
        self.load = max(self.load, int(each.max()) * len(each) / balanced)
        self.beyond += rows > room
        if rows / balanced > self.imbalance:
            self.imbalance = rows / balanced
            self.worst = (f"{rows} rows of '{made.becomes}' came from {maker.name} in micro-batch "
                          f"{trip.source.microbatch}, {self.imbalance:.2f} times the {balanced} of balanced "
                          f"ranks; the plan has room for {room}")

    def advice(self, error: Exception) -> str:
        """Text to add to an error: the most rows that came, if memory ran out and more came than planned."""
        ended = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error)
        return f"\n  {self.worst}: plan with {room_for(self.imbalance)}" if ended and self.beyond else ""


def room_for(times: float) -> str:
    """The setting with which the plan has room for so many times the rows of balanced ranks."""
    room = f"{math.ceil(10 * times) / 10:g}"
    return f"model.moe_room={room} (in a layer of your own, {room} times the bytes that leave, in `makes`)"

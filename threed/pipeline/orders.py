"""Orders: what each pipeline position computes, and when, without communication. One function a schedule.

An order is, for each position, a list of (F or B, stage, micro-batch). With p stages and m micro-batches, p = 3, m = 4:

    gpipe: all forwards, then all backwards; keeps m micro-batches

    pp0   F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    pp1   .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    pp2   .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3

    1f1b: p - rank forwards ahead, then one backward for each forward; keeps p - rank

    pp0   F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    pp1   .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3
    pp2   .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Task(NamedTuple):
    kind: str  # F or B
    stage: int
    microbatch: int


Order = list[list[Task]]


def gpipe(num_positions: int, num_microbatches: int) -> Order:
    """Huang et al. 2019."""
    return [[Task(kind, position, m) for kind in "FB" for m in range(num_microbatches)]
            for position in range(num_positions)]


def one_f_one_b(num_positions: int, num_microbatches: int) -> Order:
    """Narayanan et al. 2021 (PipeDream-Flush)."""
    order = []
    for position in range(num_positions):
        ahead = min(num_positions - position - 1, num_microbatches)
        tasks = [Task("F", position, m) for m in range(ahead)]
        for m in range(num_microbatches):
            if ahead + m < num_microbatches:
                tasks.append(Task("F", position, ahead + m))
            tasks.append(Task("B", position, m))
        order.append(tasks)
    return order


def forward_only(num_positions: int, num_microbatches: int) -> Order:
    """Evaluation."""
    return [[Task("F", position, m) for m in range(num_microbatches)] for position in range(num_positions)]


ORDERS: dict[str, Callable[[int, int], Order]] = {"gpipe": gpipe, "1f1b": one_f_one_b}

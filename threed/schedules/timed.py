"""Times of stages, and an order played with a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from threed.schedules.orders import Order, Task, needs


@dataclass(frozen=True)
class StageTimes:
    """Seconds of each stage's forward, input half and weights' half, and of a message between positions."""

    forward: list[float]
    input: list[float]
    weight: list[float]
    message: float = 0.0

    def of(self, task: Task) -> float:
        if task.kind == "B":
            return self.input[task.stage] + self.weight[task.stage]
        return {"F": self.forward, "I": self.input, "W": self.weight}[task.kind][task.stage]

    @classmethod
    def equal(cls, stages: int, whole: tuple[float, float, float], share: int,
              message: float = 0.0) -> StageTimes:
        """Equal stages: `whole` is a position's forward, input half and weights' half; a stage takes 1/share
        of it."""
        return cls(*([seconds / share] * stages for seconds in whole), message=message)


class TimedOrder(NamedTuple):
    order: Order
    span_s: float  # of the position that takes longest, from its first task to its last
    total_s: float
    peak: int  # the most chunks that any position keeps at a time, each from its forward to its weights' half


def play(order: Order, place: Sequence[int], times: StageTimes) -> TimedOrder:
    """Time an order, as `spans` does."""
    at_work = spans(order, place, times)
    return TimedOrder(order, max(end - start for start, end in at_work), max(end for _, end in at_work),
                      max(map(_peak, order)))


def spans(order: Order, place: Sequence[int], times: StageTimes) -> list[tuple[float, float]]:
    """By position: when its first task begins, and its last one ends. Each position runs its tasks one after
    the other, each as soon as it has what it needs; a value takes the time of a message to reach another
    position. A task that never has what it needs is not run, nor is what comes after it."""
    done: dict[tuple[str, int, int], float] = {}
    heads, now, first, moved = [0] * len(order), [0.0] * len(order), [-1.0] * len(order), True
    while moved:
        moved = False
        for position, tasks in enumerate(order):
            for task in tasks[heads[position]:]:
                ends = [(done.get(need), place[need[1]]) for need in needs(task, len(place) - 1)]
                if any(end is None for end, _ in ends):
                    break
                start = max([now[position], *(end + (times.message if where != position else 0.0)
                                              for end, where in ends if end is not None)])
                first[position] = start if first[position] < 0 else first[position]
                now[position] = done[task._replace(kind="I") if task.kind == "B" else task] = (
                    start + times.of(task))
                heads[position] += 1
                moved = True
    return [*zip(first, now, strict=True)]


def _peak(tasks: Sequence[Task]) -> int:
    kept = most = 0
    for task in tasks:
        kept += {"F": 1, "I": 0}.get(task.kind, -1)
        most = max(most, kept)
    return most

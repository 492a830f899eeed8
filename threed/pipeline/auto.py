"""Auto: search an order for given times and a limit on activations. The number of candidates bounds the
search, never the clock.

Candidates are every named schedule within the limit, and orders that `_Filler` builds. It plays a frame of
forwards and input halves (1F1B's line or zb-v's V) with a clock. Where a position would wait, it runs a
weights' half that is due, or a forward ahead of its turn if memory allows; where memory is full, it must run
a weights' half. The candidates differ in how long a wait must be to be filled. The shortest predicted step
wins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from threed.errors import InputError
from threed.pipeline.orders import SCHEDULES, Order, Task, line, needs, one_f_one_b, vee, zb_v

WORTH = (0.0, 0.1, 0.25, 0.5, 1.0)  # shares of the time of a weights' half: shorter waits are not filled


@dataclass(frozen=True)
class Times:
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
    def equal(cls, stages: int, whole: tuple[float, float, float], share: int, message: float = 0.0) -> Times:
        """Equal stages: `whole` is a position's forward, input half and weights' half; a stage takes 1/share
        of it."""
        return cls(*([seconds / share] * stages for seconds in whole), message=message)


class TimedOrder(NamedTuple):
    order: Order
    span_s: float  # of the position that takes longest, from its first task to its last
    total_s: float
    peak: int  # the most chunks that any position keeps at a time, each from its forward to its weights' half


class Clock:
    """Plays tasks one by one: each position has a clock, and a value takes the time of a message to reach
    another position."""

    def __init__(self, place: Sequence[int], times: Times):
        self.place, self.times = place, times
        positions = max(place) + 1
        self.now, self.first = [0.0] * positions, [-1.0] * positions
        self.live, self.peak = [0] * positions, [0] * positions
        self.done: dict[tuple[str, int, int], float] = {}
        self.order: Order = [[] for _ in range(positions)]

    def ready(self, task: Task) -> float | None:
        """The time at which a task has all that it needs; None where this is not known yet."""
        latest = 0.0
        for need in needs(task, len(self.place) - 1):
            end = self.done.get(need)
            if end is None:
                return None
            far = self.place[need[1]] != self.place[task.stage]
            latest = max(latest, end + self.times.message if far else end)
        return latest

    def play(self, task: Task, start: float) -> None:
        position = self.place[task.stage]
        if self.first[position] < 0:
            self.first[position] = start
        self.now[position] = end = start + self.times.of(task)
        self.done[task._replace(kind="I") if task.kind == "B" else task] = end
        self.live[position] += {"F": 1, "I": 0}.get(task.kind, -1)
        self.peak[position] = max(self.peak[position], self.live[position])
        self.order[position].append(task)

    def result(self) -> TimedOrder:
        spans = [end - start for start, end in zip(self.first, self.now, strict=True)]
        return TimedOrder(self.order, max(spans), max(self.now), max(self.peak))


def play(order: Order, place: Sequence[int], times: Times) -> TimedOrder:
    """Time an order without changing it."""
    clock = Clock(place, times)
    heads = [0] * len(order)
    moved = True
    while moved:
        moved = False
        for position, tasks in enumerate(order):
            while heads[position] < len(tasks):
                task = tasks[heads[position]]
                ready = clock.ready(task)
                if ready is None:
                    break
                clock.play(task, max(ready, clock.now[position]))
                heads[position] += 1
                moved = True
    return clock.result()


class _Filler:
    """Plays a frame (each position's forwards and input halves, in order) and fills its waits. A position
    keeps at most `limit` chunks."""

    def __init__(self, frame: Order, clock: Clock, limit: int, worth: float, eager: bool):
        self.frame = [list(tasks) for tasks in frame]
        self.clock, self.limit, self.worth, self.eager = clock, limit, worth, eager
        self.heads = [0] * len(frame)
        self.due: list[list[Task]] = [[] for _ in frame]  # weights' halves, oldest first
        self.reserve = len(clock.place) // len(frame)  # room that a forward ahead of its turn must leave

    def choose(self, position: int) -> tuple[float, Task] | None:
        """(start, task) of a position's next task; None where it is not known yet, or no task is left."""
        clock, tasks, due = self.clock, self.frame[position], self.due[position]
        now, head = clock.now[position], self.heads[position]
        if head == len(tasks):
            return (now, due[0]) if due else None
        task = tasks[head]
        if task.kind == "F" and clock.live[position] >= self.limit:
            return (now, due[0]) if due else None
        ready = clock.ready(task)
        if ready is not None and ready <= now + 1e-12:
            return now, task
        wait = float("inf") if ready is None else ready - now
        ahead = None if due and self.eager else self._ahead(position, wait)
        if ahead is not None:
            tasks.insert(head, tasks.pop(ahead))
            return now, tasks[head]
        if due and wait >= self.worth * clock.times.of(due[0]):
            return now, due[0]
        return None if ready is None else (ready, task)

    def _ahead(self, position: int, wait: float) -> int | None:
        """The index in the frame of the next forward of the position's first stage, if it can run now."""
        clock, tasks, head = self.clock, self.frame[position], self.heads[position]
        if clock.live[position] >= self.limit - self.reserve:
            return None
        for index in range(head + 1, min(len(tasks), head + 6 * len(self.frame))):
            task = tasks[index]
            if task.kind == "F" and task.stage == position:
                ready = clock.ready(task)
                fits = ready is not None and ready <= clock.now[position] + 1e-12
                return index if fits and wait >= self.worth * clock.times.of(task) else None
        return None

    def run(self) -> TimedOrder | None:
        """Returns None where the frame cannot be played to its end within the limit."""
        positions = range(len(self.frame))
        left = sum(len(tasks) + sum(task.kind == "I" for task in tasks) for tasks in self.frame)
        chosen: list[tuple[float, Task] | None] = [self.choose(position) for position in positions]
        place = self.clock.place
        for _ in range(left):
            times = [(entry[0], p) for p, entry in enumerate(chosen) if entry is not None]
            _, position = min(times, default=(0.0, None))
            if position is None:
                return None
            start, task = chosen[position]  # pyright: ignore[reportGeneralTypeIssues]
            self.clock.play(task, start)
            if task.kind == "W":
                self.due[position].pop(0)
            else:
                self.heads[position] += 1
                if task.kind == "I":
                    self.due[position].append(Task("W", task.stage, task.microbatch))
            near = {position, *(place[s] for s in (task.stage - 1, task.stage + 1) if 0 <= s < len(place))}
            for other in near:  # the choices of other positions cannot have changed
                chosen[other] = self.choose(other)
        return self.clock.result()


def _frame(order: Order) -> Order:
    """The forwards and input halves of an order."""
    return [[task._replace(kind="I") if task.kind == "B" else task for task in tasks if task.kind != "W"]
            for tasks in order]


class Candidate(NamedTuple):
    name: str
    virtual: int
    place: tuple[int, ...]
    timed: TimedOrder


def search(p: int, m: int, times: Callable[[tuple[int, ...]], Times | None], limit: float | None,
           virtual: int | None = None) -> Candidate:
    """The best order for p positions and m micro-batches.

    `times(place)` gives the times for a placement of stages, or None where the model cannot be cut into so
    many stages. `limit`: how much a position may keep, in micro-batches of its whole share; None for no
    limit. `virtual`: stages a position; None for any number.
    """
    candidates: list[Candidate] = []

    def add(name: str, v: int, place: tuple[int, ...], timed: TimedOrder | None) -> None:
        if timed is not None and (limit is None or timed.peak <= limit * v + 1e-9):
            candidates.append(Candidate(name, v, place, timed))

    for name, schedule in SCHEDULES.items():
        v = schedule.virtual or 2
        place = schedule.place(p, v)
        known = times(place) if virtual in (None, v) and m >= schedule.least(p) else None
        if known is not None:
            add(name, v, place, play(schedule.make(p, m, v), place, known))
    for v, place in ((1, line(p, 1)), (2, vee(p, 2))):
        known = times(place) if virtual in (None, v) else None
        room = m * v if limit is None else min(m * v, int(limit * v + 1e-9))
        if known is None or room < 1:
            continue
        frame = one_f_one_b(p, m, most=room) if v == 1 else zb_v(p, m)
        for worth in WORTH:
            for eager in (True, False):
                add("filled", v, place, _Filler(_frame(frame), Clock(place, known), room, worth, eager).run())
    if not candidates:
        raise InputError(f"no schedule of {p} positions and {m} micro-batches keeps at most {limit:g} "
                         "micro-batches a position; raise parallel.activation_limit")
    return min(candidates, key=lambda candidate: (round(candidate.timed.total_s, 9),
                                                  round(candidate.timed.span_s, 9), candidate.timed.peak))

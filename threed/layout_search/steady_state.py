"""Rhythm: play an order of stages, few micro-batches of it, and extrapolate to all of them.

A named schedule is periodic: after it is filled, each p more micro-batches take as long as the p before; or
each 2p, where positions wait for messages in turn. So two plays, 2p micro-batches apart, give the time of any
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from threed.schedules.orders import SCHEDULES, Task

FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
_KINDS = {"F": FORWARD, "B": BACKWARD, "I": INPUT, "W": WEIGHT}


class Times(NamedTuple):
    """Seconds by stage; `message` of one from a stage to the next (0 inside a position)."""

    forward: tuple[float, ...]
    before: tuple[float, ...]  # of backward, that does not wait for the gradient: RECOMPUTE of the last unit
    backward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    message: tuple[float, ...]


class Beat(NamedTuple):
    """When a step's tasks run, in seconds."""

    total_s: float
    first: list[float]  # by stage: start of the first forward, from the start of the step
    last: list[float]  # by stage: end of the last task that makes weights' gradients, before the end
    ends: list[float]  # by position: its end, before the end of the step


class Sequence_(NamedTuple):
    """The tasks of all positions in an order in which they can run."""

    # kind, stage, position, own place in `done`, that of what it waits for (-1: nothing)
    tasks: list[tuple[int, int, int, int, int]]
    last: list[int]  # by stage: index in `tasks` of the last that makes weights' gradients


@lru_cache(512)
def place_of(name: str, p: int, v: int) -> tuple[int, ...]:
    return SCHEDULES[name].place(p, v)


@lru_cache(512)
def order_of(name: str, p: int, m: int, v: int) -> list[list[Task]]:
    return SCHEDULES[name].make(p, m, v)


@lru_cache(256)
def sequence(name: str, p: int, m: int, v: int) -> Sequence_:
    order, half = order_of(name, p, m, v), p * v * m
    final, last = p * v - 1, [0] * (p * v)
    rows = []
    for position, row in enumerate(order):
        mine = []
        for kind, stage, k in row:
            own, at = stage * m + k, -1
            if kind == "F":
                at = own - m if stage else -1
            elif kind == "W":
                own += 2 * half
            else:
                own += half
                at = own + m if stage < final else -1
            mine.append((_KINDS[kind], stage, position, own, at))
        rows.append(mine)
    done, heads, tasks = bytearray(3 * half), [0] * p, []
    before = -1
    while len(tasks) > before:
        before = len(tasks)
        for position, mine in enumerate(rows):
            head, count = heads[position], len(mine)
            while head < count:
                task = mine[head]
                if task[4] >= 0 and not done[task[4]]:
                    break
                done[task[3]] = 1
                if task[0] in (BACKWARD, WEIGHT):
                    last[task[1]] = len(tasks)
                tasks.append(task)
                head += 1
            heads[position] = head
    return Sequence_(tasks, last)


def beat(name: str, p: int, m: int, v: int, times: Times) -> Beat:
    """Of all m micro-batches, by playing some of them."""
    some = few(name, p, m)
    if m <= some + 2 * p:
        return _play(name, p, m, v, times)
    less, more = _play(name, p, some, v, times), _play(name, p, some + 2 * p, v, times)
    longer = (m - some - 2 * p) * (more.total_s - less.total_s) / (2 * p)
    return more._replace(total_s=more.total_s + longer)


def few(name: str, p: int, m: int) -> int:
    """m, or where m is large a small number with a steady state that is congruent to it modulo p."""
    fewest = SCHEDULES[name].least(p) + 2 * p + 2
    return m if m <= fewest + p else fewest + (m - fewest) % p


def channels(place: Sequence[int]) -> tuple[list[int], list[int]]:
    """By stage: the channel on which it sends its output, and that of its input's gradient. Messages of one
    kind from one position to another wait for each other."""
    known: dict[object, int] = {}

    def of(kind: str, here: int, there: int) -> int:
        return known.setdefault((kind, place[here], place[there]), len(known))

    last = len(place) - 1
    return ([of("act", stage, min(stage + 1, last)) for stage in range(last + 1)],
            [of("grad", stage, max(stage - 1, 0)) for stage in range(last + 1)])


def _play(name: str, p: int, m: int, v: int, times: Times) -> Beat:
    tasks, last = sequence(name, p, m, v)
    forward, before, backward, first_half, second_half, message = times
    stages = len(forward)
    on, back = channels(place_of(name, p, v))
    done, clock, sent = [0.0] * (3 * stages * m), [0.0] * p, [0.0] * (2 * stages)
    first = [-1.0] * stages
    ends = [0.0] * stages
    finals = {index: stage for stage, index in enumerate(last)}
    for index, (kind, stage, position, own, at) in enumerate(tasks):
        now, seconds, channel = clock[position], 0.0, 0
        if kind == FORWARD:
            if at >= 0 and done[at] > now:
                now = done[at]
            if first[stage] < 0:
                first[stage] = now
            now += forward[stage]
            seconds, channel = message[stage], on[stage]
        elif kind == WEIGHT:
            now += second_half[stage]
        else:
            now += before[stage]
            if at >= 0 and done[at] > now:
                now = done[at]
            now += backward[stage] if kind == BACKWARD else first_half[stage]
            if stage:
                seconds, channel = message[stage - 1], back[stage]
        clock[position] = done[own] = now
        if seconds:  # when it arrives
            begin = sent[channel] if sent[channel] > now else now
            done[own] = sent[channel] = begin + seconds
        if index in finals:
            ends[stage] = now
    total = max(clock)
    return Beat(total, first, [total - end for end in ends], [total - end for end in clock])


class Live(NamedTuple):
    """What a position keeps at a time, by its stages: micro-batches from forward to backward, and from the
    input half of backward to the weights' half."""

    saved: tuple[int, ...]
    operands: tuple[int, ...]


@lru_cache(512)
def held(name: str, p: int, m: int, v: int) -> tuple[tuple[Live, ...], ...]:
    """By position: what it keeps at the times of most memory, none of which is below another."""
    if name in KEEP_ALL:
        return tuple((Live((m,) * v, (0,) * v),) for _ in range(p))
    m = few(name, p, m)
    place, result = place_of(name, p, v), []
    for position, tasks in enumerate(order_of(name, p, m, v)):
        mine = (stage for stage, where in enumerate(place) if where == position)
        chunk = {stage: at for at, stage in enumerate(mine)}
        saved, operands, seen = [0] * v, [0] * v, set()
        for task in tasks:
            at = chunk[task.stage]
            saved[at] += task.kind == "F"
            seen.add((*saved, *operands))
            # Unit by unit, operands take the place of what was saved.
            saved[at] -= task.kind in "BI"
            operands[at] += (task.kind == "I") - (task.kind == "W")
            seen.add((*saved, *operands))
        result.append(tuple(Live(each[:v], each[v:]) for each in _highest(seen)))
    return tuple(result)


KEEP_ALL = ("gpipe", "breadth-first")


def _highest(rows: set[tuple[int, ...]]) -> Sequence[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []
    for row in sorted(rows, key=lambda row: (-sum(row), row)):
        if not any(all(a <= b for a, b in zip(row, other, strict=True)) for other in kept):
            kept.append(row)
    return kept


@lru_cache(512)
def at_once(name: str, p: int, m: int, v: int) -> bool:
    """Whether the last unit's backward follows its forward, so that to recompute it would save nothing."""
    place = place_of(name, p, v)
    if name in KEEP_ALL:
        return m == 1
    tasks, final = order_of(name, p, few(name, p, m), v)[place[-1]], len(place) - 1
    index = tasks.index(Task("F", final, 0))
    return index + 1 < len(tasks) and tasks[index + 1][1:] == (final, 0)


@lru_cache(256)
def apart(name: str, p: int, m: int, v: int) -> int:
    """Of how many micro-batches the last unit's backward does not follow its forward, where that of the first
    does: of the last turn of `interleaved`, say, which is shorter where p does not divide m."""
    place = place_of(name, p, v)
    tasks, final = order_of(name, p, few(name, p, m), v)[place[-1]], len(place) - 1
    return sum(task[:2] == ("F", final) and then[1:] != task[1:] for task, then in zip(tasks, tasks[1:]))


@lru_cache(64)
def splits(name: str) -> bool:
    """Whether a schedule's last weights' gradients come from halves of backwards."""
    return SCHEDULES[name].make(2, 4, 2)[0][-1].kind == "W"

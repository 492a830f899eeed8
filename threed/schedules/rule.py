"""Rule: a few numbers that decide what each pipeline position computes next, and `play`, which plays a
pipeline by a rule.

A rule gives each forward and input half a key: the time at which it would run if the pipeline repeated one
pattern for ever. A micro-batch passes the stages one after the other, forwards and then backwards. A leg is a
run of stages in one direction: chunk 0 forwards, chunk 1 forwards, chunk 1 backwards, chunk 0 backwards where
a position has two chunks. From one stage of a leg to the next, keys rise by the time of the task, the message
and the leg's slack; the keys of the next micro-batch are one period later.

    position 0   F0 .  .  .  .  .  .  F1 I1 .  .  .  .  .  .  I0
    position 1   .  F0 .  .  .  .  F1 .  .  I1 .  .  .  .  I0 .
    position 2   .  .  F0 .  .  F1 .  .  .  .  I1 .  .  I0 .  .
    position 3   .  .  .  F0 F1 .  .  .  .  .  .  I1 I0 .  .  .

Without slack a micro-batch is back soon, so that little is kept; slack lets more micro-batches be under way.
Each position runs the task with the smallest key; a weights' half fills a wait, and makes room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from threed.schedules.orders import Task
from threed.schedules.timed import StageTimes, TimedOrder

INF = float("inf")


class OrderRule(NamedTuple):
    """All in shares of the period, which is the work of the position with the most of it, but `spare`."""

    slack: tuple[float, ...]  # of each leg, for a step from stage to stage
    turn: tuple[float, ...]  # more slack between legs
    ahead: float  # a task may overtake tasks whose keys are smaller by at most this
    worth: float  # of the time of a weights' half: shorter waits are not filled
    spare: float  # 0 to 1: room that a position leaves, on its first chunk, for the other chunks
    pace: float = 1.0  # the period of the keys


def work(place: Sequence[int], times: StageTimes) -> list[float]:
    """Seconds that each position computes for a micro-batch."""
    seconds = [0.0] * (max(place) + 1)
    for stage, position in enumerate(place):
        seconds[position] += times.forward[stage] + times.input[stage] + times.weight[stage]
    return seconds


def keys(rule: OrderRule, place: Sequence[int], times: StageTimes) -> tuple[list[float], list[float]]:
    """The keys of the first micro-batch's forwards and input halves, by stage, in seconds."""
    stages = len(place)
    leg, unit = max(place) + 1, max(work(place, times))
    path = [*range(stages), *reversed(range(stages))]
    values, key = [], 0.0
    for index, stage in enumerate(path[:-1]):
        values.append(key)
        key += (times.forward if index < stages else times.input)[stage]
        key += times.message if place[stage] != place[path[index + 1]] else 0.0
        key += unit * (rule.turn if (index + 1) % leg == 0 else rule.slack)[index // leg]
    return values[:stages], [key, *reversed(values[stages:])]


def play(rule: OrderRule, place: Sequence[int], times: StageTimes, m: int, room: int,
         longest_s: float = INF) -> TimedOrder | None:
    """The order that a rule gives, where a position keeps at most `room` chunks; None where the pipeline
    stands still before its end, or takes longer than `longest_s`."""
    player = _Player(rule, place, times, m, room)
    if not player.run(longest_s):
        return None
    spans = [end - first for first, end in zip(player.first, player.now, strict=True)]
    order = [[Task("FIW"[code // m // len(place)], code // m % len(place), code % m) for code in codes]
             for codes in player.codes]
    return TimedOrder(order, max(spans), max(player.now), player.peak)


class _Player:
    """Tasks are numbers, since a search plays thousands of orders: an op is kind * stages + stage (kind 0:
    forward, 1: input half, 2: weights' half), a task is op * m + micro-batch. Each op runs its micro-batches
    in their order."""

    def __init__(self, rule: OrderRule, place: Sequence[int], times: StageTimes, m: int, room: int):
        stages, p = len(place), max(place) + 1
        v = stages // p
        forward, backward = keys(rule, place, times)
        self.work = work(place, times)
        unit = max(self.work)
        self.period = unit * rule.pace
        self.place, self.m, self.room = place, m, room
        self.ahead, self.message = rule.ahead * unit, times.message
        self.seconds = [*times.forward, *times.input, *times.weight]
        self.worth = [rule.worth * seconds for seconds in times.weight]
        self.key = [*forward, *backward]  # of each op's next micro-batch
        self.ready: list[list[float]] = [[] for _ in range(2 * stages)]  # by op: when each next one can run
        self.ready[0] = [0.0] * m
        self.count = [0] * 2 * stages
        self.ops = [[kind * stages + s for s in range(stages) if place[s] == q for kind in (0, 1)]
                    for q in range(p)]
        self.most = [room] * stages + [INF] * stages  # chunks before which a position may begin an op
        for s, q in enumerate(place):
            if rule.spare >= 0 and s // p + 1 < v:
                share = rule.spare * (room / v - 1) * q / max(1, p - 1) if s < p else 0.0
                self.most[s] = max(1, room - (v - 1 - s // p) - round(share))
        self.now, self.first, self.start = [0.0] * p, [-1.0] * p, [INF] * p
        self.chosen, self.live, self.peak = [-1] * p, [0] * p, 0
        self.sure = [False] * p  # whether a position's next op stays, whatever arrives
        self.due: list[list[int]] = [[] for _ in range(p)]  # weights' halves, oldest first
        self.codes: list[list[int]] = [[] for _ in range(p)]

    def choose(self, q: int) -> None:
        """Choose the next op of position q. `chosen[q]` is the op, and `start[q]` is its start time: INF if
        that is not known yet, or if no task is left. `sure[q]`: a later arrival cannot change the choice."""
        key, most, live, due, now = self.key, self.most, self.live[q], self.due[q], self.now[q]
        make_room = due and live >= self.room
        head, first = INF, -1
        for op in self.ops[q]:
            if key[op] < head and (live < most[op] or make_room):
                head, first = key[op], op
        soon, then = INF, -1
        if first >= 0:
            if live >= most[first]:
                then, soon = due[0] // self.m, now
            else:
                soon, then = self.ready_at(first), first
        self.sure[q] = soon <= now + 1e-9
        if not self.sure[q]:
            soon, then = self.overtake(q, head, first, soon)
            if due and soon - now >= self.worth[due[0] // self.m - len(key)]:
                soon, then = now, due[0] // self.m
        self.start[q], self.chosen[q] = max(soon, now), then

    def ready_at(self, op: int) -> float:
        times, n = self.ready[op], self.count[op]
        return times[n] if n < len(times) else INF

    def overtake(self, q: int, head: float, first: int, soon: float) -> tuple[float, int]:
        """(start, op) where a position would wait until `soon` for the op with the smallest key: an op that
        may overtake it, if there is one."""
        then, best, now, live = first, INF, self.now[q] + 1e-9, self.live[q]
        for op in self.ops[q] if self.ahead else ():
            key = self.key[op]
            if key <= head + self.ahead and key < best and live < self.most[op]:
                ready = self.ready_at(op)
                if ready <= now:
                    soon, then, best = ready, op, key
                elif ready < soon:
                    soon, then = ready, op
        return soon, then

    def run(self, longest_s: float) -> bool:
        """Play to the end; False where no position can go on before, or one has waited too long."""
        waits = [longest_s - work * self.m for work in self.work]  # how long each position may wait yet
        place, m, last = self.place, self.m, len(self.place) - 1
        stages = last + 1
        for q in range(len(self.now)):
            self.choose(q)
        for _ in range(3 * stages * m):
            start = min(self.start)
            if start == INF:
                return False
            q = self.start.index(start)
            waits[q] -= start - self.now[q]
            if waits[q] < -1e-6:
                return False
            op = self.chosen[q]
            if self.first[q] < 0:
                self.first[q] = start
            end = self.now[q] = start + self.seconds[op]
            if op >= 2 * stages:
                self.codes[q].append(self.due[q].pop(0))
                self.live[q] -= 1
                self.choose(q)
                continue
            n = self.count[op]
            self.codes[q].append(op * m + n)
            self.count[op] = n + 1
            self.key[op] = self.key[op] + self.period if n + 1 < m else INF
            if op >= stages:
                self.due[q].append((op + stages) * m + n)
                to = op - 1 if op > stages else -1
            else:
                self.live[q] += 1
                if self.live[q] > self.peak:
                    self.peak = self.live[q]
                to = op + 1 if op < last else stages + last
            if to >= 0:
                where = place[to % stages]
                if where != q:
                    self.ready[to].append(end + self.message)
                    if not self.sure[where]:
                        self.choose(where)
                else:
                    self.ready[to].append(end)
            self.choose(q)
        return True

"""Explore: look for rules (`rule.py`) whose orders are short. Patterns and random rules come first; then a
number of one of the best few is changed, again and again. The same arguments give the same orders."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from threed.schedules import rule
from threed.schedules.bound import Bound, bound
from threed.schedules.rule import OrderRule
from threed.schedules.timed import StageTimes, TimedOrder

FRESH, KEPT = 40, 4  # random rules, and rules that are kept
WORK, LEAST, MOST = 36_000, 100, 250  # changed rules: WORK / (positions * micro-batches), within these
STEPS = (0.02, 0.1, 0.4)  # how much a change adds to a number or takes from it, at most


class Course(NamedTuple):
    """A placement of stages, and its times."""

    virtual: int
    place: tuple[int, ...]
    times: StageTimes

    def room(self, limit: float, m: int) -> int:
        """The number of chunks whose activations a position may store. `limit`: the same in micro-batches; a
        micro-batch has `virtual` chunks on a position."""
        return int(min(limit, m) * self.virtual + 1e-9)


class Trial(NamedTuple):
    name: str
    virtual: int
    place: tuple[int, ...]
    timed: TimedOrder


def score(candidate: Trial) -> tuple[float, float, int]:
    """The less, the better: first the step, then the longest span, then what is kept."""
    order = candidate.timed
    return round(order.total_s, 9), round(order.span_s, 9), order.peak


def least(courses: Sequence[Course], m: int, limit: float) -> Bound:
    """What no order on any of these placements can be below."""
    bounds = [bound(course.place, course.times, m, room) for course in courses
              if (room := course.room(limit, m)) >= 1]
    return Bound(min((b.span_s for b in bounds), default=0.0), min((b.total_s for b in bounds), default=0.0))


class Explorer:
    """Orders of m micro-batches that keep at most `limit` micro-batches."""

    def __init__(self, courses: Sequence[Course], m: int, limit: float):
        self.courses = [course for course in courses if course.room(limit, m) >= course.virtual]
        self.m, self.limit, self.random = m, limit, random.Random(f"{m} {limit}")
        self.bound = least(courses, m, limit)
        self.best: Trial | None = None
        self.pool: list[tuple[tuple[float, float, int], OrderRule, Course]] = []  # the best rules, in order

    def beyond(self, candidate: Trial | None) -> bool:
        """Whether no order can be better than this one."""
        if candidate is None:
            return not self.courses
        order, (span_s, total_s) = candidate.timed, self.bound
        return (round(order.total_s, 6), round(order.span_s, 6)) <= (round(total_s, 6), round(span_s, 6))

    def run(self) -> None:
        for course in self.courses:
            for known in self.patterns(course):
                self.try_rule(known, course)
        for index in range(FRESH):
            course = self.courses[-1 if index % 4 else 0]
            self.try_rule(self.fresh(course), course)
        size = self.m * (1 + max(self.courses[0].place))
        for _ in range(min(MOST, max(LEAST, WORK // size))):
            if not self.beyond(self.best):
                self.change()

    def change(self) -> None:
        """Change a number of a rule that is kept; the better ones more often."""
        if self.pool:
            index = min(self.random.randrange(len(self.pool)) for _ in range(2))
            _, known, course = self.pool[index]
            self.try_rule(self.changed(known), course, index)

    def try_rule(self, tried: OrderRule, course: Course, instead: int | None = None) -> None:
        """Play a rule, and keep it if it is among the best; or, with `instead`, no worse than that one."""
        worst = self.pool[-1 if instead is None else instead][0][0] if self.pool else math.inf
        if instead is None and len(self.pool) < KEPT:
            worst = math.inf
        room = course.room(self.limit, self.m)
        order = rule.play(tried, course.place, course.times, self.m, room, worst)
        if order is None:
            return
        found = Trial("searched", course.virtual, course.place, order)
        if self.best is None or score(found) < score(self.best):
            self.best = found
        if instead is None:
            self.pool.append((score(found), tried, course))
        elif score(found) <= self.pool[instead][0]:
            self.pool[instead] = score(found), tried, course
        self.pool.sort(key=lambda entry: entry[0])
        del self.pool[KEPT:]

    def loose(self, course: Course) -> float:
        """The slack of all legs that fills the room: it holds as many lives of chunks at a time, and a life
        is the way with its slack."""
        times = course.times
        way = (sum(times.forward) + sum(times.input)) / (max(rule.work(course.place, times)) or 1.0)
        return max(0.1, (course.room(self.limit, self.m) - way) / (max(course.place) + 1))

    def patterns(self, course: Course) -> list[OrderRule]:
        """Rules with which a search well begins: equal slack, or more of it in every other leg."""
        v, loose = course.virtual, self.loose(course)
        found = []
        for share in (0.3, 0.6, 0.9):
            for odd in (1 / 3, 1 / 2, 2 / 3) if v == 2 else (1 / 2,):
                slack = [share * loose / v * (odd if leg % 2 else 1 - odd) for leg in range(2 * v)]
                found.append(OrderRule(tuple(slack), (0.0,) * (2 * v - 1), 0.0, 0.25, -1.0))
        still = (0.0,) * (2 * v - 1)
        for ahead, worth, spare in ((0.1, 1.0, -1.0), (0.3, 1.0, -1.0), (0.3, 0.5, -1.0), (100.0, 0.5, 0.9)):
            found += [OrderRule((share,) * 2 * v, still, ahead, worth, spare) for share in (0.0, 0.05)]
        return found

    def fresh(self, course: Course) -> OrderRule:
        """A random rule. Lives of chunks are as long as the room allows, or shorter."""
        draw, v = self.random.random, course.virtual
        loose = 1.2 * draw() * self.loose(course)
        if draw() < 0.5:  # what forwards of a chunk take longer, backwards take shorter
            shares = [draw() / v for _ in range(v)]
            slack = [*shares, *(1 / v - share for share in reversed(shares))]
        else:
            slack = [draw() ** 2 for _ in range(2 * v)]
            slack = [share / sum(slack) for share in slack]
        turn = tuple(draw() if draw() < 0.25 else 0.0 for _ in range(2 * v - 1))
        worth = self.random.choice((0.0, 0.25, 0.5, 1.0))
        if draw() < 0.3:
            ahead, spare = self.random.choice((0.5, 100.0)), draw()
        else:
            ahead = self.random.choice((0.0, 0.0, 0.0, 0.03, 0.1))
            spare = self.random.choice((-1.0, -1.0, -1.0, 0.0, draw()))
        return OrderRule(tuple(loose * share for share in slack), turn, ahead, worth, spare)

    def changed(self, known: OrderRule) -> OrderRule:
        """A rule that differs in one number, or two."""
        draw, choice = self.random.random, self.random.choice
        by, what = choice(STEPS) * 2 * (draw() + draw() - 1), draw()
        slack, turn = list(known.slack), list(known.turn)
        if what < 0.6:
            index, other = self.random.sample(range(len(slack)), 2)
            slack[index] = max(0.0, slack[index] + by)
            if what > 0.45:
                slack[other] = max(0.0, slack[other] - by)
        elif what < 0.75:
            index = self.random.randrange(len(turn))
            turn[index] = max(0.0, turn[index] + by) if draw() < 0.8 else 0.0
        known = known._replace(slack=tuple(slack), turn=tuple(turn))
        if what < 0.75:
            return known
        if what < 0.83:
            return known._replace(worth=choice((0.0, 0.1, 0.25, 0.5, 0.75, 1.0)))
        if what < 0.9:
            return known._replace(ahead=choice((0.0, 0.0, 0.03, 0.1, 0.3, 1.0, 100.0)))
        if what < 0.97:
            return known._replace(spare=choice((-1.0, 0.0, draw())))
        return known._replace(pace=choice((0.9, 0.95, 0.98, 1.0, 1.0, 1.02, 1.05, 1.1)))



"""Auto: search an order for given times and a limit on activations. The number of candidates bounds the
search, never the clock, unless a time is given (`seconds`).

Candidates are every named schedule within the limit, orders that rules play (`rule.py`), and the best order
of a divisor of the micro-batches, repeated. `explore.py` looks for rules with the room of each step of
`LADDER` up to the limit. The shortest step wins; then the shortest span.

What follows by construction:

* The step is never longer than that of a named schedule within the limit: all of them are candidates.
* It is never longer than with a lower limit: what a step of the ladder finds does not depend on the limit.
* Its time per micro-batch is never longer than with a divisor of the micro-batches: repeating the order of
  the divisor keeps what it keeps, and takes at most as many times as long.

Nothing can promise the last for any smaller number of micro-batches: where two fit into memory, three take
two turns, as four do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from threed.base.errors import InputError
from threed.schedules.bound import Bound
from threed.schedules.explore import Course, Explorer, Trial, least, score
from threed.schedules.orders import SCHEDULES, Order, line, vee
from threed.schedules.timed import StageTimes, play

# What a position may keep at each step of the search, in micro-batches of its whole share, by the number of
# positions; the last step is all of them.
LADDER = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, math.inf)

TimesOf = Callable[[tuple[int, ...]], StageTimes | None]


def search(p: int, m: int, times: TimesOf, limit: float | None, virtual: int | None = None,
           seconds: float | None = None) -> tuple[Trial, Bound]:
    """The best order for p positions and m micro-batches, and what no order on the same placements can be
    below.

    `times(place)` gives the times for a placement of stages, or None where the model cannot be cut into so
    many stages. `limit`: how much a position may keep, in micro-batches of its whole share; None for no
    limit. `virtual`: stages a position; None for any number. `seconds`: go on for this long, or until the
    bound is reached; then the result depends on the machine.
    """
    seeker = _Search(p, times, math.inf if limit is None else limit, virtual)
    found = seeker.find(m, seconds)
    if found is None:
        raise InputError(f"no schedule of {p} positions and {m} micro-batches keeps at most {limit:g} "
                         "micro-batches a position; raise parallel.activation_limit")
    return found, least(seeker.courses, m, seeker.limit)


def repeat(order: Order, m: int, copies: int) -> Order:
    """An order of m micro-batches, `copies` times one after the other."""
    return [[task._replace(microbatch=copy * m + task.microbatch) for copy in range(copies) for task in tasks]
            for tasks in order]


class _Search:
    def __init__(self, p: int, times: TimesOf, limit: float, virtual: int | None):
        self.p, self.limit = p, limit
        known: dict[tuple[int, ...], Course] = {}
        places = {name: schedule.place(p, schedule.virtual or max(2, virtual or 2))
                  for name, schedule in SCHEDULES.items()}
        for place in {line(p, 1): 1, vee(p, 2): 2, **dict.fromkeys(places.values())}:
            v = len(place) // p
            found = times(place) if virtual in (None, v) else None
            if found is not None:
                known[place] = Course(v, place, found)
        self.courses = list(known.values())
        searched = [course for course in self.courses if course.place in (line(p, 1), vee(p, 2))]
        self.searched = searched or self.courses
        self.named = {name: known[place] for name, place in places.items() if place in known}
        self.best: dict[int, Trial | None] = {}

    def find(self, m: int, seconds: float | None = None) -> Trial | None:
        """The best order of m micro-batches; None where none is within the limit."""
        found = self.named_orders(m)
        found += self.explored(m, min(found, key=score, default=None), seconds)
        for divisor in sorted({m // prime for prime in range(2, m + 1) if m % prime == 0 and _prime(prime)}):
            best = min(found, key=score, default=None)
            bound_s = least(self.courses, divisor, self.limit).total_s
            if best is not None and best.timed.total_s <= bound_s * (m // divisor):
                continue  # no order of so few can be better
            if divisor not in self.best:
                self.best[divisor] = self.find(divisor)
            part = self.best[divisor]
            if part is not None:
                course = next(course for course in self.courses if course.place == part.place)
                order = repeat(part.timed.order, divisor, m // divisor)
                found.append(part._replace(timed=play(order, part.place, course.times)))
        return min(found, key=score, default=None)

    def named_orders(self, m: int) -> list[Trial]:
        found = []
        for name, course in self.named.items():
            if SCHEDULES[name].fills(self.p, m):
                order = play(SCHEDULES[name].make(self.p, m, course.virtual), course.place, course.times)
                if order.peak <= self.limit * course.virtual + 1e-9:
                    found.append(Trial(name, course.virtual, course.place, order))
        return found

    def explored(self, m: int, known: Trial | None, seconds: float | None) -> list[Trial]:
        """The best orders of each step of the ladder, from the highest on; but for steps at which none can be
        better than what is known."""
        until, found = time.monotonic() + (seconds or 0.0), [known] if known is not None else []
        explorers = [Explorer(self.searched, m, room)
                     for room in sorted({min(m, max(1.0, step * self.p)) for step in LADDER}, reverse=True)
                     if room <= self.limit + 1e-9]
        for explorer in explorers:
            if not explorer.beyond(min(found, key=score, default=None)):
                explorer.run()
                found += [explorer.best] if explorer.best is not None else []
        for explorer in explorers[:1]:
            while time.monotonic() < until and explorer.pool and not explorer.beyond(explorer.best):
                explorer.change()
            found += [explorer.best] if explorer.best is not None else []
        return found


def _prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))

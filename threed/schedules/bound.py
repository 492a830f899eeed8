"""Bound: times below which no order of a pipeline can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from threed.schedules.timed import StageTimes


class Bound(NamedTuple):
    span_s: float  # of the position that takes longest, from its first task to its last
    total_s: float  # of the step


def bound(place: Sequence[int], times: StageTimes, m: int, room: int | None = None) -> Bound:
    """The least span and step time, in seconds, of any order of m micro-batches on this placement in which
    each position keeps at most `room` chunks (None: any number).

    A position's span is at least its work and the waits that nothing can fill:

    * Before its first input half it can run forwards only, of at most `room` chunks. That input half comes
      after the position's first forward by a whole way to the last stage and back.
    * After its last forward it has at most `room` chunks to go back through, and the one that came last needs
      a way to the last stage and back before its weights' half.
    * A chunk is kept for at least that way. With the same room again and again, m chunks of a stage take
      ceil(m / room) ways, and all chunks of a position together their lives divided by `room`.

    The step begins with the way to the position's first stage, and ends no sooner than the way back from its
    last input half, before which all weights' halves but `room` have been run. Neglected: that positions wait
    for each other in between, that messages share links, and what the chunks of one position do to each
    other's room. So the bound is good where memory is ample, and can be far off where it is tight.
    """
    view = _Path(place, times)
    rows = [view.position(q, m, room) for q in range(max(place) + 1)]
    return Bound(max(span for span, _ in rows), max(total for _, total in rows))


class _Path:
    """One micro-batch's way through the stages: when each task starts, if nothing else runs."""

    def __init__(self, place: Sequence[int], times: StageTimes):
        self.place, self.times = place, times
        stages = len(place)
        path = [*range(stages), *reversed(range(stages))]
        starts, now = [], 0.0
        for index, stage in enumerate(path):
            starts.append(now)
            now += (times.forward if index < stages else times.input)[stage]
            if index + 1 < len(path) and place[path[index + 1]] != place[stage]:
                now += times.message
        self.forward, self.input, self.end = starts[:stages], starts[:stages - 1:-1], now

    def position(self, q: int, m: int, room: int | None) -> tuple[float, float]:
        """(least span, least time of the step) that follow from one position."""
        times = self.times
        own = [stage for stage, where in enumerate(self.place) if where == q]
        first, last, chunks = own[0], own[-1], m * len(own)
        most = chunks if room is None else min(room, chunks)
        forward, back = ([values[stage] for stage in own] for values in (times.forward, times.input))
        weight = [times.weight[stage] for stage in own]
        begin = max(0.0, self.input[last] - self.forward[first] - _most(forward, m, most))
        way = self.input[first] + times.input[first] + times.weight[first]
        way -= self.forward[last] + times.forward[last]
        end = max(0.0, way - _most([b + w for b, w in zip(back, weight, strict=True)], m, most))
        # The two waits are apart where the last forward needs the room of a chunk that has ended.
        idle = begin + end if chunks > most else max(begin, end)
        span = m * (sum(forward) + sum(back) + sum(weight)) + idle
        lives = [self.input[s] + times.input[s] + times.weight[s] - self.forward[s] for s in own]
        span = max(span, m * sum(lives) / most)
        rounds, more = divmod(m - 1, most)
        for stage, life in zip(own, lives, strict=True):
            span = max(span, (rounds + 1) * life + more * times.forward[stage])
        before = m * (sum(forward) + sum(back)) + begin + m * sum(weight) - _most(weight, m, most)
        after = self.end - self.input[first] - times.input[first] + times.weight[0]
        return span, self.forward[first] + max(span, before + after)


def _most(values: Sequence[float], copies: int, count: int) -> float:
    """The sum of the `count` largest of the values, each of which is there `copies` times."""
    total = 0.0
    for value in sorted(values, reverse=True):
        total += value * min(copies, count)
        count -= min(copies, count)
    return total

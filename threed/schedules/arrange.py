"""In which order jobs compute, so that what others do for them meanwhile is waited for as little as possible:
a job shop of one lane that is arranged, and others that take what comes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

# Orders that are followed at a time, and the jobs with which each may go on. Of very many jobs one order is
# followed: the time that an end is waited for counts less there.
WIDTH, CHOICES, MANY = 8, 6, 200


class LaneTask(NamedTuple):
    """Something that takes time on a lane. A lane does one job at a time."""

    takes: float  # seconds, or any other unit, the same for all
    lane: str
    needs: tuple[int, ...]  # jobs before it in the list, for whose ends it waits


class Arranged(NamedTuple):
    order: tuple[int, ...]  # the jobs of the lane that was arranged
    ends: tuple[float, ...]  # of each job

    @property
    def span(self) -> float:
        """From the begin of the first job to the end of the last."""
        return max(self.ends, default=0.0)


@lru_cache(maxsize=1024)
def arrange(jobs: tuple[LaneTask, ...], lane: str = "compute") -> Arranged:
    """An order of the jobs of `lane`. The other lanes take their jobs in the order in which these become
    ready.

    List scheduling (Graham 1966) with the longest path to the end as priority; or, where the end is later
    than a lower bound, a beam search, if that is better.
    """
    shop = _Shop(jobs, lane)
    first = _follow(shop, 1)
    if len(jobs) > MANY or first.span <= shop.first().bound:
        return first
    return min(first, _follow(shop, WIDTH), key=lambda each: each.span)


def _follow(shop: _Shop, width: int) -> Arranged:
    """Beam search: job by job, the `width` orders are followed whose lower bounds are least, each with those
    of its ready jobs from which the path to the end is longest. Width 1 is list scheduling: a job that can
    begin first, if several can, the one with the longest path."""
    begun = [shop.first()]
    for _ in range(sum(job.lane == shop.lane for job in shop.jobs)):
        following = [each for state in begun for each in shop.next(state, 1 if width == 1 else CHOICES)]
        best: dict[tuple[object, ...], _State] = {}
        for state in sorted(following, key=lambda state: (state.bound, state.free[shop.lane])):
            best.setdefault((frozenset(state.order), *state.free.values()), state)
        begun = [*best.values()][:width]
    return min((Arranged(state.order, state.ends) for state in begun), key=lambda each: each.span)


class _State(NamedTuple):
    """Jobs that have been put in order, and all that these let other lanes do."""

    order: tuple[int, ...]
    ends: tuple[float, ...]  # of each job; -1: it has not begun
    free: dict[str, float]  # lane -> since when
    ready: tuple[int, ...]  # jobs of the arranged lane that may come next
    bound: float  # of the span


class _Shop:
    def __init__(self, jobs: Sequence[LaneTask], lane: str):
        self.jobs, self.lane = jobs, lane
        self.readers: list[list[int]] = [[] for _ in jobs]
        self.tails = [job.takes for job in jobs]  # from a job's begin to the end, if only needs hold it up
        for index in reversed(range(len(jobs))):
            for need in jobs[index].needs:
                self.readers[need].append(index)
                self.tails[need] = max(self.tails[need], jobs[need].takes + self.tails[index])
        self.work = sum(job.takes for job in jobs if job.lane == lane)

    def first(self) -> _State:
        free = dict.fromkeys((self.lane, *(job.lane for job in self.jobs)), 0.0)
        start = _State((), (-1.0,) * len(self.jobs), free, (), 0.0)
        return self._after(start, [index for index, job in enumerate(self.jobs) if not job.needs], self.work)

    def next(self, state: _State, choices: int) -> Iterable[_State]:
        begins = {index: max(state.free[self.lane], self._begin(index, state.ends)) for index in state.ready}
        if choices == 1:  # what can begin first
            first = min(begins.values())
            begins = {index: begin for index, begin in begins.items() if begin == first}
        left = self.work - sum(self.jobs[index].takes for index in state.order)
        for index in sorted(begins, key=lambda index: (-self.tails[index], index))[:choices]:
            end = begins[index] + self.jobs[index].takes
            ends = (*state.ends[:index], end, *state.ends[index + 1:])
            done = _State((*state.order, index), ends, {**state.free, self.lane: end},
                          tuple(each for each in state.ready if each != index), 0.0)
            came = [reader for reader in self.readers[index] if self._is_ready(reader, ends)]
            yield self._after(done, came, left - self.jobs[index].takes)

    def _after(self, state: _State, came: list[int], left: float) -> _State:
        """A state in which jobs have become ready: other lanes take theirs. `left`: work of the lane."""
        ends, free, ready = [*state.ends], dict(state.free), [*state.ready]
        while came:
            index = came.pop(0)
            job = self.jobs[index]
            if job.lane == self.lane:
                ready.append(index)
                continue
            ends[index] = free[job.lane] = max(free[job.lane], self._begin(index, ends)) + job.takes
            came += [reader for reader in self.readers[index] if self._is_ready(reader, ends)]
        paths = [max(free[self.lane], self._begin(index, ends)) + self.tails[index] for index in ready]
        bound = max((free[self.lane] + left, *paths, *ends))
        return _State(state.order, tuple(ends), free, tuple(ready), bound)

    def _is_ready(self, index: int, ends: Sequence[float]) -> bool:
        return all(ends[need] >= 0 for need in self.jobs[index].needs)

    def _begin(self, index: int, ends: Sequence[float]) -> float:
        return max((ends[need] for need in self.jobs[index].needs), default=0.0)

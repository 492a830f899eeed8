"""Best-first search: all layouts of a config on so many devices; those that no bound drops are timed and
measured by short plans, the best by the full plan.

    shapes, by a lower bound -> variants that may fit -> short plans -> best ideas -> full plan -> ranked

What cannot be among the best gets no plan: what is slower, at best, than so many ideas, or than another
layout of its idea; and what saves more memory than a variant of its shape that fits.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import time
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from threed.base.errors import ThreedError
from threed.base.remember import remembering
from threed.layout_search.bounds import Bounds
from threed.layout_search.layout import Layout, config_of
from threed.layout_search.short_plan import ShortPlans
from threed.layout_search.space import NEEDLESS, NO_HOST, NO_MEMORY, REFUSED, SLOWER, Space, Variant
from threed.prediction.hardware import Hardware
from threed.schema import Config

Progress = Callable[[str], None]
_NEAR = 1.002  # what is so much slower than the worst of the best is dropped
_AS_FAST = 1.0005  # so near, the layout that holds less is better
_SURE = 0.99  # what takes less of the memory fits by the full plan, too
TRIES = 3  # layouts of an idea that may turn out not to fit
_FAR = 1.15  # times the best step: what is slower is no idea worth a plan


@contextmanager
def making_plans() -> Iterator[None]:
    """Inside, what plans of one model share is remembered; and garbage is collected seldom: plans are many
    objects, none of which is garbage for long."""
    often = gc.get_threshold()
    gc.set_threshold(1_000_000, *often[1:])
    try:
        with remembering():
            yield
    finally:
        gc.set_threshold(*often)


class Timed(NamedTuple):
    """A layout that fits, by its short plans."""

    layout: Layout
    step_s: float
    bytes: int


@dataclass
class SearchResult:
    """Layouts by step time, and how many were dropped for which reason."""

    timed: list[Timed] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # reason -> one in words
    considered: int = 0
    nearest: tuple[int, Layout] | None = None  # bytes, where nothing fits
    seconds: float = 0.0


class _Sized(NamedTuple):
    """A variant and its bounds."""

    variant: Variant
    fixed: list[int]  # bytes by position
    bound_s: float  # a step is not shorter


class _Group(NamedTuple):
    """The variants of a shape that recompute alike."""

    shape: Layout
    rank: int  # a row of Space.recomputes
    fitting: list[Variant]  # of the shape, those that surely fit
    tried: list[tuple[Variant, float]]  # of the shape: seconds than which each is not faster


class _Candidate(NamedTuple):
    """A variant that may fit."""

    variant: Variant
    group: _Group
    alike: ShortPlans  # of what computes the same
    fixed: list[int]  # bytes by position, at least


class Search:
    """`memory`: bytes of a device. `keep`: so many ideas are wanted. `rounding`: as in Space."""

    def __init__(self, base: Config, hardware: Hardware, memory: int, keep: int = 20, rounding: bool = False):
        self.base, self.hardware, self.memory, self.keep = base, hardware, memory, keep
        self.rounding = rounding
        self.bounds = Bounds(base, hardware)
        self.result = SearchResult()
        self._sure: dict[object, float] = {}  # idea -> the shortest of those that surely fit
        self._times: defaultdict[object, list[float]] = defaultdict(list)  # idea -> all, the shortest first
        self._working: dict[Layout, list[int]] = {}  # activations and temporaries by position
        self._limit = math.inf

    def again(self, keep: int) -> Search:
        """A search of the same config for so many ideas, which knows what this one knows of units."""
        other = Search(self.base, self.hardware, self.memory, keep, self.rounding)
        other.bounds, other._working = self.bounds, self._working
        return other

    def run(self, devices: int, fixed: Mapping[str, Any],
            progress: Progress = lambda _: None) -> SearchResult:
        """`fixed`: field of a layout -> its only value."""
        with making_plans():
            return self._run(Space(self.bounds, devices, fixed, self.memory, self.rounding), progress)

    def _run(self, space: Space, progress: Progress) -> SearchResult:
        begin = told = time.monotonic()
        result, numbers, ranks = self.result, itertools.count(), range(len(space.recomputes))
        # (a lower bound on the step, a number by which the first of equals comes first, what to look at)
        waiting: list[tuple[float, int, _Group | _Candidate]] = []

        def push(bound_s: float, what: _Group | _Candidate) -> None:
            heapq.heappush(waiting, (bound_s, next(numbers), what))

        for shape in space.shapes() if ranks else ():
            push(self.bounds.step_s(space.recomputing(shape, 0)), _Group(shape, 0, [], []))
        total, done = len(waiting), 0
        while waiting:
            bound_s, _, first = heapq.heappop(waiting)
            if isinstance(first, _Candidate):
                self._try(first, bound_s)
            else:
                done += first.rank == 0
                rest = ranks[first.rank:] if bound_s > self._limit else ranks[first.rank:first.rank + 1]
                result.considered += sum(space.count(first.shape, rank) for rank in rest)
                if bound_s > self._limit:
                    result.dropped[SLOWER] += sum(space.count(first.shape, rank) for rank in rest)
                    continue
                for candidate_s, candidate in self._candidates(space, first, bound_s):
                    push(candidate_s, candidate)
                if (rank := first.rank + 1) in ranks:
                    push(max(bound_s, self.bounds.step_s(space.recomputing(first.shape, rank))),
                         first._replace(rank=rank))
            if time.monotonic() > told + 2:
                told = time.monotonic()
                progress(self._words(done, total))
        result.dropped += space.dropped  # (of counters it keeps what is above 0)
        result.examples.update(space.wrong)
        result.considered += space.dropped.total()
        # Of layouts that are as fast, the one that holds least.
        result.timed.sort(key=lambda each: (float(f"{each.step_s:.4g}"), each.bytes))
        result.seconds = time.monotonic() - begin
        return result

    def _words(self, done: int, total: int) -> str:
        best = min((timed.step_s for timed in self.result.timed), default=None)
        words = f", best step {best:.3g} s" if best is not None else ""
        return (f"{done} of {total} shapes, {self.result.considered} layouts, {len(self.result.timed)} "
                f"timed{words}")

    def _candidates(self, space: Space, group: _Group,
                    bound_s: float) -> Iterator[tuple[float, _Candidate]]:
        """Variants of a group that may fit and be of use, each with a lower bound on its step."""
        plain = space.recomputing(group.shape, group.rank)
        taken = self.bounds.taken_bytes(plain)
        saved = [size + taken for size in self.bounds.saved_bytes(plain)]
        if max(saved) > self.memory and self.result.nearest is not None:  # without any parameters
            self.result.dropped[NO_MEMORY] += space.count(group.shape, group.rank)
            return
        some = [_Sized(variant, self.bounds.fixed_bytes(variant.layout), bound_s)
                for variant in space.variants(group.shape, group.rank)]
        some = self._of_use([each for each in some
                             if self._may_fit(each.variant.layout, _most(each.fixed, saved))])
        if some:
            held = [size + taken for size in self.bounds.working_bytes(plain)]
            some = [each for each in some if self._may_fit(each.variant.layout, _most(each.fixed, held))]
        if not some:
            return
        filled, sent_s = self.bounds.filled_s(plain), self.bounds.sent_s
        some = self._of_use([each._replace(bound_s=max(bound_s, sent_s(each.variant.layout, filled)))
                             for each in some])
        alike = ShortPlans(config_of(plain, self.base), self.hardware)
        for variant, fixed, bound_s in some:
            yield bound_s, _Candidate(variant, group, alike, fixed)

    def _working_bytes(self, layout: Layout, alike: ShortPlans) -> list[int]:
        """As of ShortPlans."""
        own = layout.of_working()
        if own not in self._working:
            self._working[own] = alike.working_bytes
        return self._working[own]

    def _of_use(self, some: list[_Sized]) -> list[_Sized]:
        """Those that may be faster than what is known of their ideas."""
        left = [each for each in some if each.bound_s <= self._limit_of(each.variant.layout)]
        self.result.dropped[SLOWER] += len(some) - len(left)
        return left

    def _may_fit(self, layout: Layout, size: int) -> bool:
        """Whether so many bytes of a device, or more, fit."""
        if size <= self.memory:
            return True
        nearest = self.result.nearest
        if nearest is None or size < nearest[0]:
            self.result.nearest = size, layout
        self.result.dropped[NO_MEMORY] += 1
        return False

    def _host_fits(self, short: ShortPlans) -> bool:
        if short.host_fits():
            return True
        self.result.dropped[NO_HOST] += 1
        return False

    def _limit_of(self, layout: Layout) -> float:
        """A layout that is slower is of no use: others of its idea, enough of which will fit, are faster."""
        others = [self._sure.get(layout.idea, math.inf), *self._times[layout.idea][TRIES - 1:TRIES]]
        return min(self._limit, _AS_FAST * min(others))

    def _try(self, candidate: _Candidate, bound_s: float) -> None:
        """Time and measure a candidate by its short plans, if it may be of use."""
        (variant, group, alike, least), result = candidate, self.result
        layout, limit = variant.layout, self._limit_of(variant.layout)
        if any(map(variant.exceeds, group.fitting)):
            result.dropped[NEEDLESS] += 1
            return
        bound_s = max([bound_s, *(seconds for other, seconds in group.tried if variant.exceeds(other))])
        try:
            if bound_s <= limit:
                working = self._working_bytes(layout, alike)
                if not self._may_fit(layout, _most(least, working)):
                    return
                microbatch_s = self.bounds.microbatch_s(layout)
                bound_s = max(bound_s, alike.least_s(microbatch_s, limit))
            if bound_s <= limit:
                short = ShortPlans(config_of(layout, self.base), self.hardware)
                if not self._may_fit(layout, size := _most(short.fixed_bytes(), working)):
                    return
                if size < _SURE * self.memory:
                    group.fitting.append(variant)
                bound_s = short.step_s(alike, limit, microbatch_s)
                group.tried.append((variant, bound_s))
            if bound_s > limit:
                result.dropped[SLOWER] += 1
                return
            size = short.peak_bytes()
            if not (self._may_fit(layout, size) and self._host_fits(short)):
                group.fitting[:] = [each for each in group.fitting if each is not variant]
                return
        except ThreedError as error:
            self._refuse(1, error)
            return
        result.timed.append(Timed(layout, bound_s, size))
        if size < _SURE * self.memory:
            self._sure[layout.idea] = min(bound_s, self._sure.get(layout.idea, math.inf))
        insort(self._times[layout.idea], bound_s)
        best = heapq.nsmallest(self.keep, (times[0] for times in self._times.values() if times))
        self._limit = _NEAR * min(_FAR * best[0], best[-1] if len(best) == self.keep else math.inf)

    def _refuse(self, count: int, error: ThreedError) -> None:
        self.result.dropped[REFUSED] += count
        self.result.examples.setdefault(REFUSED, str(error))


def _most(*sizes: list[int]) -> int:
    """Bytes of the fullest position. `sizes`: each by position."""
    return max(map(sum, zip(*sizes, strict=True)))

"""Best-first search: all layouts of a config on so many devices; those that no bound drops are timed by
short plans, the best by the full plan.

    shapes, by a lower bound -> variants that fit -> step time -> best ideas -> full plan -> ranked

What cannot be among the best is not timed: what is slower, at best, than so many ideas, or than another
layout of its idea.
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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from threed.base.errors import ThreedError
from threed.base.quantity import BYTES
from threed.base.remember import remembering
from threed.layout_search.bounds import Bounds
from threed.layout_search.layout import Layout, config_of
from threed.layout_search.memory_filter import MemoryFilter
from threed.layout_search.short_plan import ShortPlans
from threed.layout_search.space import NEEDLESS, NO_HOST, NO_MEMORY, REFUSED, SLOWER, Space, Variant
from threed.prediction import host
from threed.prediction.hardware import Hardware
from threed.program.instruction import Op, Tier
from threed.program.table import Table
from threed.schema import Config

Progress = Callable[[str], None]
_NEAR = 1.02  # what is so much slower than the worst of the best is dropped
_AS_FAST = 1.0005  # so near, the layout that holds less is better
_SURE = 0.97  # what takes less of the memory fits by the full plan, too
TRIES = 3  # layouts of an idea that may turn out not to fit
_FAR = 1.3  # while there are few ideas: times the best step


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
    """A layout that fits, as far as is known without its plan."""

    layout: Layout
    step_s: float
    bytes: int


@dataclass
class SearchResult:
    """What a search has found: layouts by step time, and how many it dropped for which reason."""

    timed: list[Timed] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # reason -> one in words
    considered: int = 0
    nearest: tuple[int, Layout] | None = None  # bytes, where nothing fits
    seconds: float = 0.0


class _Waiting(NamedTuple):
    """What is still to be looked at: the variants of a shape from a row of recomputation on; or a layout."""

    bound_s: float
    number: int  # of those that are as fast at best, the first comes first
    shape: Layout
    rank: int
    fitting: list[Variant]  # of the shape, those that surely fit
    short: ShortPlans | None = None  # of a layout: of one that computes the same


class Search:
    """`memory`: bytes of a device. `keep`: so many ideas are wanted. `rounding`: as in Space."""

    def __init__(self, base: Config, hardware: Hardware, memory: int, keep: int = 20, rounding: bool = False):
        self.base, self.hardware, self.memory, self.keep = base, hardware, memory, keep
        self.rounding = rounding
        self.bounds = Bounds(base, hardware)
        self.memory_filter = MemoryFilter(self.bounds)
        self.result = SearchResult()
        self._sure: dict[object, float] = {}  # idea -> the shortest of those that surely fit
        self._times: defaultdict[object, list[float]] = defaultdict(list)  # idea -> all, the shortest first
        self._limit, self._pair = float("inf"), False  # whether parallel.pair is fixed to true

    def run(self, devices: int, fixed: Mapping[str, Any],
            progress: Progress = lambda _: None) -> SearchResult:
        """`fixed`: field of a layout -> its only value."""
        self._pair = bool(fixed.get("pair"))
        with making_plans():
            return self._run(Space(self.bounds, devices, fixed, self.memory, self.rounding), progress)

    def _run(self, space: Space, progress: Progress) -> SearchResult:
        begin = told = time.monotonic()
        result, ranks, numbers = self.result, range(len(space.recomputes)), itertools.count()
        waiting = [_Waiting(self._bound_s(space, shape, 0), next(numbers), shape, 0, [])
                   for shape in space.shapes()] if ranks else []
        heapq.heapify(waiting)
        total, done = len(waiting), 0
        while waiting:
            first = heapq.heappop(waiting)
            done += first.short is None and first.rank == 0
            if first.short is not None:
                self._time(first.shape, first.short, first.bound_s)
            elif first.bound_s > self._limit:
                dropped = sum(space.count(first.shape, rank) for rank in ranks[first.rank:])
                result.dropped[SLOWER] += dropped
                result.considered += dropped
            else:
                result.considered += space.count(first.shape, first.rank)
                layouts = self._fitting(space.variants(first.shape, first.rank), first.fitting)
                for bound_s, layout, short in self._group(layouts, first.shape.tile_linears):
                    heapq.heappush(waiting, _Waiting(bound_s, next(numbers), layout, 0, [], short))
                if (rank := first.rank + 1) in ranks:
                    bound_s = max(first.bound_s, self._bound_s(space, first.shape, rank))
                    heapq.heappush(waiting, first._replace(bound_s=bound_s, rank=rank))
            if time.monotonic() > told + 2:
                told = time.monotonic()
                progress(self._words(done, total))
        result.dropped.update(space.dropped)
        result.examples.update(space.wrong)
        result.considered += space.dropped.total()
        # Of layouts that are as fast, the one that holds least.
        result.timed.sort(key=lambda each: (float(f"{each.step_s:.4g}"), each.bytes))
        result.seconds = time.monotonic() - begin
        return result

    def _bound_s(self, space: Space, shape: Layout, rank: int) -> float:
        policy, away = space.recomputes[rank]
        return self.bounds.step_s(shape._replace(policy=policy, offload_activations=away,
                                                 every=space.fixed.get("every", 1)))

    def _words(self, done: int, total: int) -> str:
        best = min((timed.step_s for timed in self.result.timed), default=None)
        words = f", best step {best:.3g} s" if best is not None else ""
        return (f"{done} of {total} shapes, {self.result.considered} layouts, {len(self.result.timed)} "
                f"timed{words}")

    def _fitting(self, variants: list[Variant], fitting: list[Variant]) -> list[Layout]:
        """Layouts of variants that fit, and are not needless. `fitting`: of the shape, those that surely fit.
        """
        layouts = []
        for variant in variants:
            reason = NEEDLESS if variant.needless(fitting) else self._does_not_fit(variant, fitting)
            if reason is None:
                layouts.append(variant.layout)
            else:
                self.result.dropped[reason] += 1
        return layouts

    def _does_not_fit(self, variant: Variant, fitting: list[Variant]) -> str | None:
        layout, result, size = variant.layout, self.result, self._bytes(variant.layout)
        if size > self.memory:
            if result.nearest is None or size < result.nearest[0]:
                result.nearest = size, layout
            return NO_MEMORY
        if layout.offload_optimizer and not host.fits(self.memory_filter.host_use(layout), self.hardware):
            return NO_HOST
        if size < _SURE * self.memory:
            fitting.append(variant)
        return None

    def _limit_of(self, layout: Layout) -> float:
        """A layout that is slower is of no use: others of its idea, enough of which will fit, are faster."""
        others = [self._sure.get(layout.idea, math.inf), *self._times[layout.idea][TRIES - 1:TRIES]]
        return min(self._limit, _AS_FAST * min(others))

    def _group(self, layouts: list[Layout], tiles: str | None) -> list[tuple[float, Layout, ShortPlans]]:
        """Those of layouts of one shape, which compute the same, that may be of use; what they are not faster
        than; and short plans of one of them. `tiles`: of all variants."""
        some = [(bound_s, layout) for layout in layouts
                if (bound_s := self.bounds.step_s(layout) + self.bounds.ends_s(layout))
                <= self._limit_of(layout)]
        self.result.dropped[SLOWER] += len(layouts) - len(some)
        try:
            if some:
                layout = some[0][1]._replace(tile_linears=tiles)
                short = ShortPlans(config_of(layout, self.base), self.hardware)
                least_s = short.least_s(self.bounds.microbatch_s(layout._replace(stage=1)))
                return [(max(bound_s, least_s + self._ends_s(layout, short)), layout, short)
                        for bound_s, layout in some]
        except ThreedError as error:
            self._refuse(len(some), error)
        return []

    def _ends_s(self, layout: Layout, alike: ShortPlans) -> float:
        """How much longer than a free step one is, at least, for its start and its end."""
        return self.bounds.ends_s(layout) + alike.reduced_s(self.bounds.reductions(layout))

    def _time(self, layout: Layout, alike: ShortPlans, bound_s: float) -> None:
        """Time a layout, if it may be of use. `alike`: of one that computes the same. `bound_s`: its step is
        not shorter."""
        limit = self._limit_of(layout)
        try:
            if bound_s <= limit:
                short = ShortPlans(config_of(layout, self.base), self.hardware)
                bound_s = short.step_s(alike, limit, self.bounds.microbatch_s(layout),
                                       self._ends_s(layout, alike))
            if bound_s > limit:
                self.result.dropped[SLOWER] += 1
            else:
                self._record(layout, bound_s)
        except ThreedError as error:
            self._refuse(1, error)

    def _bytes(self, layout: Layout) -> int:
        return self.memory_filter.bytes(layout._replace(pair=True) if self._pair else layout)

    def _record(self, layout: Layout, step_s: float) -> None:
        size = self._bytes(layout)
        self.result.timed.append(Timed(layout, step_s, size))
        if size < _SURE * self.memory:
            self._sure[layout.idea] = min(step_s, self._sure.get(layout.idea, math.inf))
        insort(self._times[layout.idea], step_s)
        best = heapq.nsmallest(self.keep, (times[0] for times in self._times.values() if times))
        self._limit = _NEAR * (best[-1] if len(best) == self.keep else _FAR * best[0])

    def _refuse(self, count: int, error: ThreedError) -> None:
        self.result.dropped[REFUSED] += count
        self.result.examples.setdefault(REFUSED, str(error))


def helps(base: Config, hardware: Hardware, layout: Layout, plans: ShortPlans) -> dict[str, float]:
    """By how much a step would be shorter (as a share, a sequence) with something else, the most first: what
    would help. `plans`: of the layout."""
    values = {"a global batch twice as large": plans.would_take_s(times=2) / 2}
    if layout.tp > 1 or layout.dp > 1 or layout.pp > 1:
        values["adapters twice as fast"] = plans.would_take_s(
            hardware=replace(hardware, adapter_gbps=2 * hardware.adapter_gbps))
        values["links in a node twice as fast"] = plans.would_take_s(
            hardware=replace(hardware, node_gbps=2 * hardware.node_gbps))
    dtype = base.precision.dtype
    if layout.dp > 1 and (layout.reduce_dtype or base.precision.reduce_dtype) == "fp32" != dtype:
        values[f"precision.reduce_dtype={dtype} (rounds)"] = plans.would_take_s(
            change=partial(_reduced_in, BYTES[dtype]))
    if layout.policy != "none":
        values["memory for no recomputation"] = plans.would_take_s(free=(Op.RECOMPUTE,), change=_never_again)
    if layout.offload_optimizer:
        values["memory for the optimizer"] = plans.would_take_s(
            free=(Op.OFFLOAD, Op.FETCH), change=_state_on_device)
    now_s = plans.would_take_s()
    gains = {words: 1 - seconds / now_s for words, seconds in values.items()}
    return {words: gain for words, gain in sorted(gains.items(), key=lambda each: -each[1]) if gain > 0.005}


def _reduced_in(size: int, table: Table) -> Table:
    """With gradients that are sent in elements of so many bytes."""
    return replace(table, parameters={p: replace(unit, reductions=tuple(
        step._replace(bytes=size) if step.staged else step for step in unit.reductions))
        for p, unit in table.parameters.items()})


def _never_again(table: Table) -> Table:
    """With pieces of units that are not computed again."""
    return replace(table, units=tuple(replace(unit, again=()) for unit in table.units))


def _state_on_device(table: Table) -> Table:
    return replace(table, parameters={p: replace(unit, state_home=Tier.DEVICE)
                                      for p, unit in table.parameters.items()})

"""Search: all layouts of a config on so many devices, timed by the fast evaluator, the best by the full plan.

    shapes, by a lower bound -> variants that fit -> fast step time -> best ideas -> full plan -> ranked

What cannot be among the best is not timed: where a shape's lower bound is above the steps of so many ideas.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

from threed.layout_search.estimator import Estimate, Fast
from threed.layout_search.layout import Layout, config_of
from threed.layout_search.space import NEEDLESS, NO_HOST, NO_MEMORY, SLOWER, Space, Variant
from threed.prediction.hardware import Hardware
from threed.schema import Config

Progress = Callable[[str], None]
_NEAR = 1.02  # the fast evaluator's error: what is so much slower than the worst of the best is dropped
_SURE = 0.97  # what takes less of the memory fits by the full plan, too
_FAR = 1.3  # while there are few ideas: times the best step


class Found(NamedTuple):
    """A layout that fits, by the fast evaluator."""

    layout: Layout
    estimate: Estimate
    bytes: int


@dataclass
class SearchResult:
    """What a search has found: layouts by step time, and how many it dropped for which reason."""

    found: list[Found] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # reason -> one in words
    considered: int = 0
    nearest: tuple[int, Layout] | None = None  # bytes, where nothing fits
    seconds: float = 0.0


class Search:
    """`memory`: bytes of a device. `keep`: so many ideas are wanted. `rounding`: as in Space."""

    def __init__(self, base: Config, hardware: Hardware, memory: int, keep: int = 20, rounding: bool = False):
        self.base, self.hardware, self.memory, self.keep = base, hardware, memory, keep
        self.rounding = rounding
        self.fast = Fast(base, hardware)
        self.result = SearchResult()
        self._best: dict[object, float] = {}  # idea -> its shortest step
        self._limit = float("inf")

    def run(self, devices: int, fixed: Mapping[str, Any],
            progress: Progress = lambda _: None) -> SearchResult:
        """`fixed`: field of a layout -> its only value."""
        begin = told = time.monotonic()
        result = self.result
        space = Space(self.fast, devices, fixed, self.memory, self.rounding)
        shapes = [(self.fast.bound_s(shape._replace(policy=fixed.get("policy", "none"))), shape)
                  for shape in space.shapes()]
        shapes.sort(key=itemgetter(0))
        for done, (bound_s, shape) in enumerate(shapes):
            variants = space.variants(shape)
            result.considered += len(variants)
            if bound_s > self._limit:
                result.dropped[SLOWER] += len(variants)
            else:
                self._shape(variants)
            if time.monotonic() > told + 2:
                told = time.monotonic()
                progress(self._words(done + 1, len(shapes)))
        result.dropped.update(space.dropped)
        result.examples.update(space.wrong)
        result.considered += space.dropped.total()
        # Of layouts that are as fast, the one that holds least.
        result.found.sort(key=lambda each: (float(f"{each.estimate.step_s:.4g}"), each.bytes))
        result.seconds = time.monotonic() - begin
        return result

    def _words(self, done: int, total: int) -> str:
        best = min(self._best.values(), default=None)
        words = f", best step {best:.3g} s" if best is not None else ""
        return (f"{done} of {total} shapes, {self.result.considered} layouts, {len(self.result.found)} "
                f"timed{words}")

    def _shape(self, variants: list[Variant]) -> None:
        fitting: list[Variant] = []
        for variant in variants:
            if variant.needless(fitting):
                self.result.dropped[NEEDLESS] += 1
            elif (reason := self._try(variant, fitting)) is not None:
                self.result.dropped[reason] += 1

    def _try(self, variant: Variant, fitting: list[Variant]) -> str | None:
        """Why a layout is dropped; None where it is timed."""
        layout, result = variant.layout, self.result
        priced = self.fast.priced(layout)
        size = priced.bytes()
        if size > self.memory:
            if result.nearest is None or size < result.nearest[0]:
                result.nearest = size, layout
            return NO_MEMORY
        if layout.offload_optimizer and priced.host_bytes() > self.hardware.host_memory_gb * 1e9:
            return NO_HOST
        if size < _SURE * self.memory:
            fitting.append(variant)
        if self.fast.bound_s(layout) > self._limit or priced.free_s > self._limit:
            return SLOWER
        estimate = priced.estimate()
        result.found.append(Found(layout, estimate, size))
        idea = layout.idea
        if estimate.step_s < self._best.get(idea, float("inf")):
            self._best[idea] = estimate.step_s
            best = heapq.nsmallest(self.keep, self._best.values())
            self._limit = _NEAR * (best[-1] if len(best) == self.keep else _FAR * best[0])
        return None


def helps(base: Config, hardware: Hardware, found: Found) -> dict[str, float]:
    """By how much a step would be shorter (as a share, a sequence) with something else, the most first: what
    would help."""
    step_s, layout = found.estimate.step_s, found.layout

    def timed(machine: Hardware, other: Layout, times: int = 1) -> float:
        config = config_of(layout, base)
        config.train.global_batch_size *= times
        return Fast(config, machine).priced(other).estimate().step_s / times

    values = {"a global batch twice as large": timed(hardware, layout, 2)}
    if layout.tp > 1 or layout.dp > 1 or layout.pp > 1:
        values["adapters twice as fast"] = timed(
            replace(hardware, adapter_gbps=2 * hardware.adapter_gbps), layout)
        values["links in a node twice as fast"] = timed(
            replace(hardware, node_gbps=2 * hardware.node_gbps), layout)
    dtype = base.precision.dtype
    if layout.dp > 1 and (layout.reduce_dtype or base.precision.reduce_dtype) == "fp32" != dtype:
        values[f"precision.reduce_dtype={dtype} (rounds)"] = timed(hardware,
                                                                   layout._replace(reduce_dtype=dtype))
    if layout.policy != "none":
        values["memory for no recomputation"] = timed(
            hardware, layout._replace(policy="none", every=1, offload_activations=False))
    if layout.offload_optimizer:
        values["memory for the optimizer"] = timed(hardware, layout._replace(offload_optimizer=False))
    gains = {words: 1 - seconds / step_s for words, seconds in values.items()}
    return {words: gain for words, gain in sorted(gains.items(), key=lambda item: -item[1]) if gain > 0.005}

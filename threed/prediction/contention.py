"""Time of a plan's step on a machine: computation slows down while communication runs beside it, copies to
the host and from it share their link, and ranks may share processors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from threed.base.mesh import GROUPS
from threed.planner.facts import make_mesh
from threed.prediction.hardware import Hardware
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, MESSAGES
from threed.program.link import Links
from threed.program.plan import Plan
from threed.program.walk import Cost, Mode, Seconds, Walk, seconds_of, walk

_COMPUTES = ("compute", "host", "d2h", "h2d")  # lanes of which a CPU's processors do all of the work
_DISK = ("read", "write")


class PredictedStep(NamedTuple):
    """A predicted step. `total_s` is above the walk's where ranks share processors."""

    walk: Walk
    total_s: float


@dataclass
class PricedPlan:
    """A plan with the seconds of its instructions."""

    analysis: Analysis
    cost: Cost
    source: str  # of the costs
    hardware: Hardware | None = None  # None: costs are measured, with all that slows them

    @property
    def plan(self) -> Plan:
        return self.analysis.plan

    @cached_property
    def seconds(self) -> Seconds:
        """Of each instruction of the train step."""
        return seconds_of(self.analysis.simulated("train"), self.cost)

    @cached_property
    def step(self) -> PredictedStep:
        """The train step, walked with a clock."""
        return step(self.analysis, self.seconds, self.hardware)


def step(analysis: Analysis, cost: Cost | Seconds, hardware: Hardware | None) -> PredictedStep:
    """The step of a plan on a machine. `hardware`: as in PricedPlan."""
    seconds = seconds_of(analysis.simulated("train"), cost) if callable(cost) else cost
    when = timed(analysis, seconds, hardware)
    shared = _shared_s(analysis, seconds, hardware) if hardware is not None and hardware.waits else 0.0
    return PredictedStep(when, max(when.total_s, shared))


def _shared_s(analysis: Analysis, seconds: Seconds, hardware: Hardware) -> float:
    """For how long the processors of a machine are busy with a step of all ranks, with nobody waiting. Of
    what communicates, `contention` is the share that takes a processor."""
    plan, busy = analysis.plan, 0.0
    for linked, row in zip(analysis.simulated("train"), seconds, strict=True):
        shares = {form: 0.0 if form.effect.lane in _DISK else
                  1.0 if form.effect.lane in _COMPUTES else hardware.contention
                  for form in dict.fromkeys(linked.forms)}
        busy += sum(took * shares[form] for form, took in zip(linked.forms, row, strict=True))
    ranks = make_mesh(plan.config).size if plan.config is not None else len(seconds)
    return busy * ranks / len(seconds) / hardware.devices


def timed(analysis: Analysis, seconds: Seconds, hardware: Hardware | None) -> Walk:
    """Walk the train step twice: the first walk says what runs beside what, and in the second that takes
    longer.

    * A computation takes `hardware.contention` times as much longer as communication runs beside it. (0: it
      takes no time from computation; 1: nothing is computed meanwhile.)
    * Copies to the host and from it take as much longer as `_shared_link` says.
    """
    programs, links = analysis.plan.programs["train"], analysis.simulated("train")
    first = walk(programs, links, Mode.BUFFERED, seconds)
    if hardware is None:
        return first
    lost = [_lost(first, position, linked, hardware) for position, linked in enumerate(links)]
    if not any(map(any, lost)):
        return first
    longer = [[took + more for took, more in zip(row, rows, strict=True)]
              for row, rows in zip(seconds, lost, strict=True)]
    return walk(programs, links, Mode.BUFFERED, longer)


def _lost(when: Walk, position: int, links: Links, hardware: Hardware) -> list[float]:
    """For each instruction: how many seconds it takes longer than alone."""
    lost = ([hardware.contention * inside for inside in _overlap(when, position, links, hardware.waits)]
            if hardware.contention else [0.0] * len(links.program))
    for index, more in _shared_link(when, position, links, hardware.link_both):
        lost[index] += more
    return lost


def _shared_link(when: Walk, position: int, links: Links, both: float) -> Iterator[tuple[int, float]]:
    """(index, seconds) that copies between host and device lose to those of the other lane: while copies go
    both ways, each keeps the share `both` of its speed."""
    lanes = {form: form.effect.lane for form in dict.fromkeys(links.forms)}
    ways = {"d2h": list[int](), "h2d": list[int]()}
    for index, form in enumerate(links.forms) if {*ways} <= {*lanes.values()} else ():
        if lanes[form] in ways:
            ways[lanes[form]].append(index)
    start, end, slower, at = when.start[position], when.end[position], 1 / both - 1, 0
    down, up = ways.values()
    for index in down:
        while at < len(up) and end[up[at]] <= start[index]:
            at += 1
        then = at
        while then < len(up) and start[other := up[then]] < end[index]:
            inside = min(end[index], end[other]) - max(start[index], start[other])
            yield index, inside * slower
            yield other, inside * slower
            then += 1


def _overlap(when: Walk, position: int, links: Links, waits: bool) -> list[float]:
    """For each instruction: for how many seconds it computes while its position communicates. A processor
    that `waits` copies messages, too."""
    busy, at, result = _union(when, position, links, waits), 0, list[float]()
    if not busy:
        return [0.0] * len(links.program)
    for start, end, item in zip(when.start[position], when.end[position], links.program, strict=True):
        inside = 0.0
        if item.op in COMPUTE:
            while at < len(busy) and busy[at][1] <= start:
                at += 1
            then = at
            while then < len(busy) and busy[then][0] < end:
                inside += min(end, busy[then][1]) - max(start, busy[then][0])
                then += 1
        result.append(inside)
    return result


def _union(when: Walk, position: int, links: Links, waits: bool) -> Sequence[tuple[float, float]]:
    """The times in which a position communicates, in order, merged where they overlap. The kernels of
    collectives take units of the device."""
    collectives = {row.lane for row in GROUPS.values() if row.lane != "compute" and not row.across_positions}
    forms = {form for form in dict.fromkeys(links.forms)
             if form.effect.lane in collectives or (waits and form.item.op in MESSAGES)}
    spans = sorted((start, end) for start, end, form in
                   zip(when.start[position], when.end[position], links.forms, strict=True)
                   if form in forms and end > start) if forms else []
    merged: list[tuple[float, float]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged

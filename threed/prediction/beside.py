"""Time of a plan's program in which computation slows down while communication runs beside it."""

from __future__ import annotations

from collections.abc import Sequence

from threed.program.instruction import COMPUTE
from threed.program.link import Links
from threed.program.order import plan_links
from threed.program.table import Plan
from threed.program.walk import Cost, Mode, Seconds, Walk, seconds_of, walk

_COMMUNICATES = ("dp",)  # lanes of collectives, whose kernels take units of the device


def timed(plan: Plan, cost: Cost | Seconds, contention: float, name: str = "train") -> Walk:
    """Walk a program twice: the first walk says for how long communication runs beside each computation, and
    in the second each takes `contention` times that longer. (0: it takes no time from computation; 1:
    nothing is computed meanwhile.)"""
    programs, links = plan.programs[name], plan_links(plan, name)
    seconds = seconds_of(links, cost) if callable(cost) else cost
    first = walk(programs, links, Mode.BUFFERED, seconds)
    if not contention:
        return first
    longer = [[took + contention * beside
               for took, beside in zip(row, _beside(first, position, linked), strict=True)]
              for position, (row, linked) in enumerate(zip(seconds, links, strict=True))]
    return walk(programs, links, Mode.BUFFERED, longer)


def _beside(when: Walk, position: int, links: Links) -> list[float]:
    """For each instruction: for how many seconds it computes while its position communicates."""
    busy, at, result = _union(when, position, links), 0, []
    for start, end, item in zip(when.start[position], when.end[position], links.program, strict=True):
        inside = 0.0
        if item.op in COMPUTE:
            while at < len(busy) and busy[at][1] <= start:
                at += 1
            for begin, stop in busy[at:]:
                if begin >= end:
                    break
                inside += min(end, stop) - max(start, begin)
        result.append(inside)
    return result


def _union(when: Walk, position: int, links: Links) -> Sequence[tuple[float, float]]:
    """The times in which a position communicates, in order and apart."""
    spans = sorted((start, end) for start, end, form in
                   zip(when.start[position], when.end[position], links.forms, strict=True)
                   if end > start and form.effect.lane in _COMMUNICATES)
    apart: list[tuple[float, float]] = []
    for start, end in spans:
        if apart and start <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(end, apart[-1][1])
        else:
            apart.append((start, end))
    return apart

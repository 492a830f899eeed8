"""Time of a plan's program in which computation slows down while communication runs beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from threed.planner.facts import make_mesh
from threed.prediction.hardware import Hardware
from threed.program.instruction import COMPUTE, Instruction
from threed.program.order import plan_links
from threed.program.table import Plan
from threed.program.walk import Cost, Links, Mode, Walk, walk

_COMMUNICATES = ("dp",)  # lanes of collectives, whose kernels take units of the device
_COMPUTES = ("compute", "host", "d2h", "h2d")  # lanes of which a CPU's processors do all of the work
_DISK = ("read", "write")


class Step(NamedTuple):
    """A predicted step. `total_s` is above the walk's where ranks share processors."""

    walk: Walk
    total_s: float


def step(plan: Plan, cost: Cost, hardware: Hardware | None) -> Step:
    """The step of a plan on a machine. `hardware`: None where costs are measured, with all that slows them."""
    when = timed(plan, cost, hardware.contention if hardware is not None else 0.0)
    shared = shared_s(plan, cost, hardware) if hardware is not None and hardware.waits else 0.0
    return Step(when, max(when.total_s, shared))


def shared_s(plan: Plan, cost: Cost, hardware: Hardware) -> float:
    """For how long the processors of a machine are busy with a step of all ranks, with nobody waiting. Of what
    communicates, `contention` is the share that takes a processor."""
    programs, links = plan.programs["train"], plan_links(plan, "train")
    each = make_mesh(plan.config).size // len(programs) if plan.config is not None else 1  # ranks of a position
    busy = 0.0
    for position, program in enumerate(programs):
        for item, effect in zip(program, links[position].effects, strict=True):
            if effect.lane not in _DISK:
                busy += cost(position, item) * (1.0 if effect.lane in _COMPUTES else hardware.contention)
    return busy * each / hardware.devices


def timed(plan: Plan, cost: Cost, contention: float, name: str = "train") -> Walk:
    """Walk a program twice: the first walk says for how long communication runs beside each computation, and
    in the second each takes `contention` times that longer. (0: it takes no time from computation; 1:
    nothing is computed meanwhile.)"""
    programs, links = plan.programs[name], plan_links(plan, name)
    first = walk(programs, links, Mode.BUFFERED, cost)
    if not contention:
        return first
    longer: dict[tuple[int, Instruction], float] = {}
    for position, program in enumerate(programs):
        busy = _union(first, position, links[position])
        at = 0
        for index, item in enumerate(program):
            if item.op not in COMPUTE:
                continue
            start, end = first.start[position][index], first.end[position][index]
            while at < len(busy) and busy[at][1] <= start:
                at += 1
            inside = 0.0
            for begin, stop in busy[at:]:
                if begin >= end:
                    break
                inside += min(end, stop) - max(start, begin)
            if inside:
                longer[position, item] = contention * inside
    return walk(programs, links, Mode.BUFFERED,
                lambda position, item: cost(position, item) + longer.get((position, item), 0.0))


def _union(when: Walk, position: int, links: Links) -> Sequence[tuple[float, float]]:
    """The times in which a position communicates, in order and apart."""
    spans = sorted((start, end) for start, end, effect in
                   zip(when.start[position], when.end[position], links.effects, strict=True)
                   if end > start and effect.lane in _COMMUNICATES)
    apart: list[tuple[float, float]] = []
    for start, end in spans:
        if apart and start <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(end, apart[-1][1])
        else:
            apart.append((start, end))
    return apart

"""Step: a train step of a plan, predicted by the costs of its instructions: time, bubbles, memory over time
and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from threed.prediction.contention import PricedPlan, step
from threed.prediction.hardware import Hardware
from threed.prediction.peak import Peak, peaks, temporaries_of
from threed.program.analysis import Analysis
from threed.program.forms import Form
from threed.program.instruction import COMPUTE, Op
from threed.program.link import Links, joined
from threed.program.names import SNAPSHOT, VERIFY
from threed.program.order import simulated
from threed.program.seam import seam_of
from threed.program.show import timeline
from threed.program.summary import StageSummary, stages
from threed.program.traffic import moved_by
from threed.program.turning import on_host
from threed.program.walk import Cost, Mode, Walk, walk

SAMPLES = 50  # points of memory over time


@dataclass(frozen=True)
class StagePrediction:
    """A rank of one pipeline position in a train step. It is busy while it computes, by the clock: where
    ranks share processors, each takes longer."""

    busy_s: float
    bubble: float  # share of the step in which it is not busy
    peak: Peak
    transfer_s: dict[str, float]  # for how long a link between tiers is busy, by lane
    host_s: float  # of steps of the optimizer on the host
    memory: list[tuple[float, int]]  # seconds since the step began, bytes of the device
    summary: StageSummary

    def document(self) -> dict[str, Any]:
        held = self.summary
        return {"bubble": self.bubble, "busy_s": self.busy_s,
                "peak_bytes": {"device": self.peak.total, "disk": held.disk_bytes,
                               "host": held.host_bytes + held.snapshot_bytes},
                "peak": self.peak._asdict(), "transfer_s": self.transfer_s, "host_s": self.host_s,
                "memory": [{"seconds": at_s, "device": size} for at_s, size in self.memory],
                **held.document()}


class CheckpointCopy(NamedTuple):
    """Of a checkpoint that is written while the run goes on."""

    bytes: int  # of a rank
    copy_s: float  # to the host
    blocked_s: float  # the delay of the next step, whose STEPs wait for the copy


class Rehearsals(NamedTuple):
    """Of steps that are computed twice, without checksums."""

    every: int  # steps
    rehearsal_s: float  # how much longer such a step takes
    step_s: float  # and a step on average


@dataclass(frozen=True)
class StepPrediction:
    """A train step by the clock."""

    step_s: float
    stages: list[StagePrediction]
    exposed_transfer_s: float  # how much longer the step is than if moves between tiers were free
    exposed_host_s: float  # than if the host's steps were free, too
    costs: str  # whose prices times are
    digest: str
    checkpoint: CheckpointCopy | None  # None: the plan makes no such copy
    slower: float  # how many times as long a computation takes where ranks share processors
    verify: Rehearsals | None

    @property
    def bubble(self) -> float:
        return sum(row.bubble for row in self.stages) / len(self.stages)

    @property
    def peaks(self) -> list[Peak]:
        return [row.peak for row in self.stages]

    def document(self) -> dict[str, Any]:
        return {"step_time": self.step_s, "bubble": self.bubble,
                "exposed_transfer_s": self.exposed_transfer_s, "exposed_host_s": self.exposed_host_s,
                "costs": self.costs, "digest": self.digest,
                "checkpoint": self.checkpoint and self.checkpoint._asdict(),
                "stages": [row.document() for row in self.stages], "slower": self.slower,
                **({"verify": self.verify._asdict()} if self.verify else {})}


def predicted_step(priced: PricedPlan, machine: Hardware, verify_every: int = 0) -> StepPrediction:
    """A train step of a plan by the clock. Offloaded values keep their memory on the host and on disk all the
    time."""
    plan, cost = priced.plan, priced.cost
    analysis, links = priced.analysis, priced.analysis.simulated("train")
    seconds, (when, total) = priced.seconds, priced.step
    from threed.prediction.transient import working  # torch

    held, temporaries = stages(analysis), temporaries_of(plan)
    slower = total / when.total_s if when.total_s else 1.0  # ranks that share processors take turns
    rows = []
    for position, peak in enumerate(peaks(analysis, machine, temporaries, held)):
        took = [end - start for start, end in zip(when.start[position], when.end[position], strict=True)]
        busy = slower * sum(_seconds(links[position], took, _works))
        kept = working(analysis, position, temporaries)
        rows.append(StagePrediction(
            busy, max(0.0, 1.0 - busy / total) if total else 0.0, peak,
            _transfers(links[position], seconds[position]),
            sum(_seconds(links[position], seconds[position], _steps_on_host)),
            [(slower * when.start[position][i], peak.fixed_bytes + kept[i] + peak.taken_bytes)
             for i in highest(kept, SAMPLES)], held[position]))
    transfer_s = host_s = 0.0
    if any(row.transfer_s for row in rows):
        free: list[Cost] = [
            lambda at, item: 0.0 if item.op in _BETWEEN_TIERS else cost(at, item),
            lambda at, item: (0.0 if item.op in _BETWEEN_TIERS or on_host(item, plan.table) else
                              cost(at, item))]
        transfer_s, host_s = (total - step(analysis, each, priced.hardware).total_s for each in free)
    return StepPrediction(total, rows, transfer_s, host_s, priced.source, analysis.digest,
                          _checkpoint(analysis, cost, when), slower,
                          _verifying(analysis, cost, verify_every, slower))


def highest(values: Sequence[float], most: int) -> list[int]:
    """The index of the highest of each run of values, where about `most` runs cover all: so a curve of few
    points keeps its peak."""
    every = max(1, len(values) // most)
    return [max(range(first, min(first + every, len(values))), key=values.__getitem__)
            for first in range(0, len(values), every)]


def _checkpoint(analysis: Analysis, cost: Cost, when: Walk) -> CheckpointCopy | None:
    """`when`: the walk of a step."""
    table, copies = analysis.table, analysis.plan.programs.get(SNAPSHOT)
    if copies is None:
        return None
    both = [joined(*links) for links in zip(analysis.links(SNAPSHOT), analysis.links("train"), strict=True)]
    links = [simulated(links, table, seam_of(table, position), analysis.buffers(position))
             for position, links in enumerate(both)]
    copied = timeline(analysis, SNAPSHOT, cost)
    longer = 0.0
    if any(_late(linked, *times) for linked, *times in zip(links, copied.end, when.start, strict=True)):
        longer = walk([linked.program for linked in links], links, Mode.BUFFERED, cost).total_s - when.total_s
    return CheckpointCopy(
        max(sum(moved_by(table, item) for item in copy) for copy in copies),
        max(sum(cost(position, item) for item in copy) for position, copy in enumerate(copies)),
        max(0.0, longer))


def _late(links: Links, copied: Sequence[float], begun: Sequence[float]) -> bool:
    """Whether copies end after something of the step that waits for them, or for their lane, has begun.
    `links`: of the copies and then of the step."""
    count = len(copied)
    waits = [pair for pairs in links.pairs() for pair in zip(*pairs, strict=True)
             if pair[0] < count <= pair[1]]
    lanes = {form.effect.lane: index for index, form in enumerate(links.forms[:count])}  # the last of each
    waits += [(lanes[form.effect.lane], index) for index, form in enumerate(links.forms)
              if index >= count and form.effect.lane in lanes]
    return any(copied[first] > begun[then - count] for first, then in waits)


def _verifying(analysis: Analysis, cost: Cost, every: int, slower: float) -> Rehearsals | None:
    if not every:
        return None
    rehearsal_s = slower * timeline(analysis, VERIFY, cost).total_s
    return Rehearsals(every, rehearsal_s, rehearsal_s / every)


_BETWEEN_TIERS = (Op.OFFLOAD, Op.FETCH)


def _transfers(links: Links, seconds: Sequence[float]) -> dict[str, float]:
    """Seconds that a position's links between tiers are busy."""
    lanes = dict.fromkeys(form.effect.lane for form in dict.fromkeys(links.forms)
                          if form.item.op in _BETWEEN_TIERS)
    return {lane: sum(_seconds(links, seconds, lambda form, lane=lane: form.item.op in _BETWEEN_TIERS
                               and form.effect.lane == lane)) for lane in lanes}


def _works(form: Form) -> bool:
    """Whether the device computes. A step on the host is not its work."""
    return form.item.op in COMPUTE or (form.item.op == Op.STEP and form.effect.lane == "compute")


def _steps_on_host(form: Form) -> bool:
    return form.item.op == Op.STEP and form.effect.lane != "compute"


def _seconds(links: Links, seconds: Sequence[float], chosen: Callable[[Form], bool]) -> list[float]:
    """Seconds of the instructions of some forms."""
    forms = {form for form in dict.fromkeys(links.forms) if chosen(form)}
    return [took for form, took in zip(links.forms, seconds, strict=True) if form in forms]

"""Content: what a page shows, before it is drawn. All of it is read from the plan, from its walk with a
clock, from what is predicted, and from the files of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from threed.base.errors import InputError
from threed.base.mesh import Mesh
from threed.html_report.budget import Budget
from threed.html_report.colors import TEMPORARIES, of_kinds
from threed.monitor.attribute import CAUSES, OF_SOME
from threed.monitor.compare import attribute_walk, typical_step
from threed.monitor.run import Run
from threed.monitor.timeline import Span, on_one_clock, spans
from threed.monitor.traces import read_run
from threed.planner import make_mesh
from threed.prediction.contention import PricedPlan
from threed.prediction.hardware import Hardware
from threed.prediction.peak import Temporaries, temporaries_of
from threed.prediction.predict import MachinePrediction, prediction
from threed.prediction.step import StagePrediction
from threed.program.costs import FILE as COSTS
from threed.program.costs import device_of
from threed.program.in_words import slot_words
from threed.program.instruction import COMPUTE, Instruction
from threed.program.plan import Plan
from threed.program.summary import activations
from threed.program.timeline_svg import DrawnOp, blocks
from threed.schema import Config

LAST = 10  # steps at the end of a run, of which measured numbers are means

Lanes = dict[str, list[DrawnOp]]  # lane -> its blocks, in order
Waits = dict[str, list[Span]]  # lane -> its waits


class LaneTimeline(NamedTuple):
    """When each lane of some positions was busy."""

    title: str
    lanes: dict[int, Lanes]  # position -> its lanes
    waits: dict[int, Waits]  # measured: while an instruction waited


@dataclass
class Content:
    """A plan with the costs of its instructions, and the run that it belongs to, if there is one."""

    config: Config
    priced: PricedPlan
    machine: Hardware
    run: Run | None = None
    notes: list[str] = field(default_factory=list)  # what is left out, and why

    @cached_property
    def mesh(self) -> Mesh:
        return make_mesh(self.config)

    @property
    def plan(self) -> Plan:
        return self.priced.plan

    @cached_property
    def budget(self) -> Budget:
        return Budget(self.plan.programs["train"], self.plan.table.num_microbatches, self.notes)

    @property
    def source(self) -> str:
        return self.priced.source

    @cached_property
    def predicted(self) -> MachinePrediction:
        return prediction(self.priced, self.machine)

    @property
    def stages(self) -> list[StagePrediction]:
        return self.predicted.step.stages

    @cached_property
    def attributed(self) -> list[dict[str, float]]:
        """Where the time of a predicted step goes: a row a position, seconds by cause."""
        step = self.priced.step
        rows, slower = attribute_walk(self.priced.analysis, step.walk), self.predicted.step.slower
        return [{name: share if name == "bubble" else slower * share for name, share in row.items()}
                for row in rows]

    @cached_property
    def temporaries(self) -> Temporaries:
        return temporaries_of(self.plan)

    def kinds(self, position: int) -> tuple[dict[str, int], dict[str, list[int]]]:
        """Bytes on the device of a rank: what it holds all the time, and by kind what it keeps for a while,
        [index of an instruction]. Where an instruction frees, before its end, more of its slots than it has
        temporaries, the largest kind is as much smaller."""
        row, by_kind = self.stages[position], self.priced.analysis.memory(position).by_kind
        fixed = {"parameters": row.summary.parameter_bytes, "gradients": row.summary.gradient_bytes,
                 "optimizer state": row.summary.optimizer_bytes, "buffers": row.summary.buffer_bytes,
                 "process and libraries" if self.machine.waits else "CUDA and NCCL": row.peak.taken_bytes}
        table = self.plan.table
        moving = {slot_words(kind, table): [*by_kind[kind]] for kind in activations(table) if kind in by_kind}
        beside = [self.temporaries(item) if item.op in COMPUTE else 0
                  for item in self.plan.programs["train"][position]]
        for at, size in enumerate(beside):
            if size < 0:
                max(moving.values(), key=lambda sizes: sizes[at])[at] += size
        return fixed, {**moving, TEMPORARIES: [max(0, size) for size in beside]}

    @cached_property
    def colors(self) -> dict[str, str]:
        """The colour of each kind of bytes."""
        return of_kinds(self.plan.table)

    # ---------------------------------------------------------------- timelines

    def times(self, position: int) -> tuple[list[float], list[float]]:
        """When each instruction of the predicted step begins and ends, in seconds by the clock."""
        when, slower = self.priced.step.walk, self.predicted.step.slower
        start, end = ([slower * at for at in times[position]] for times in (when.start, when.end))
        return start, end

    def timeline(self, positions: Sequence[int]) -> LaneTimeline:
        """The predicted step."""
        lanes = {}
        for position in positions:
            linked, (start, end) = self.priced.analysis.simulated("train")[position], self.times(position)
            lanes[position] = self._lanes(linked.program, [form.effect.lane for form in linked.forms],
                                          start, end)
        return LaneTimeline(f"predicted ({self.source})", lanes, {})

    @cached_property
    def measured(self) -> LaneTimeline | None:
        """A typical step of the ranks of dp 0 and tp 0; None where none was traced."""
        if self.run is None:
            return None
        try:
            traced = read_run(self.run.path, self.mesh.group("pp", 0))
        except InputError as error:
            self.notes.append(f"No measured timeline: {error}")
            return None
        if traced.digest != self.priced.analysis.digest:
            self.notes.append(f"No measured timeline: the traces are of plan {traced.digest}, and the run's "
                              f"config makes plan {self.priced.analysis.digest}")
            return None
        self.notes += traced.notes
        step = typical_step(traced)
        lanes, waits = {}, {}
        for rank, trace in zip(traced.ranks, on_one_clock(traced, step), strict=True):
            position = rank.here.position
            if position in {*self.budget.drawn, *self.budget.computed}:
                lanes[position] = self._lanes(rank.program, rank.lanes, *trace.times())
                waiting = [span for span in spans(rank, trace) if span.waits]
                waits[position] = _by_lane(waiting, lambda span: span.lane)
        return LaneTimeline(f"measured in step {step}, on the ranks of dp 0 and tp 0", lanes, waits)

    def _lanes(self, program: Sequence[Instruction], lanes: Sequence[str], start: Sequence[float],
               end: Sequence[float]) -> Lanes:
        chosen = [i for i, item in enumerate(program) if item.microbatch in self.budget.microbatches
                  or item.microbatch < 0]
        return {lane: blocks([program[i] for i in indices], [start[i] for i in indices],
                             [end[i] for i in indices])
                for lane, indices in _by_lane(chosen, lambda i: lanes[i]).items()}

    # ---------------------------------------------------------------- what a run has measured

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The run's metrics, a row a step."""
        if self.run is None:
            return []
        try:
            return self.run.metrics
        except InputError as error:
            self.notes.append(f"No metrics: {error}")
            return []

    @cached_property
    def last(self) -> list[dict[str, Any]]:
        """The last steps of the run, without its first."""
        return self.rows[1:][-LAST:] or self.rows

    @property
    def on_cpu(self) -> bool:
        """Whether a run on CPUs is drawn, whose `memory/peak_bytes` hold Python and its libraries, too."""
        if self.run is None:
            return False
        measured = device_of(self.run.path) if (self.run.path / COSTS).exists() else ""
        return self.config.run.device == "cpu" or measured.startswith("CPU")

    def mean(self, name: str) -> float | None:
        """Of the last steps; None where they do not have it."""
        numbers = [row[name] for row in self.last if isinstance(row.get(name), int | float)]
        return sum(numbers) / len(numbers) if numbers else None

    @cached_property
    def spent(self) -> list[dict[str, float]] | None:
        """Where the time of the last steps went: a row a position, seconds by cause."""
        positions = range(len(self.attributed))
        found = [{cause: self.mean(f"time/{cause}/{position}") for cause in CAUSES} for position in positions]
        rows = [{cause: value or 0.0 for cause, value in row.items()
                 if value is not None or cause in OF_SOME} for row in found]
        return rows if all(len(row) == len(CAUSES) for row in rows) else None


def _by_lane(items: Sequence[Any], lane: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for item in items:
        found.setdefault(lane(item), []).append(item)
    return found


def thin(rows: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """Every n-th row, and the last."""
    every = -(-len(rows) // most)
    return [row for index, row in enumerate(rows) if index % every == 0 or index == len(rows) - 1]


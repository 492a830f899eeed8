"""Meter: each rank sums up its step in numbers; metrics are computed from those of all ranks.

Once a step all ranks learn each rank's row (times, memory, bytes, and columns of other writers, such as
requests to stop), and the mean cost of each (op, unit) of each position, from which the step is predicted.
Both travel in one all-reduce: costs are added up on the way, and to the row of a rank the others add zeros.
So a step has one call, whatever the number of ranks, some 250 bytes for each rank, and not a program's worth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from threed.base.axes import AXES, shown
from threed.base.mesh import FOLDS
from threed.comm.group import Comm
from threed.devices import device_of
from threed.features.travel.arrivals import Arrivals
from threed.features.zero.turned import Turned
from threed.models.model import model_flops
from threed.monitor.attribute import BESIDE, CAUSES, PARTS, WAITED, attribute, beside, parts, unused
from threed.monitor.spread import COLUMNS, Spread
from threed.monitor.straggler import WORK, Stragglers, by_place
from threed.prediction.hardware import peak_tflops
from threed.program.analysis import Analysis
from threed.program.instruction import Instruction, Op
from threed.program.simulate import Costs, predict
from threed.program.table import Table
from threed.program.trace import Trace, compute_s
from threed.program.turning import on_host
from threed.schema import Config

HEAD = ("step_s", "compute_s", "memory", *(f"sent_{axis}" for axis in (*AXES, *FOLDS)), *PARTS, *COLUMNS)
OF_OFFLOAD = (*BESIDE, WAITED)  # behind HEAD, where something is offloaded
OF_TURNS = ("turn_s", "squares", "turned")  # behind these, where matrices are turned
COSTED = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.STEP)


class Writer(Protocol):
    """Adds columns to each rank's row, which `StepReport.column` returns for all ranks."""

    columns: tuple[str, ...]

    def row(self) -> Iterable[float]:
        """This rank's numbers, one a column."""
        ...


class StepReport:
    """What all ranks reported of a step.

    `columns`: their names. `rows`: [rank, column], fp64. `sums`: [position, 2, costed op, unit], fp64:
    seconds and how many ranks measured them.
    """

    def __init__(self, program: str, columns: Sequence[str], rows: torch.Tensor, sums: torch.Tensor):
        self.program, self._columns, self._rows, self._sums = program, columns, rows, sums

    def column(self, what: str) -> torch.Tensor:
        """Each rank's number, by rank."""
        return self._rows[:, self._columns.index(what)]

    @cached_property
    def clip_s(self) -> float:
        """CLIP is a barrier: its own time is that of the last rank to arrive."""
        return float(self.column("clip").min())

    @cached_property
    def costs(self) -> Costs:
        """Mean seconds of each op and unit that a position has."""
        seconds, ranks = self._sums[:, 0], self._sums[:, 1]
        means = (seconds / ranks.clamp(min=1.0)).tolist()
        costs: dict[tuple[int, Op, int], float] = {(position, COSTED[op], unit): means[position][op][unit]
                                                   for position, op, unit in ranks.nonzero().tolist()}
        return costs | {(position, Op.CLIP, -1): self.clip_s for position in range(len(means))}


@dataclass
class Meter:
    """Makes this rank's rows, and metrics from all ranks' rows."""

    config: Config
    analysis: Analysis
    comm: Comm
    arrivals: Arrivals
    writers: Sequence[Writer] = ()
    turned: Turned | None = None  # None: no matrices are
    stragglers: Stragglers = field(init=False)
    spread: Spread = field(default_factory=Spread)
    _sent: dict[str, int] = field(default_factory=dict)
    _predicted: list[float] | None = None
    _spent_s: float = 0.0
    _excluded_s: float = 0.0  # since the last metrics
    _since: float | None = None  # the last lap
    _last: tuple[Trace, float] | None = None  # the step before, and its time
    _stream: Any = None
    _lanes_of: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stragglers = Stragglers(self.comm.mesh)
        device = device_of(self.comm.device).name()
        self._peak = self.config.monitor.peak_tflops or peak_tflops(device)
        self._ranks = by_place(self.comm.mesh).flatten(1)  # [position, its ranks]

    def begin(self) -> None:
        """Begin a step: bytes and rows that were sent before it (by a rehearsal, an evaluation, a proof) do
        not count."""
        self.arrivals.begin()
        self._sent = {axis: self.comm.sent[axis] for axis in (*AXES, *FOLDS)}
        if self._since is None:
            self._since = time.monotonic()

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """The time in this context does not count as that of a step."""
        begin = time.monotonic()
        yield
        taken_s = time.monotonic() - begin
        self._excluded_s += taken_s
        if self._since is not None:
            self._since += taken_s

    def lap(self) -> float:
        """Seconds since the last call: a step's time, with what is done between two steps."""
        now = time.monotonic()
        step_s, self._since = now - (self._since or now), now
        return step_s

    def report(self, trace: Trace, step_s: float) -> StepReport:
        """Send this rank's row to all ranks, and return all rows. Where the host would have to wait for the
        end of this step, all times are those of the step before."""
        if trace.is_late:
            (trace, step_s), self._last = self._last or (trace, step_s), (trace, step_s)
        table, here = self.analysis.table, self.comm.here
        program = self.analysis.plan.programs[trace.name][here.position]
        sent = {axis: self.comm.sent[axis] for axis in (*AXES, *FOLDS)}
        head = [step_s, compute_s(trace, program), float(device_of(self.comm.device).peak_bytes()),
                *(float(size - self._sent.get(axis, 0)) for axis, size in sent.items()),
                *parts(trace, program).values(),
                *(float(getattr(self.arrivals, each)) for each in COLUMNS)]
        if self._offloaded:
            head += beside(trace, self._lanes(trace.name)).values()
        if self.turned is not None:
            head += (_turn_s(trace, program), *self.turned.take())
        for writer in self.writers:
            head += writer.row()
        own = _seconds(trace, program, table)
        sums = torch.zeros(table.num_positions, *own.shape, dtype=torch.float64)
        sums[here.position] = own
        rows = torch.zeros(self.comm.mesh.size, len(head), dtype=torch.float64)
        rows[self.comm.rank] = torch.tensor(head, dtype=torch.float64)
        # On the device: NCCL adds up in a tree, gloo in a ring of all ranks.
        with self._beside():
            numbers = torch.cat([rows.view(-1), sums.view(-1)]).to(self.comm.device)
            self.comm.groups["world"].all_reduce(numbers).wait()
            first, rest = numbers.cpu().split([rows.numel(), sums.numel()])
        return StepReport(trace.name, self._columns, first.view(rows.shape), rest.view(sums.shape))

    def _beside(self) -> AbstractContextManager[Any]:
        """On a GPU a stream of its own: the optimizer's steps may still be under way."""
        device = device_of(self.comm.device)
        if device.asynchronous and self._stream is None:
            self._stream = device.stream()
        return device.on(self._stream)

    def metrics(self, step: StepReport, elapsed_s: float) -> dict[str, float | None]:
        """perf, pipeline, comm and memory metrics of a step."""
        config, mesh, counted = self.config, self.comm.mesh, self.config.model.counted
        step_s = float(step.column("step_s").max())
        tflops = self._step_flops / step_s / mesh.size / 1e12
        values: dict[str, float | None] = {
            "perf/step_s": step_s,
            f"perf/{counted}_per_s": config.tokens_per_step / step_s,
            f"perf/{counted}_per_s_per_device": config.tokens_per_step / step_s / mesh.size,
            "perf/model_tflops_per_device": tflops,
            "perf/mfu": tflops / self._peak if self._peak else None,
        }
        measured = self._means(1.0 - step.column("compute_s") / step.column("step_s"))
        for name, bubbles in (("measured", measured), ("predicted", self._predict(step, elapsed_s))):
            values[f"pipeline/bubble_{name}"] = _mean(bubbles)
            values |= {f"pipeline/bubble_{name}/{stage}": bubble for stage, bubble in enumerate(bubbles)}
        # what a position's ranks spent on average: the parts are sums, so their order does not matter
        means = {what: self._means(step.column(what)) for what in (*PARTS, "step_s")}
        spent = [attribute({what: each[stage] for what, each in means.items()}, step.clip_s,
                           means["step_s"][stage]) for stage in range(mesh.positions)]
        without = unused(mesh)
        for cause in (each for each in CAUSES if each not in without):
            values[f"time/{cause}"] = _mean([row[cause] for row in spent])
            values |= {f"time/{cause}/{stage}": row[cause] for stage, row in enumerate(spent)}
        values |= {f"comm/bytes_{axis}": float(step.column(f"sent_{axis}").sum())
                   for axis in (*shown(mesh.sizes), *sorted(mesh.folded))}
        values |= self.stragglers.look({what: step.column(what) for what in WORK})
        values |= self.spread.look(*(step.column(what) for what in COLUMNS))
        if offloaded := self._offloaded:
            values |= {f"offload/{lane}_s": float(step.column(lane).mean()) for lane in offloaded}
            values["offload/waited_s"] = float(step.column(WAITED).mean())
        if self.turned is not None:
            turn_s, squares, elements = (step.column(each) for each in OF_TURNS)
            values["optimizer/turn_s"] = float(turn_s.max())
            values["optimizer/update_rms"] = (math.sqrt(squares.sum() / elements.sum()) if elements.any()
                                              else None)
        values["memory/peak_bytes"] = float(step.column("memory").max())
        if self._excluded_s:
            values["perf/apart_s"], self._excluded_s = self._excluded_s, 0.0
        return values

    def _lanes(self, program: str) -> list[str]:
        """The lane of each instruction of this rank."""
        if program not in self._lanes_of:
            effects = self.analysis.order(program, self.comm.here.position).effects
            self._lanes_of[program] = [effect.lane for effect in effects]
        return self._lanes_of[program]

    @cached_property
    def _columns(self) -> tuple[str, ...]:
        more = (OF_OFFLOAD if self._offloaded else ()) + (OF_TURNS if self.turned is not None else ())
        return (*HEAD, *more, *(name for writer in self.writers for name in writer.columns))

    @cached_property
    def _offloaded(self) -> list[str]:
        """The lanes of what is offloaded that the plan has."""
        links = self.analysis.links("train")
        used = {form.effect.lane for linked in links for form in dict.fromkeys(linked.forms)}
        return [lane for lane in BESIDE if lane in used]

    @cached_property
    def _step_flops(self) -> int:
        """Of the model, in a step."""
        train = self.config.train
        return model_flops(self.config.model, train.global_batch_size, train.micro_batch_size)

    def _means(self, column: torch.Tensor) -> list[float]:
        """The mean over the ranks of each position."""
        return column[self._ranks].mean(dim=1).tolist()

    def _predict(self, step: StepReport, elapsed_s: float) -> list[float]:
        """Predicted bubbles. The plan is walked again only while walks have taken less than a hundredth of
        the run's time."""
        if self._predicted is None or self._spent_s < 0.01 * elapsed_s:
            begin = time.monotonic()
            self._predicted = predict(self.analysis, step.costs, step.program).bubble
            self._spent_s += time.monotonic() - begin
        return self._predicted


def _seconds(trace: Trace, program: Sequence[Instruction], table: Table) -> torch.Tensor:
    """[2, costed op, unit]: this rank's mean seconds, and 1 where it has such an instruction. Of a step in
    parts, those that the host does are left out."""
    width = max(len(table.units) - 1, *table.parameters) + 1  # number of compute units or parameter units
    spent: dict[int, list[float]] = {}  # op and unit as one number -> seconds, instructions
    for item, took in zip(program, trace.took(), strict=True):
        if item.op in COSTED and not (item.part and on_host(item, table)):
            pair = spent.setdefault(COSTED.index(item.op) * width + item.unit, [0.0, 0.0])
            pair[0] += took
            pair[1] += 1
    means, ones = ([0.0] * (len(COSTED) * width) for _ in range(2))
    for which, (seconds, count) in spent.items():
        means[which], ones[which] = seconds / count, 1.0
    return torch.tensor([means, ones], dtype=torch.float64).view(2, len(COSTED), width)


def _turn_s(trace: Trace, program: Sequence[Instruction]) -> float:
    return sum(took for item, took in zip(program, trace.took(), strict=True) if item.part == "turn")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)

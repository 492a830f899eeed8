"""Measure: each rank sums up its step in numbers; metrics are computed from those of all ranks.

Once a step, over the host, all ranks learn each rank's row (times, memory, bytes, requests to save or stop),
and the mean cost of each (op, unit) of each position, from which the step is predicted. Costs are added up on
the way, so that a rank sends and receives some 200 bytes for each rank, and not a program's worth.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from threed.comm import Comm
from threed.mesh import AXES
from threed.models.model import model_flops
from threed.monitor.attribute import CAUSES, PARTS, attribute, parts
from threed.monitor.straggler import Stragglers
from threed.prediction.simulate import Costs, predict
from threed.program.instruction import Instruction, Op
from threed.program.table import Plan
from threed.program.trace import Trace, compute_s
from threed.schema import Config

HEAD = ("step_s", "compute_s", "memory", *(f"sent_{axis}" for axis in AXES), "stop", "save", "saving", *PARTS)
COSTED = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.STEP)

# Dense 16-bit peaks of one device without sparsity, in TFLOPS, by what torch calls it (vendors' data sheets).
PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0}


class Step:
    """What all ranks reported of a step.

    `rows`: [rank, number of HEAD], fp64. `sums`: [position, 2, costed op, unit], fp64: seconds and how many
    ranks measured them.
    """

    def __init__(self, program: str, rows: torch.Tensor, sums: torch.Tensor):
        self.program, self._rows, self._sums = program, rows, sums

    def column(self, what: str) -> torch.Tensor:
        """Each rank's number, by rank."""
        return self._rows[:, HEAD.index(what)]

    def asked(self, what: str) -> bool:
        return bool(self.column(what).any())

    @cached_property
    def rows(self) -> list[dict[str, float]]:
        """By rank."""
        return [dict(zip(HEAD, row, strict=True)) for row in self._rows.tolist()]

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
    plan: Plan
    comm: Comm
    stragglers: Stragglers = field(init=False)
    _sent: dict[str, int] = field(default_factory=dict)
    _predicted: list[float] | None = None
    _spent_s: float = 0.0

    def __post_init__(self) -> None:
        self.stragglers = Stragglers(self.comm.mesh)

    def begin(self) -> float:
        """Begin a step: bytes that were sent before it (by a rehearsal, an evaluation, a proof) do not count.
        Returns the time."""
        self._sent = {axis: self.comm.sent[axis] for axis in AXES}
        return time.monotonic()

    def exchange(self, trace: Trace, step_s: float, asked: tuple[bool, bool], saving: float) -> Step:
        """Exchange this rank's row with all ranks. `asked`: to stop, to save; `saving`: how far this rank is
        with a checkpoint."""
        table, here = self.plan.table, self.comm.here
        program = self.plan.programs[trace.name][here.position]
        sent = {axis: self.comm.sent[axis] for axis in AXES}
        head = [step_s, compute_s(trace, program), float(peak_bytes(self.comm.device)),
                *(float(sent[axis] - self._sent.get(axis, 0)) for axis in AXES), *map(float, asked), saving,
                *parts(trace, program).values()]
        own = _seconds(trace, program, max(len(table.units) - 1, *table.parameters) + 1)
        sums = torch.zeros(table.num_positions, *own.shape, dtype=torch.float64)
        sums[here.position] = own
        rows = torch.empty(self.comm.mesh.size, len(head), dtype=torch.float64)
        world = self.comm.groups["world"]
        world.all_gather(rows, torch.tensor(head, dtype=torch.float64)).wait()
        world.all_reduce(sums).wait()
        return Step(trace.name, rows, sums)

    def metrics(self, step: Step, elapsed_s: float) -> dict[str, float | None]:
        """perf, pipeline, comm and memory metrics of a step."""
        config, mesh = self.config, self.comm.mesh
        step_s = float(step.column("step_s").max())
        tflops = model_flops(config.model, config.train.global_batch_size) / step_s / mesh.size / 1e12
        peak = config.monitor.peak_tflops or _peak_tflops(self.comm.device)
        values: dict[str, float | None] = {
            "perf/step_s": step_s,
            "perf/tokens_per_s": config.tokens_per_step / step_s,
            "perf/tokens_per_s_per_device": config.tokens_per_step / step_s / mesh.size,
            "perf/model_tflops_per_device": tflops,
            "perf/mfu": tflops / peak if peak else None,
        }
        bubble = 1.0 - step.column("compute_s") / step.column("step_s")
        measured = [float(bubble[ranks].mean()) for ranks in self._ranks]
        for name, bubbles in (("measured", measured), ("predicted", self._predict(step, elapsed_s))):
            values[f"pipeline/bubble_{name}"] = _mean(bubbles)
            values |= {f"pipeline/bubble_{name}/{stage}": bubble for stage, bubble in enumerate(bubbles)}
        for stage, ranks in enumerate(self._ranks):
            # what a position's ranks spent on average: the parts are sums, so their order does not matter
            mean = {what: float(step.column(what)[ranks].mean()) for what in (*PARTS, "step_s")}
            spent = attribute(mean, step.clip_s, mean["step_s"])
            values |= {f"time/{cause}/{stage}": spent[cause] for cause in CAUSES}
        values |= {f"comm/bytes_{axis}": float(step.column(f"sent_{axis}").sum()) for axis in AXES}
        values |= self.stragglers.look(step.rows)
        values["memory/peak_bytes"] = float(step.column("memory").max())
        return values

    @cached_property
    def _ranks(self) -> list[list[int]]:
        """The ranks of each position."""
        mesh = self.comm.mesh
        ranks: list[list[int]] = [[] for _ in range(mesh.positions)]
        for rank in range(mesh.size):
            ranks[mesh.coordinate(rank).position].append(rank)
        return ranks

    def _predict(self, step: Step, elapsed_s: float) -> list[float]:
        """Predicted bubbles. The plan is walked again only while walks have taken less than a hundredth of
        the run's time."""
        if self._predicted is None or self._spent_s < 0.01 * elapsed_s:
            begin = time.monotonic()
            self._predicted = predict(self.plan, step.costs, step.program).bubble
            self._spent_s += time.monotonic() - begin
        return self._predicted


def _seconds(trace: Trace, program: Sequence[Instruction], width: int) -> torch.Tensor:
    """[2, costed op, unit]: this rank's mean seconds, and 1 where it has such an instruction. `width`: number
    of compute units or parameter units."""
    spent: dict[int, list[float]] = {}  # op and unit as one number -> seconds, instructions
    for index, item in enumerate(program):
        if item.op in COSTED:
            pair = spent.setdefault(COSTED.index(item.op) * width + item.unit, [0.0, 0.0])
            pair[0] += trace.ended[index] - trace.started[index]
            pair[1] += 1
    means, ones = ([0.0] * (len(COSTED) * width) for _ in range(2))
    for which, (seconds, count) in spent.items():
        means[which], ones[which] = seconds / count, 1.0
    return torch.tensor([means, ones], dtype=torch.float64).view(2, len(COSTED), width)


def peak_bytes(device: torch.device) -> int:
    """The allocator's peak on a GPU, the peak resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _peak_tflops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)

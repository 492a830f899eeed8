"""Measure: each rank sums up its step in a row of numbers; metrics are computed from all ranks' rows.

Rows are exchanged once a step over the host. A row holds times, memory, bytes, requests to save or stop, and
the mean cost of each (op, unit) of the rank's position, from which the step is predicted.
"""

from __future__ import annotations

import math
import resource
import time
from dataclasses import dataclass, field

import torch

from threed.comm import Comm
from threed.mesh import AXES
from threed.models.model import model_flops
from threed.monitor.attribute import CAUSES, PARTS, attribute, parts
from threed.monitor.straggler import Stragglers
from threed.prediction.simulate import Costs, predict
from threed.program.instruction import Op
from threed.program.table import Plan
from threed.program.trace import Trace, compute_s
from threed.schema import Config

HEAD = ("step_s", "compute_s", "memory", *(f"sent_{axis}" for axis in AXES), "stop", "save", "saving", *PARTS)
COSTED = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.STEP)

# Dense 16-bit peaks of one device without sparsity, in TFLOPS, by what torch calls it (vendors' data sheets).
PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0}


@dataclass
class Step:
    """What all ranks reported of a step, by rank."""

    program: str
    rows: list[dict[str, float]]
    costs: Costs
    clip_s: float

    def asked(self, what: str) -> bool:
        return any(row[what] for row in self.rows)


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
        sums: dict[tuple[Op, int], list[float]] = {}
        for index, item in enumerate(program):
            if item.op in COSTED:
                pair = sums.setdefault((item.op, item.unit), [0.0, 0.0])
                pair[0] += trace.ended[index] - trace.started[index]
                pair[1] += 1
        width = max(len(table.units) - 1, *table.parameters) + 1  # of compute units and parameter units
        row = torch.full((len(head) + len(COSTED) * width,), math.nan, dtype=torch.float64)
        row[: len(head)] = torch.tensor(head)
        for (op, unit), (total, count) in sums.items():
            row[len(head) + COSTED.index(op) * width + unit] = total / count
        rows = torch.empty(self.comm.mesh.size, row.numel(), dtype=torch.float64)
        self.comm.groups["world"].all_gather(rows, row).wait()
        return self._read(trace.name, rows.tolist(), len(head), width)

    def _read(self, program: str, rows: list[list[float]], start: int, width: int) -> Step:
        sums: dict[tuple[int, Op, int], list[float]] = {}
        for rank, row in enumerate(rows):
            position = self.comm.mesh.coordinate(rank).position
            for index, value in enumerate(row[start:]):
                if not math.isnan(value):  # the rank's position has such an instruction
                    pair = sums.setdefault((position, COSTED[index // width], index % width), [0.0, 0.0])
                    pair[0] += value
                    pair[1] += 1
        costs: dict[tuple[int, Op, int], float] = {key: total / count for key, (total, count) in sums.items()}
        heads = [dict(zip(HEAD, row[:start], strict=True)) for row in rows]
        # CLIP is a barrier: its own time is that of the last rank to arrive.
        clip_s = min(head["clip"] for head in heads)
        costs |= {(position, Op.CLIP, -1): clip_s for position in range(self.plan.table.num_positions)}
        return Step(program, heads, costs, clip_s)

    def metrics(self, step: Step, elapsed_s: float) -> dict[str, float | None]:
        """perf, pipeline, comm and memory metrics of a step."""
        config, mesh = self.config, self.comm.mesh
        step_s = max(row["step_s"] for row in step.rows)
        tflops = model_flops(config.model, config.train.global_batch_size) / step_s / mesh.size / 1e12
        peak = config.monitor.peak_tflops or _peak_tflops(self.comm.device)
        values: dict[str, float | None] = {
            "perf/step_s": step_s,
            "perf/tokens_per_s": config.tokens_per_step / step_s,
            "perf/tokens_per_s_per_device": config.tokens_per_step / step_s / mesh.size,
            "perf/model_tflops_per_device": tflops,
            "perf/mfu": tflops / peak if peak else None,
        }
        measured: list[list[float]] = [[] for _ in range(mesh.positions)]
        for rank, row in enumerate(step.rows):
            measured[mesh.coordinate(rank).position].append(1.0 - row["compute_s"] / row["step_s"])
        predicted = self._predict(step, elapsed_s)
        for name, bubbles in (("measured", [_mean(row) for row in measured]), ("predicted", predicted)):
            values[f"pipeline/bubble_{name}"] = _mean(bubbles)
            values |= {f"pipeline/bubble_{name}/{stage}": bubble for stage, bubble in enumerate(bubbles)}
        spent: list[list[dict[str, float]]] = [[] for _ in range(mesh.positions)]
        for rank, row in enumerate(step.rows):
            spent[mesh.coordinate(rank).position].append(attribute(row, step.clip_s, row["step_s"]))
        values |= {f"time/{cause}/{stage}": _mean([row[cause] for row in rows])
                   for stage, rows in enumerate(spent) for cause in CAUSES}
        values |= {f"comm/bytes_{axis}": sum(row[f"sent_{axis}"] for row in step.rows) for axis in AXES}
        values |= self.stragglers.look(step.rows)
        values["memory/peak_bytes"] = max(row["memory"] for row in step.rows)
        return values

    def _predict(self, step: Step, elapsed_s: float) -> list[float]:
        """Predicted bubbles. The plan is walked again only while walks have taken less than a hundredth of
        the run's time."""
        if self._predicted is None or self._spent_s < 0.01 * elapsed_s:
            begin = time.monotonic()
            self._predicted = predict(self.plan, step.costs, step.program).bubble
            self._spent_s += time.monotonic() - begin
        return self._predicted


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

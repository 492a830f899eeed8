"""Layers: what each kind of unit takes on one rank, as an instruction of the engine. The prices of kernels
alone miss autograd, and memory that is not in a processor's caches."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator

import torch

from threed.calibration.clock import typical
from threed.calibration.grid import Grid
from threed.calibration.points import UNITS, Computed
from threed.config.load import load
from threed.engine.engine import Engine
from threed.engine.loopback import ThreadComm, World
from threed.planner import make_mesh, make_pipeline, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import Op
from threed.program.plan import Plan
from threed.program.trace import Trace
from threed.schema import Config
from threed.tensor.context import Batch

BASE = ("model.layers=8", "model.dropout=0", "train.steps=1000000", "run.device=cpu", "optimizer.lr=1e-5",
        "parallel.dp=1")
MICRO_BATCHES, LEAST = 4, 3
POINTS = 4  # a config takes as long as so many other points


def layers(grid: Grid) -> Iterator[Computed]:
    for text in grid.layers:
        config = load(None, [*BASE, *text.split()])
        config.train.global_batch_size = MICRO_BATCHES * config.train.micro_batch_size
        plan = make_plan(config, make_pipeline(config))
        yield from _points(config, plan, _run(config, plan, POINTS * grid.point_s))


def _run(config: Config, plan: Plan, limit_s: float) -> list[Trace]:
    """Traces of steps with random tokens; the first does not count."""
    model, size = config.model, config.train.micro_batch_size
    comm = ThreadComm(World(make_mesh(config)), 0, [])
    engine = Engine(Analysis(plan), comm)
    tokens = torch.randint(model.vocab, (size, model.seq_len + 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], torch.arange(size), 0, config.tokens_per_step)
    traces, until = [], time.monotonic() + limit_s
    while len(traces) <= LEAST or time.monotonic() < until:
        traces.append(engine.train_step(lambda number: batch)[1])
    engine.close()
    comm.close()
    return traces[1:]


def _points(config: Config, plan: Plan, traces: list[Trace]) -> Iterator[Computed]:
    """A point a unit and op."""
    table, model = plan.table, config.model
    seconds: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for index, item in enumerate(plan.programs["train"][0]):
        if item.op in (Op.FORWARD, Op.BACKWARD):
            seconds[item.op, item.unit] += [trace.ended[index] - trace.started[index] for trace in traces]
    for (op, unit), each in seconds.items():
        what = (f"{table.units[unit].name} {str(op).lower()}, {model.family}, hidden {model.hidden}, "
                f"{model.seq_len} tokens")
        yield Computed(UNITS, what, table.units[unit].kernels, table.elements.param, op == Op.BACKWARD,
                       typical(each))

"""Layers: what each kind of unit takes on one rank, on the engine, and the host's time beside it. The prices of
kernels alone miss autograd and what is in a processor's caches."""

from __future__ import annotations

import time
from collections import defaultdict
from statistics import median
from typing import NamedTuple

import torch

from threed.calibration.grid import Grid
from threed.calibration.points import Computed
from threed.config import load
from threed.engine.engine import Engine
from threed.engine.loopback import ThreadComm, World
from threed.planner import make_mesh, make_pipeline, make_plan
from threed.program.instruction import COMPUTE, Op, Tier
from threed.program.table import Plan
from threed.program.trace import Trace
from threed.schema import Config
from threed.tensor.context import Batch

SIZES = ("model.layers=2", "model.dropout=0", "train.steps=1000000", "run.device=cpu", "optimizer.lr=1e-5",
         "parallel.dp=1")
MICRO_BATCHES, LEAST = 4, 3


class Dispatch(NamedTuple):
    """A step of one rank without its computation."""

    seconds: float
    instructions: int
    stepped: int  # bytes that STEP reads and writes; its time is in `seconds`


def layers(grid: Grid) -> tuple[list[Computed], list[Dispatch]]:
    points, rests = [], []
    for text in grid.layers:
        config = load(None, [*SIZES, *text.split()])
        config.train.global_batch_size = MICRO_BATCHES * config.train.micro_batch_size
        plan = make_plan(config, make_pipeline(config))
        traces = _run(config, plan, 4 * grid.point_s)
        points += _points(plan, traces)
        rests.append(_rest(plan, traces))
    return points, rests


def _run(config: Config, plan: Plan, limit_s: float) -> list[Trace]:
    """Traces of steps with random tokens, of which the first does not count."""
    model, size = config.model, config.train.micro_batch_size
    comm = ThreadComm(World(make_mesh(config)), 0, [])
    engine = Engine(config, plan, comm)
    tokens = torch.randint(model.vocab, (size, model.seq_len + 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], torch.arange(size), 0, config.tokens_per_step)
    traces, until = [], time.monotonic() + limit_s
    while len(traces) <= LEAST or time.monotonic() < until:
        traces.append(engine.train_step(lambda number: batch)[1])
    engine.close()
    comm.close()
    return traces[1:]


def _points(plan: Plan, traces: list[Trace]) -> list[Computed]:
    """A point a kind of unit and op."""
    program, table = plan.programs["train"][0], plan.table
    seconds: dict[tuple, list[float]] = defaultdict(list)
    names: dict[tuple, str] = {}
    for index, item in enumerate(program):
        if item.op in (Op.FORWARD, Op.BACKWARD):
            unit = table.units[item.unit]
            key = item.op, unit.kernels
            names.setdefault(key, f"{unit.name} {str(item.op).lower()}, {_size(plan)}")
            seconds[key] += [trace.ended[index] - trace.started[index] for trace in traces]
    return [Computed("layers", names[op, kernels], kernels, table.elements.param, op == Op.BACKWARD, median(each))
            for (op, kernels), each in seconds.items()]


def _size(plan: Plan) -> str:
    assert plan.config is not None
    model = plan.config.model
    return f"hidden {model.hidden}, {model.seq_len} tokens"


def _rest(plan: Plan, traces: list[Trace]) -> Dispatch:
    program, table = plan.programs["train"][0], plan.table
    computes = [index for index, item in enumerate(program) if item.op in COMPUTE]
    seconds = median(trace.total_s - sum(trace.ended[index] - trace.started[index] for index in computes)
                     for trace in traces)
    stepped = sum(table.shard_numel(item.unit) for item in program if item.op == Op.STEP)
    each = 2 * table.state_bytes(Tier.HOST) + table.elements.grad + table.elements.param
    return Dispatch(seconds, len(program), stepped * each)

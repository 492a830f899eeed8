"""Pipelines that sleep: a plan for threed's engine, and the same stages for torch.distributed.pipelining.

The forward, the input half and the weight half of backward sleep; small tensors are really sent.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import torch
import torch.distributed.pipelining as tp
from torch import nn

from bench.peers.sleeping_engine import SHAPE, Ran, Times, nap
from threed.config.load import load
from threed.features.pipeline.plan import communicate, expand
from threed.features.zero import plan as zero
from threed.planner import make_pipeline, make_table
from threed.program.check import check
from threed.program.instruction import Op
from threed.program.plan import Plan
from threed.schedules.orders import SCHEDULES, Task
from threed.schema import Config
from threed.spec.kernels import Product

# threed's schedule -> torch's, for those that both have. zb-h1 is the one-stage form of torch's (ZB1P).
PEERS: dict[str, Any] = {"gpipe": tp.ScheduleGPipe, "1f1b": tp.Schedule1F1B,
                         "interleaved": tp.ScheduleInterleaved1F1B,
                         "zb-h1": tp.ScheduleInterleavedZeroBubble, "zb-v": tp.ScheduleZBVZeroBubble}


class Case(NamedTuple):
    schedule: str
    p: int
    m: int
    v: int  # stages a position
    units: int  # threed's compute units a stage

    def __str__(self) -> str:
        return f"{self.schedule} p={self.p} m={self.m}" + (f" v={self.v}" if self.v > 1 else "")


# ---------------------------------------------------------------- threed


def make_case(case: Case) -> tuple[Config, Plan]:
    """A tiny model cut into `units` units a stage, which the planner believes to be equally long, as they are
    here."""
    stages = case.p * case.v
    config = load(None, [
        f"model.layers={stages * case.units - 2}", f"model.hidden={SHAPE[2]}", "model.heads=4",
        "model.vocab=64",
        f"model.seq_len={SHAPE[0]}", "model.vocab_multiple=64", "model.tie_embeddings=false",
        f"train.global_batch_size={case.m}",
        f"train.micro_batch_size={SHAPE[1]}", "parallel.dp=1", f"parallel.pp={case.p}",
        f"parallel.schedule={case.schedule}",
        f"parallel.virtual_stages={case.v if SCHEDULES[case.schedule].virtual is None else 'null'}",
        f"parallel.stage_units={[case.units] * stages}"])
    order, place = make_pipeline(config)
    table = make_table(config, place)
    units = tuple(dataclasses.replace(unit, kernels=(Product(10, 10, 5),)) for unit in table.units)
    table = dataclasses.replace(table, units=units)
    programs = zero.train(communicate(expand(order, table), table), table)
    plan = Plan(table, {"train": [tuple(program) for program in programs]}, config)
    check(plan)
    return config, plan


def seconds_of(case: Case, times: Times) -> dict[Op, tuple[float, ...]]:
    """For which the handlers of a unit sleep. BACKWARD sleeps twice, as torch's does, so that both oversleep
    alike."""
    share = times.over(case.v * case.units)
    return {Op.FORWARD: (share.forward,), Op.BACKWARD: (share.input, share.weight),
            Op.BACKWARD_INPUT: (share.input,), Op.BACKWARD_WEIGHT: (share.weight,)}


# ---------------------------------------------------------------- torch


class Sleep(torch.autograd.Function):
    """The identity; both directions sleep."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, share: Times) -> torch.Tensor:
        ctx.share = share
        nap(share.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        nap(ctx.share.input)
        return grads[0].clone(), None, None


class SleepModule(nn.Module):
    def __init__(self, share: Times):
        super().__init__()
        self.weight, self.share = nn.Parameter(torch.zeros(1)), share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self.weight, self.share)  # pyright: ignore[reportReturnType]


class TimedStage(tp.PipelineStage):
    """torch's stage, which notes what it computed and for how long. The weights' half sleeps in
    `dw_builder`'s runner."""

    def __init__(self, share: Times, stage: int, num_stages: int, ran: list[tuple[Task, float]]):
        super().__init__(SleepModule(share), stage, num_stages, torch.device("cpu"),
                         dw_builder=lambda: lambda: nap(share.weight))
        self._ran = ran

    def _note(self, kind: str, microbatch: int, begin: float) -> None:
        self._ran.append((Task(kind, self.stage_index, microbatch), time.monotonic() - begin))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        begin = time.monotonic()
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._note("F", fwd_chunk_id, begin)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True,
                           last_backward: bool = False) -> None:
        begin = time.monotonic()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._note("B" if full_backward else "I", bwd_chunk_id, begin)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        begin = time.monotonic()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._note("W", bwd_chunk_id, begin)


class Torch:
    """One rank of torch's schedule with modules that sleep."""

    def __init__(self, case: Case, times: Times, rank: int):
        place = SCHEDULES[case.schedule].place(case.p, case.v)
        self.ran: list[tuple[Task, float]] = []
        stages = [TimedStage(times.over(case.v), stage, len(place), self.ran)
                  for stage, position in enumerate(place) if position == rank]
        make = PEERS[case.schedule]
        alone = issubclass(make, tp.schedules.PipelineScheduleSingle)
        self.schedule = make(stages[0] if alone else stages, case.m,
                             loss_fn=lambda output, target: output.sum(), scale_grads=False)
        self.inputs = [torch.zeros(case.m * SHAPE[0], *SHAPE[1:])] if place[0] == rank else []
        self.target = torch.zeros(case.m) if place[-1] == rank else None

    def step(self) -> Ran:
        self.ran.clear()
        begin = time.monotonic()
        self.schedule.step(*self.inputs, target=self.target, return_outputs=False)
        return Ran(begin, time.monotonic(), [seconds for _, seconds in self.ran],
                   [task for task, _ in self.ran])

"""Pipelines that sleep: the same stages for threed's engine and for torch.distributed.pipelining, one rank of
each.

The forward, the input half and the weight half of backward sleep; small tensors are really sent.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import torch
import torch.distributed.pipelining as tp
from torch import nn

from threed.comm.process import ProcessComm
from threed.config.load import load
from threed.engine.engine import Engine
from threed.engine.loopback import channel_pairs
from threed.features.pipeline.plan import communicate, expand
from threed.features.zero import plan as zero
from threed.planner import make_pipeline, make_table
from threed.program.check import check
from threed.program.instruction import Instruction, Op, Slot
from threed.program.plan import Plan
from threed.program.slots import Slots
from threed.schedules.orders import SCHEDULES, Task
from threed.schema import Config
from threed.spec.kernels import Product
from threed.tensor.context import Batch
from threed.tensor.loss_sum import NUMBERS

SHAPE = (16, 1, 32)  # of a message: sequence, micro-batch, hidden

# threed's schedule -> torch's, for those that both have. zb-h1 is the one-stage form of torch's (ZB1P).
PEERS: dict[str, Any] = {"gpipe": tp.ScheduleGPipe, "1f1b": tp.Schedule1F1B,
                         "interleaved": tp.ScheduleInterleaved1F1B,
                         "zb-h1": tp.ScheduleInterleavedZeroBubble, "zb-v": tp.ScheduleZBVZeroBubble}


class Times(NamedTuple):
    """Seconds of a position's whole share, for one micro-batch."""

    forward: float
    input: float
    weight: float

    def over(self, count: int) -> Times:
        return Times(*(seconds / count for seconds in self))


class Case(NamedTuple):
    schedule: str
    p: int
    m: int
    v: int  # stages a position
    units: int  # threed's compute units a stage

    def __str__(self) -> str:
        return f"{self.schedule} p={self.p} m={self.m}" + (f" v={self.v}" if self.v > 1 else "")


class Ran(NamedTuple):
    """One step of one rank: its begin and end by the clock that all processes share, and the seconds of its
    ops, in order."""

    begin: float
    end: float
    seconds: list[float]
    tasks: list[Task]  # torch: what the seconds are of; threed: its program


class Naps:
    """Sleeps, unless switched off: the step that only sets things up need not take its time."""

    on = False

    def __call__(self, seconds: float) -> None:
        if self.on and seconds > 0:
            time.sleep(seconds)


nap = Naps()  # of this process


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
    plan = Plan(table, {"train": [tuple(program) for program in programs]})
    check(plan)
    return config, plan


class Threed:
    """One rank of threed's engine with handlers that sleep."""

    def __init__(self, case: Case, times: Times, comm: ProcessComm, opened: set[tuple[int, int, str]]):
        """`opened`: channels that earlier cases have opened."""
        config, plan = make_case(case)
        pairs = set(channel_pairs(plan)) - opened
        comm.open_channels(sorted(pairs))
        opened |= pairs
        self.table, self.times, self.value = plan.table, times, torch.zeros(SHAPE)
        self.share = times.over(case.v * case.units)
        self.engine = Engine(config, plan, comm)
        self.engine.handlers |= {Op.FORWARD: self.forward, Op.BACKWARD: self.backward,
                                 Op.BACKWARD_INPUT: self.backward_input,
                                 Op.BACKWARD_WEIGHT: self.backward_weight}

    def step(self) -> Ran:
        begin = time.monotonic()
        _, trace = self.engine.train_step(_no_batch)
        end = time.monotonic()
        return Ran(begin, end, [after - before for before, after in zip(trace.started, trace.ended)], [])

    def forward(self, item: Instruction, slots: Slots) -> None:
        nap(self.share.forward)
        slots.put(Slot("saved", item.unit, item.microbatch), True)
        if item.unit < self.table.last:
            slots.put(Slot("act", item.unit, item.microbatch), self.value)
        else:
            slots.put(Slot("loss"), torch.zeros(NUMBERS, dtype=torch.float64))

    def backward_input(self, item: Instruction, slots: Slots) -> None:
        nap(self.share.input)
        self._grad(item, slots)
        slots.put(Slot("operands", item.unit, item.microbatch), True)

    def backward_weight(self, item: Instruction, slots: Slots) -> None:
        nap(self.share.weight)
        for unit in self.table.units[item.unit].parameters:
            slots.put(Slot("wgrad", unit), True)

    def backward(self, item: Instruction, slots: Slots) -> None:
        """Two sleeps, as in torch's, so that both oversleep alike."""
        nap(self.share.input)
        self.backward_weight(item, slots)
        self._grad(item, slots)

    def _grad(self, item: Instruction, slots: Slots) -> None:
        if item.unit > 0:
            slots.put(Slot("grad", item.unit - 1, item.microbatch), self.value)


def _no_batch(microbatch: int) -> Batch:
    raise AssertionError("stages that sleep read no data")


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

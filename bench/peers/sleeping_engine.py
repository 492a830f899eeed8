"""threed's engine on one rank, whose computation and exchanges sleep; and what its steps should take.

The handlers of FORWARD, BACKWARD* and EXCHANGE sleep, the last on its lane, and so do OFFLOAD, FETCH and a
STEP on the host, before they do their work. All else is real: messages, waits, lanes, frees, and a STEP on
the device.

Where the engine is to run `ahead` of its computation, as the host does of a GPU, a thread sleeps for it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import mean, median
from typing import NamedTuple

import torch

from bench.common import start_together
from threed.comm.lanes import Job, ThreadLane, Waiting
from threed.comm.process import ProcessComm
from threed.engine.engine import Engine
from threed.engine.loopback import channel_pairs
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.link import Links, Program
from threed.program.names import ENTER, TRAIN
from threed.program.plan import Plan
from threed.program.slots import Slots
from threed.program.trace import Trace
from threed.program.walk import Mode, walk
from threed.schedules.orders import Task
from threed.schema import Config
from threed.tensor.context import Batch
from threed.tensor.loss_sum import NUMBERS

MOVED = (Op.OFFLOAD, Op.FETCH, Op.STEP)
SHAPE = (16, 1, 32)  # of a message: sequence, micro-batch, hidden
PINGS = 60
PAUSE_S = 0.005


class Times(NamedTuple):
    """Seconds of a position's whole share, for one micro-batch."""

    forward: float
    input: float
    weight: float

    def over(self, count: int) -> Times:
        return Times(*(seconds / count for seconds in self))


class Ran(NamedTuple):
    """One step of one rank: its begin and end by the clock that all processes share, and the seconds of its
    ops, in order."""

    begin: float
    end: float
    seconds: list[float]  # of what sleeps on its lane: there
    tasks: Sequence[Task] = ()  # torch: what the seconds are of; threed: its program
    trace: Trace | None = None  # threed's


class Naps:
    """Sleeps, unless switched off: the step that only sets things up need not take its time."""

    on = False

    def __call__(self, seconds: float) -> None:
        if self.on and seconds > 0:
            time.sleep(seconds)


nap = Naps()  # of this process


class Threed:
    """One rank of threed's engine with handlers that sleep."""

    def __init__(self, config: Config, plan: Plan, comm: ProcessComm, opened: set[tuple[int, int, str]],
                 seconds: Callable[[Instruction], Sequence[float]], ahead: bool = False):
        """`opened`: channels that earlier plans have opened. `seconds`: of an instruction, for which it
        sleeps, one after the other. `ahead`: the computation is a lane, too."""
        pairs = set(channel_pairs(plan)) - opened
        comm.open_channels(sorted(pairs))
        opened |= pairs
        self.engine, self.seconds = Engine(Analysis(plan), comm), seconds
        self.programs = {name: plan.programs[name][comm.here.position] for name in (TRAIN, ENTER)
                         if name in plan.programs}
        self.program = self.programs[TRAIN]
        self.effects = {item: effect for name, program in self.programs.items()
                        for item, effect in zip(program, self.engine.orders[name].effects, strict=True)}
        value = torch.zeros(SHAPE)
        self.values = {"act": value, "grad": value, "loss": torch.zeros(NUMBERS, dtype=torch.float64)}
        self.lane_s: dict[Instruction, list[float]] = defaultdict(list)  # a FETCH may be there often
        self._own = {op: self.engine.handlers[op] for op in MOVED}
        self.engine.handlers |= {**dict.fromkeys(COMPUTE, self.compute), Op.EXCHANGE: self.exchange,
                                 **dict.fromkeys(MOVED, self.move)}
        if ahead:
            self._go_ahead(comm)

    def _go_ahead(self, comm: ProcessComm) -> None:
        """Have a thread compute. What a rank does by itself at once, in its computation's stream, has a
        thread, too; the host waits for the computation in CLIP, whose result it reads."""
        orders, clip = self.engine.orders, self.engine.handlers[Op.CLIP]
        comm.lane("compute").close()  # of an earlier engine
        compute = comm._lanes["compute"] = ThreadLane("compute", comm.device)
        for name, program in self.programs.items():
            order = orders[name]
            computed = {index for index, item in enumerate(program) if item.op in COMPUTE}
            orders[name] = order._replace(jobs=order.jobs | computed)
            for index in order.jobs:
                comm.lane(order.effects[index].lane, beside=True)

        def after_all(item: Instruction, slots: Slots) -> object:
            compute.submit(lambda: None).wait()
            return clip(item, slots)

        self.engine.handlers |= {**dict.fromkeys(COMPUTE, self.exchange), Op.CLIP: after_all}

    def step(self) -> Ran:
        self.lane_s.clear()
        begin = time.monotonic()
        _, trace = self.engine.train_step(_no_batch)
        end = time.monotonic()
        on_lanes = {item: iter(each) for item, each in self.lane_s.items()}
        took = [next(on_lanes[item]) if item in on_lanes else after - before for item, before, after in
                zip(self.programs[trace.name], trace.started, trace.ended, strict=True)]
        return Ran(begin, end, took, trace=trace)

    def compute(self, item: Instruction, slots: Slots) -> None:
        for seconds in self.seconds(item):
            nap(seconds)
        self._put(item, slots)

    def exchange(self, item: Instruction, slots: Slots) -> Job:
        self._put(item, slots)
        return self._asleep(item, lambda: None)

    def move(self, item: Instruction, slots: Slots) -> Job | None:
        """The engine's own job, after a sleep; what is no job does not sleep."""
        job = self._own[item.op](item, slots)
        return None if job is None else self._asleep(item, job)

    def _asleep(self, item: Instruction, job: Job) -> Job:
        def timed() -> None:
            begin = time.monotonic()
            for seconds in self.seconds(item):
                nap(seconds)
            job()
            self.lane_s[item].append(time.monotonic() - begin)

        return Waiting(timed) if isinstance(job, Waiting) else timed

    def _put(self, item: Instruction, slots: Slots) -> None:
        effect = self.effects[item]
        for slot in (*effect.writes, *effect.adds):
            slots.put(slot, self.values.get(slot.kind, True))


def _no_batch(microbatch: int) -> Batch:
    raise AssertionError("stages that sleep read no data")


def ping_pong(comm: ProcessComm) -> list[float]:
    """Seconds of a message between positions 0 and 1, one way, as half a round trip. As in a pipeline, the
    receiver waits already, and the sender has slept: the pauses are taken off."""
    start_together(comm)
    forth, back, position = (0, 1, "act"), (1, 0, "grad"), comm.here.position
    value, seconds = torch.zeros(SHAPE), list[float]()
    for _ in range(PINGS if position < 2 else 0):
        mine, other = (forth, back) if position == 0 else (back, forth)
        if position == 1:
            comm.channels[other].recv(value).wait()
        before = time.monotonic()
        time.sleep(PAUSE_S)
        slept = torch.full(SHAPE, time.monotonic() - before)
        begin = time.monotonic()
        sent = comm.channels[mine].send(slept)
        if position == 0:
            comm.channels[other].recv(value).wait()
            seconds.append((time.monotonic() - begin - value.flatten()[0].item()) / 2)
        sent.wait()
    return seconds[PINGS // 6:]


# ---------------------------------------------------------------- the simulation


Seconds = dict[tuple[int, Instruction], float]  # (position, instruction) -> as measured


def simulate(programs: Sequence[Program], links: Sequence[Links], seconds: Seconds,
             transfer_s: float) -> float:
    """Step time of programs whose instructions take these times. Sends take `transfer_s`; the rest of
    communication nothing."""
    taken = [[transfer_s if item.op == Op.SEND else seconds.get((position, item), 0.0) for item in program]
             for position, program in enumerate(programs)]
    return walk(programs, links, Mode.BUFFERED, taken).total_s


def measured(programs: Sequence[Program], ranks: Sequence[Ran]) -> Seconds:
    """What the instructions of a step of threed took that compute, step, exchange or move; the mean of one
    that is there several times. `ranks`: one a position."""
    times: dict[tuple[int, Instruction], list[float]] = defaultdict(list)
    for position, ran in enumerate(ranks):
        for item, took in zip(programs[position], ran.seconds, strict=True):
            if item.op in (*COMPUTE, *MOVED) or item.of_slot:
                times[position, item].append(took)
    return {key: mean(each) for key, each in times.items()}


def averaged(*alike: Seconds) -> Seconds:
    """Each time replaced by the mean over all micro-batches, and over what else is `alike`."""
    groups: dict[tuple[int, Instruction], list[float]] = {}
    for seconds in alike:
        for (position, item), took in seconds.items():
            groups.setdefault((position, item._replace(microbatch=-1)), []).append(took)
    means = {key: mean(each) for key, each in groups.items()}
    return {(position, item): means[position, item._replace(microbatch=-1)] for position, item in alike[0]}


class Side(NamedTuple):
    """One executor in one case: medians over the steps. A ratio is of a step to its own simulation."""

    step_s: float
    simulated_s: float
    ratio: float
    best_ratio: float
    ratio_to_means: float  # to the simulation from mean times by position, op and unit
    steps_s: list[float]


def side(steps: Iterable[Sequence[Ran]], simulated: Callable[[Sequence[Ran]], tuple[float, float]]) -> Side:
    """`steps[step][rank]`. A step begins with the first rank and ends with the last."""
    took, own, means = list[float](), list[float](), list[float]()
    for ranks in steps:
        took.append(max(ran.end for ran in ranks) - min(ran.begin for ran in ranks))
        one, other = simulated(ranks)
        own.append(one)
        means.append(other)
    ratios = [t / s for t, s in zip(took, own, strict=True)]
    return Side(median(took), median(own), median(ratios), min(ratios),
                median(t / s for t, s in zip(took, means, strict=True)), took)

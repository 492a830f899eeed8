"""Short plans: a layout's step, timed by real plans of few micro-batches in which alike units are one.

    all micro-batches  =  those of a short plan  +  what one more takes x those that are left out

The plans are made by the planner's own passes, and priced and walked as by `threed predict`.

* Micro-batches: a schedule is periodic. After it is filled, p more micro-batches take as long as the p
  before; or 2p, where positions wait for messages in turn. A short plan has a steady state, and as many
  micro-batches modulo p as the real one.
* Units: those of a stage that are alike become one that takes as long (`merge`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from threed.base.mesh import GROUPS
from threed.layout_search.layout import copied, sends_often
from threed.layout_search.merge import Merged, merged
from threed.planner.auto import check_limit, make_pipeline, marked_table
from threed.planner.passes import run_passes
from threed.prediction.contention import step
from threed.prediction.hardware import Hardware
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.table import Table
from threed.program.walk import Cost, Walk
from threed.schedules.orders import SCHEDULES
from threed.schema import Config, OffloadConfig, ZeroConfig

FORWARDS_FIRST = ("gpipe", "breadth-first")  # orders with the forwards of all micro-batches before backwards
_MANY = 1 << 30  # micro-batches: more than a plan has
_STEADY = 0.99  # of the pace: a steady state is not faster


def steady_count(name: str, p: int, m: int) -> int:
    """m, or where m is large a small number with a steady state that is congruent to it modulo p."""
    fewest = SCHEDULES[name].least(p) + 2 * p + 2
    return m if m <= fewest + p else fewest + (m - fewest) % p


def filling_count(name: str, p: int, m: int) -> int:
    """The fewest that fill the pipeline, congruent to m modulo p."""
    fewest = SCHEDULES[name].least(p) + p
    return m if m <= fewest else fewest + (m - fewest) % p


class ShortPlan(NamedTuple):
    analysis: Analysis
    merged: Merged

    def cost(self, hardware: Hardware, free: Collection[Op] = (),
             change: Callable[[Table], Table] = lambda table: table) -> Cost:
        """Seconds of an instruction. `free`: what takes none. `change`: what makes tables of other prices."""
        price = self.merged.cost(self.analysis.plan, hardware, free, change)

        def seconds(position: int, item: Instruction) -> float:
            return 0.0 if _counts_as(item) in free else price(position, item)

        return seconds


def short_plan(config: Config, microbatches: int, ends: bool = True,
               tables: dict[object, Merged] | None = None) -> ShortPlan:
    """The unchecked plan of so many micro-batches of a config. `ends`: as in `merged`. `tables`: those of
    other short plans of the config, which share them. InputError where it keeps more than the config
    allows."""
    short, tables = _short(config, microbatches), {} if tables is None else tables
    pipeline = make_pipeline(short)
    # Tables differ by the number of micro-batches alone, which no pass reads, but for those of a budget, for
    # which plans are made. (`merged` takes it that each number of zero.reduce_every is reached.)
    about = short if config.activation.policy == "budget" else _short(config, _MANY)
    key = pipeline.place, about.num_microbatches
    if key not in tables:
        tables[key] = merged(marked_table(about, pipeline), ends)
    analysis = Analysis(run_passes(short, pipeline, tables[key].table))
    check_limit(short, pipeline, analysis)
    return ShortPlan(analysis, tables[key])


def _short(config: Config, microbatches: int) -> Config:
    """A config with so many micro-batches, of whose programs only the step counts."""
    config = copied(config)
    train = config.train
    train.global_batch_size = microbatches * train.micro_batch_size * config.dp
    train.eval_every = train.sample_every = config.checkpoint.every = config.run.verify_every = 0
    return config


class FreeStep(NamedTuple):
    """A step with free traffic over dp and free updates: no step of a layout that computes the same is
    shorter."""

    step_s: float
    microbatch_s: float  # of one more micro-batch
    filling_s: float  # of a step of as few micro-batches as have a start and an end


class StepParts(NamedTuple):
    """A step, and parts of it that something could shorten."""

    step_s: float
    again_s: float  # of the busiest position: computed again
    tp_s: float  # of that position: collectives over tp
    dp_s: float  # how much shorter the step were if gathers and reductions were free
    ep_s: float  # if exchanges between units were
    offload_s: float  # if moves to other tiers and steps there were
    bubble: float  # share of the step in which a position neither computes nor steps, on average


class ShortPlans:
    """The short plans of a config on a machine. InputError as from `short_plan`."""

    def __init__(self, config: Config, hardware: Hardware):
        self.hardware = hardware
        if hardware.waits and config.model.fused == "auto":  # as prices have it on a CPU
            config = replace(config, model=replace(config.model, fused="off"))
        self.config, self.p, self.m = config, config.parallel.pp, config.num_microbatches
        # A limit of what is kept is about all micro-batches.
        whole = config.activation.policy == "budget" or config.parallel.activation_limit is not None
        about = config.parallel.schedule, self.p, self.m
        self._steady, self._filling = (self.m, self.m) if whole else (
            steady_count(*about), filling_count(*about))
        self._plans: dict[int, ShortPlan] = {}
        self._tables, self._free_tables = dict[object, Merged](), dict[object, Merged]()
        # (micro-batches, what is free) -> seconds of a step
        self._times: dict[tuple[int, tuple[Op, ...]], float] = {}

    def _plan(self, microbatches: int) -> ShortPlan:
        if microbatches not in self._plans:
            self._plans[microbatches] = short_plan(self.config, microbatches, tables=self._tables)
        return self._plans[microbatches]

    def _timed(self, microbatches: int, free: tuple[Op, ...] = ()) -> float:
        """Seconds of a step. Where all of _FREE is `free`, nothing waits for single units."""
        key = microbatches, free
        if key not in self._times:
            if free == _FREE:
                plain = replace(self.config, zero=ZeroConfig(0), offload=OffloadConfig())
                made = short_plan(plain, microbatches, False, self._free_tables)
                # In a longer step fewer copies go both ways at the same time.
                machine = replace(self.hardware, link_both=1.0)
            else:
                made, machine = self._plan(microbatches), self.hardware
            walked = step(made.analysis, made.cost(machine, free), machine)
            self._times[key] = walked.total_s
            if free == _FREE and microbatches == self._filling:
                self._last = [*_last_backwards(made.analysis, walked.walk)]
        return self._times[key]

    def least_s(self, microbatch_s: float) -> float:
        """No step is shorter, where no more micro-batch takes less than `microbatch_s`. It takes one plan."""
        return self._timed(self._filling, _FREE) + (self.m - self._filling) * microbatch_s

    def reduced_s(self, reductions: Sequence[tuple[float, float]]) -> float:
        """How much longer than a free step one is, at least, that reduces gradients at its end. `reductions`:
        of each stage, as Bounds.reductions: they begin with the last backward, one behind the other."""
        free_s, longest = self._timed(self._filling, _FREE), 0.0
        for ends in self._last:
            sent = 0.0
            for begin, end, stage in sorted(ends):
                all_s, least_s = reductions[stage]
                sent = max(max(sent, begin) + all_s, end + least_s)
            longest = max(longest, sent)
        return max(0.0, longest - free_s)

    def _pace_s(self, free: tuple[Op, ...], early: bool = False) -> float:
        """Seconds of one more micro-batch. `early`: from shorter plans, which may have no steady state yet:
        maybe less."""
        if self._steady == self.m:
            return 0.0
        less, more = (self._filling, self._steady) if early else (self._steady, self._steady + 2 * self.p)
        return (self._timed(more, free) - self._timed(less, free)) / (more - less)

    def free_step(self, early: bool = False) -> FreeStep:
        """`early`: maybe less; it takes shorter plans."""
        microbatch_s = self._pace_s(_FREE, early)
        step_s = self._timed(self._steady, _FREE) + (self.m - self._steady) * microbatch_s
        return FreeStep(step_s, microbatch_s, self._timed(self._filling, _FREE))

    def step_s(self, alike: ShortPlans | None = None, limit: float = math.inf,
               microbatch_s: float = 0.0, ends_s: float = 0.0) -> float:
        """Seconds of a step; where it is above `limit`, maybe less, but above it. `alike`: of a layout that
        computes the same. Lower bounds: `microbatch_s` of one more micro-batch, `ends_s` of the step's start
        and end, in which nothing is computed.

        Where there is traffic over dp only at the start and the end of a step, it adds as much to a step of
        few micro-batches. Else two plans say what one more takes. Orders that end with backwards of many
        micro-batches hide traffic behind these: longer plans are made until there is little to hide."""
        often, hides = sends_often(self.config.zero), self.config.parallel.schedule in FORWARDS_FIRST
        free = (alike := alike or self).free_step(early=True)
        if free.step_s + ends_s > limit:
            return free.step_s + ends_s
        if not (often or hides):
            added = self._timed(self._filling) - free.filling_s
            return free.step_s + added if free.step_s + added > limit else alike.free_step().step_s + added
        if not hides and limit < math.inf:
            # Of micro-batches that are less than a period of reductions, none may be reduced.
            every, left = self.config.zero.reduce_every, self.m - self._filling
            whole = left - left % every if isinstance(every, int) else left
            least_s = self._timed(self._filling) + max(left * free.microbatch_s, whole * microbatch_s)
            if least_s > limit:
                return least_s
            least_s = self._timed(self._steady) + (self.m - self._steady) * self._pace_s((), early=True)
            if least_s > limit:
                return least_s
        free = alike.free_step()
        while True:
            less, left = self._timed(self._steady), self.m - self._steady
            per = self._pace_s(()) if often else max(microbatch_s, free.microbatch_s)
            if not left or (not hides and less + left * per > limit):
                return less + left * per
            if per > _STEADY * free.microbatch_s and not (
                    hides and less + left * per - free.step_s > (1 - _STEADY) * free.step_s):
                return less + left * per
            self._steady = min(self.m, self._steady + self.p * -(-self._steady // self.p))

    def would_take_s(self, times: int = 1, hardware: Hardware | None = None, free: tuple[Op, ...] = (),
                     change: Callable[[Table], Table] | None = None) -> float:
        """About how many seconds so many times the micro-batches would take, with the same instructions at
        other prices: those of a machine, those of a table that is changed, none of these ops."""
        def seconds(microbatches: int) -> float:
            if hardware is None and change is None:
                return self._timed(microbatches, free)
            machine, made = hardware or self.hardware, self._plan(microbatches)
            return step(made.analysis, made.cost(machine, free, change or (lambda table: table)),
                        machine).total_s

        return self._whole(seconds, times)

    def _whole(self, value: Callable[[int], float], times: int = 1) -> float:
        """What grows with each micro-batch, of all of them. `value`: of so many."""
        m = times * self.m
        if self._filling == self._steady:
            return value(m)
        less = value(self._steady)
        return less if m == self._steady else less + (m - self._steady) * (less - value(self._filling)) / (
            self._steady - self._filling)

    def parts(self) -> StepParts:
        """What a step is made of."""
        fast = replace(self.hardware, node_gbps=1e12, adapter_gbps=1e12, node_us=0.0, adapter_us=0.0)

        def takes(ops: Collection[Op], machine: Hardware, *free: Op) -> list[float]:
            """By position."""
            @cache
            def seconds(count: int) -> list[float]:
                made = self._plan(count)
                price = made.cost(machine, (Op.EXCHANGE, *free))  # which units wait for
                return [sum(price(position, item) for item in program if item.op in ops)
                        for position, program in enumerate(made.analysis.plan.programs["train"])]

            def at(count: int, position: int) -> float:
                return seconds(count)[position]

            return [self._whole(partial(at, position=position)) for position in range(self.p)]

        def longer(ops: tuple[Op, ...]) -> float:
            return max(0.0, step_s - self.would_take_s(free=ops))

        step_s = self.would_take_s()
        rows, steps = takes(COMPUTE, self.hardware), takes((Op.STEP,), self.hardware)
        most = max(range(self.p), key=rows.__getitem__)
        parallel, offload = self.config.parallel, self.config.offload
        busy = sum(rows) + sum(steps) * (offload.optimizer == "none")
        once = takes(COMPUTE, self.hardware, Op.RECOMPUTE)
        return StepParts(step_s, rows[most] - once[most],
                         rows[most] - takes(COMPUTE, fast)[most] if parallel.tp > 1 else 0.0,
                         longer(_OVER_DP) if self.config.dp > 1 else 0.0, longer((Op.EXCHANGE,)),
                         longer((Op.OFFLOAD, Op.FETCH)) if offload != OffloadConfig() else 0.0,
                         max(0.0, 1 - busy / self.p / step_s))


_OVER_DP = (Op.GATHER, Op.REDUCE)  # of parameters and their gradients
_FREE = (*_OVER_DP, Op.OFFLOAD, Op.FETCH, Op.CLIP, Op.STEP)
_KEPT = ("kept", "kpart")  # inputs that are kept for RECOMPUTE: with it their moves are free


def _counts_as(item: Instruction) -> Op | None:
    """The op with which an instruction is free. None for parts of messages, and for what travels over tp."""
    if item.kind in _KEPT:
        return Op.RECOMPUTE
    if not item.of_slot:
        return item.op
    # What units hand on travels in every micro-batch, and computation waits for it, by whatever op.
    return Op.EXCHANGE if item.group and GROUPS[item.group].lane != "compute" else None


def _last_backwards(made: Analysis, walk: Walk) -> Iterator[list[tuple[float, float, int]]]:
    """By position: when the last backward of each stage begins and ends, and the stage."""
    for program, begins, ends in zip(made.plan.programs["train"], walk.start, walk.end, strict=True):
        last = {item.unit: index for index, item in enumerate(program)
                if item.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)}
        of_stage: dict[int, list[int]] = {}
        for unit, index in last.items():
            of_stage.setdefault(made.table.units[unit].stage, []).append(index)
        yield [(min(begins[index] for index in indices), max(ends[index] for index in indices), stage)
               for stage, indices in of_stage.items()]

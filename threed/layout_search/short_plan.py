"""Short plans: a layout's step, timed by real plans of few micro-batches in which alike units are one.

    all micro-batches  =  those of a short plan  +  what one more takes x those that are left out

The plans are made by the planner's own passes, and priced and walked as by `threed predict`.

* Micro-batches: a schedule is periodic. After it is filled, p more micro-batches take as long as the p
  before; or 2p, where positions wait for messages in turn. A short plan has a steady state, and as many
  micro-batches modulo p as the real one.
* Units: pairs of units of a stage that are alike become one that costs as much. The first and the last stay
  alone: what the step's start and end wait for is as large as in the real plan. With traffic over dp in every
  micro-batch all do.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

from threed.base.mesh import GROUPS
from threed.layout_search.layout import sends_often
from threed.planner.auto import check_limit, make_pipeline, marked_table
from threed.planner.passes import run_passes
from threed.prediction.analytic import cost
from threed.prediction.contention import PredictedStep, step
from threed.prediction.hardware import Hardware
from threed.program.analysis import Analysis
from threed.program.entries import ComputeUnit, ParameterUnit, Trip
from threed.program.instruction import COLLECTIVES, COMPUTE, Instruction, Op
from threed.program.plan import Plan
from threed.program.table import Table
from threed.program.walk import Cost, Walk
from threed.schedules.orders import SCHEDULES
from threed.schema import Config, OffloadConfig, ZeroConfig
from threed.spec.kernels import Kernel, Moved

FORWARDS_FIRST = ("gpipe", "breadth-first")  # orders with the forwards of all micro-batches before backwards
_STEADY = 0.99  # of the pace: a steady state is not faster


def steady_count(name: str, p: int, m: int) -> int:
    """m, or where m is large a small number with a steady state that is congruent to it modulo p."""
    fewest = SCHEDULES[name].least(p) + 2 * p + 2
    return m if m <= fewest + p else fewest + (m - fewest) % p


def filling_count(name: str, p: int, m: int) -> int:
    """The fewest that fill the pipeline, congruent to m modulo p."""
    fewest = SCHEDULES[name].least(p) + p
    return m if m <= fewest else fewest + (m - fewest) % p


def short_plan(config: Config, microbatches: int, ends: bool = True) -> Analysis:
    """The unchecked plan of so many micro-batches of a config. `ends`: as in `merged`. InputError where it
    keeps more than the config allows."""
    config = copy.deepcopy(config)
    train = config.train
    train.global_batch_size = microbatches * train.micro_batch_size * config.dp
    train.eval_every = train.sample_every = config.checkpoint.every = config.run.verify_every = 0
    pipeline = make_pipeline(config)
    analysis = Analysis(run_passes(config, pipeline, merged(marked_table(config, pipeline), ends)))
    check_limit(config, pipeline, analysis)
    return analysis


def merged(table: Table, ends: bool = True) -> Table:
    """A table with fewer units, which cost the same. `ends`: whether the first and the last of a run of
    units that are alike stay alone, and pairs of the others become one; else all of them do."""
    if table.activation.offload or table.activation.partition or (ends and _often(table)):
        return table  # what is kept moves unit by unit; or the size of each unit counts
    kinds = [_kind(table, index) for index in range(len(table.units))]
    runs = [[*run] for _, run in groupby(range(len(table.units)), key=kinds.__getitem__)]
    units = [chunk for run in runs for chunk in (_pairs(run) if ends else _whole(table, run))]
    # Parameter units that become one have the number of the first of them; numbers keep their order.
    same = {rows[0]: rows for chunk in units
            for rows in zip(*(table.units[unit].parameters for unit in chunk), strict=True)}
    unit_of, number = ({first: at for at, first in enumerate(firsts)}
                       for firsts in ((chunk[0] for chunk in units), sorted(same)))
    return replace(table, units=tuple(_sum_of(table, chunk, number, unit_of) for chunk in units),
                   parameters={number[first]: _all_of(table, same[first]) for first in sorted(same)})


def _often(table: Table) -> bool:
    """Whether there is traffic over dp in every micro-batch."""
    zero = table.zero
    return (zero.stage == 3 and zero.residency != "step") or (
        zero.stage >= 2 and zero.reduce_every < table.num_microbatches)


def _pairs(run: list[int]) -> list[list[int]]:
    """The first, pairs of those between, and the last."""
    if len(run) < 4:
        return [[unit] for unit in run]
    middle = run[1:-1]
    return [run[:1], *(middle[at:at + 2] for at in range(0, len(middle), 2)), run[-1:]]


def _whole(table: Table, run: list[int]) -> list[list[int]]:
    """All. But where they are computed again, the last one is before its gradient comes, the others after."""
    return [run[:-1], run[-1:]] if table.units[run[0]].recompute and len(run) > 1 else [run]


def _kind(table: Table, index: int) -> object:
    """Equal for units that may become one."""
    unit = table.units[index]
    held = [table.parameters[p] for p in unit.parameters]
    if unit.makes or unit.reads or unit.loss or index == 0 or any(len(each.positions) > 1 for each in held):
        return index
    return (unit.stage, _unnamed(unit.kernels), unit.saved_bytes, unit.operand_bytes,
            repr((unit.traffic, unit.rings)), unit.recompute, unit.adds, unit.output, _unnamed(unit.again),
            tuple(replace(each, name="", padding=0) for each in held))


def _unnamed(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    return tuple([kernel._replace(what="") if isinstance(kernel, Moved) else kernel for kernel in kernels])


def _all_of(table: Table, same: Sequence[int]) -> ParameterUnit:
    first, count = table.parameters[same[0]], len(same)
    return replace(first, numel=count * first.numel, padding=count * first.padding, reductions=tuple(
        step._replace(numel=count * step.numel) for step in first.reductions)) if count > 1 else first


def _sum_of(table: Table, chunk: Sequence[int], number: dict[int, int],
            unit_of: dict[int, int]) -> ComputeUnit:
    first, count = table.units[chunk[0]], len(chunk)
    traffic, rings = ({phase: {axis: count * each for axis, each in sent.items()}
                       for phase, sent in of.items()} for of in (first.traffic, first.rings))

    def counts(trip: Trip) -> Trip:
        return trip._replace(counts=tuple((name, unit_of[chunk[0]] - unit_of[chunk[0] - before])
                                          for name, before in trip.counts))

    makes = tuple(each if each.trip is None else each._replace(trip=counts(each.trip))
                  for each in first.makes)
    return replace(first, makes=makes, parameters=tuple(number[p] for p in first.parameters), traffic=traffic,
                   rings=rings,
                   kernels=count * _unnamed(first.kernels), again=count * _unnamed(first.again),
                   saved_bytes=count * first.saved_bytes, operand_bytes=count * first.operand_bytes,
                   reads=tuple(read._replace(unit=unit_of[read.unit]) for read in first.reads))


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
        self._plans: dict[int, Analysis] = {}
        # (micro-batches, what is free) -> seconds of a step
        self._times: dict[tuple[int, tuple[Op, ...]], float] = {}

    def _plan(self, microbatches: int) -> Analysis:
        if microbatches not in self._plans:
            self._plans[microbatches] = short_plan(self.config, microbatches)
        return self._plans[microbatches]

    def _timed(self, microbatches: int, free: tuple[Op, ...] = ()) -> float:
        """Seconds of a step. Where all of _FREE is `free`, nothing waits for single units."""
        key = microbatches, free
        if key not in self._times:
            if free == _FREE:
                plain = replace(self.config, zero=ZeroConfig(0), offload=OffloadConfig())
                made = short_plan(plain, microbatches, ends=False)
            else:
                made = self._plan(microbatches)
            walked = _walked(made, self.hardware, free)
            self._times[key] = walked.total_s
            if free == _FREE and microbatches == self._filling:
                self._last = [*_last_backwards(made, walked.walk)]
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
            per = max(microbatch_s, free.microbatch_s)
            least_s = self._timed(self._filling) + (self.m - self._filling) * per
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
            return _walked(self._plan(microbatches), hardware or self.hardware, free, change).total_s

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

        def spent(ops: Collection[Op], machine: Hardware) -> list[float]:
            def seconds(count: int, position: int) -> float:
                plan = self._plan(count).plan
                return _spent(plan, cost(plan, machine), ops, position)

            return [self._whole(partial(seconds, position=position)) for position in range(self.p)]

        def longer(ops: tuple[Op, ...]) -> float:
            return max(0.0, step_s - self.would_take_s(free=ops))

        step_s = self.would_take_s()
        rows, steps = spent(COMPUTE, self.hardware), spent((Op.STEP,), self.hardware)
        most = max(range(self.p), key=rows.__getitem__)
        parallel, offload = self.config.parallel, self.config.offload
        busy = sum(rows) + sum(steps) * (offload.optimizer == "none")
        return StepParts(step_s, spent((Op.RECOMPUTE,), self.hardware)[most],
                         rows[most] - spent(COMPUTE, fast)[most] if parallel.tp > 1 else 0.0,
                         longer(COLLECTIVES) if self.config.dp > 1 else 0.0,
                         longer((Op.OFFLOAD, Op.FETCH)) if offload != OffloadConfig() else 0.0,
                         max(0.0, 1 - busy / self.p / step_s))


_FREE = (*COLLECTIVES, Op.OFFLOAD, Op.FETCH, Op.CLIP, Op.STEP)
_KEPT = ("kept", "kpart")  # inputs that are kept for RECOMPUTE: with it their moves are free


def _walked(made: Analysis, hardware: Hardware, free: Collection[Op],
            change: Callable[[Table], Table] | None = None) -> PredictedStep:
    """A step, if ops are free, at the prices of a table that is changed."""
    price = cost(made.plan if change is None else replace(made.plan, table=change(made.table)), hardware)

    def seconds(position: int, item: Instruction) -> float:
        # Parts of messages, and what travels over tp, are no traffic over dp.
        if item.of_slot and item.kind not in _KEPT and (
                not item.group or GROUPS[item.group].lane == "compute"):
            return price(position, item)
        return 0.0 if (Op.RECOMPUTE if item.kind in _KEPT else item.op) in free else price(position, item)

    return step(made, seconds, hardware)


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


def _spent(plan: Plan, price: Cost, ops: Collection[Op], position: int) -> float:
    """Seconds of a position's instructions of these ops."""
    return sum(price(position, item) for item in plan.programs["train"][position] if item.op in ops)

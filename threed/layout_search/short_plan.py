"""Short plans: a layout's step and its memory, by real plans of few micro-batches.

    all micro-batches  =  those of a short plan  +  what one more takes x those that are left out

The plans are made by the planner's own passes, and priced, walked and measured as by `threed predict`. A
schedule is periodic: after it is filled, p more micro-batches take as long as the p before; or 2p, where
positions wait for messages in turn. A short plan has a steady state, and as many micro-batches modulo p as
the real one. What is alive at a time has its most in a steady state, too; only orders with all forwards first
keep more with each micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache, cached_property, partial
from operator import add
from typing import NamedTuple

from threed.base.mesh import GROUPS
from threed.layout_search.layout import copied, sends_often
from threed.planner.auto import check_limit, make_pipeline, marked_table
from threed.planner.passes import run_passes
from threed.prediction import host
from threed.prediction.analytic import cost
from threed.prediction.contention import step
from threed.prediction.hardware import Hardware
from threed.prediction.peak import peaks
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Instruction, Op, SlotKind
from threed.program.summary import fixed_bytes, stages
from threed.program.table import Table
from threed.program.walk import Cost
from threed.schedules.orders import SCHEDULES
from threed.schema import Config, OffloadConfig

FORWARDS_FIRST = ("gpipe", "breadth-first")  # orders with the forwards of all micro-batches before backwards
_STEADY = 0.99  # of the pace with free traffic: a steady state is not faster
_FILLING = 0.999  # of what one more micro-batch takes while the pipeline fills: later it takes no less


def as_priced(config: Config, hardware: Hardware) -> Config:
    """A config with what prices have on a machine: on a CPU nothing is compiled for model.fused=auto."""
    if hardware.waits and config.model.fused == "auto":
        return replace(config, model=replace(config.model, fused="off"))
    return config


def steady_count(name: str, p: int, m: int) -> int:
    """m, or where m is large a small number with a steady state that is congruent to it modulo p."""
    fewest = SCHEDULES[name].least(p) + 2 * p + 2
    return m if m <= fewest + p else fewest + (m - fewest) % p


def filling_count(name: str, p: int, m: int) -> int:
    """The fewest that fill the pipeline, congruent to m modulo p."""
    fewest = SCHEDULES[name].least(p) + p
    return m if m <= fewest else fewest + (m - fewest) % p


def short_plan(config: Config, microbatches: int) -> Analysis:
    """The unchecked plan of so many micro-batches of a config, of whose programs only the step counts.
    InputError where it keeps more than the config allows."""
    short = copied(config)
    train = short.train
    train.global_batch_size = microbatches * train.micro_batch_size * short.dp
    train.eval_every = train.sample_every = short.checkpoint.every = short.run.verify_every = 0
    pipeline = make_pipeline(short)
    analysis = Analysis(run_passes(short, pipeline, marked_table(short, pipeline)))
    check_limit(short, pipeline, analysis)
    return analysis


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
        self.hardware, config = hardware, as_priced(config, hardware)
        self.config, self.p, self.m = config, config.parallel.pp, config.num_microbatches
        # A limit of what is kept is about all micro-batches.
        whole = config.activation.policy == "budget" or config.parallel.activation_limit is not None
        about = config.parallel.schedule, self.p, self.m
        more = self.p if config.parallel.pair else 0  # pairs run as many forwards ahead
        self._steady, self._filling = (self.m, self.m) if whole else (
            min(self.m, steady_count(*about) + more), min(self.m, filling_count(*about) + more))
        self._plans: dict[int, Analysis] = {}
        # (micro-batches, what is free) -> seconds of a step
        self._times: dict[tuple[int, tuple[Op, ...]], float] = {}

    @property
    def _hides(self) -> bool:
        return self.config.parallel.schedule in FORWARDS_FIRST

    def _plan(self, microbatches: int) -> Analysis:
        if microbatches not in self._plans:
            self._plans[microbatches] = short_plan(self.config, microbatches)
        return self._plans[microbatches]

    # ------------------------------------------------------------ memory

    def peak_bytes(self) -> int:
        """Peak memory of the position that needs most, with temporaries."""
        return max(map(add, self._fixed_bytes(self._steady), self._most(self._working, self._steady)))

    def fixed_bytes(self) -> list[int]:
        """By position: bytes of what is there all the time, at least. It takes one plan."""
        return self._fixed_bytes(self._filling)

    @cached_property
    def working_bytes(self) -> list[int]:
        """By position: bytes of activations, temporaries, CUDA and communicators at their most, at least."""
        return self._most(self._working, self._filling)

    def _fixed_bytes(self, microbatches: int) -> list[int]:
        analysis = self._plan(microbatches)
        return [fixed_bytes(analysis, position) for position in range(self.p)]

    def _working(self, microbatches: int) -> list[int]:
        return [row.total - row.fixed_bytes for row in peaks(self._plan(microbatches), self.hardware)]

    def _most(self, rows: Callable[[int], list[int]], microbatches: int) -> list[int]:
        """What so many micro-batches take, by position; or all, where each adds to it."""
        if not self._hides or self._steady == self.m:
            return rows(microbatches)
        each, left = self._steady - self._filling, self.m - self._steady
        return [more + (more - less) * left // each
                for more, less in zip(rows(self._steady), rows(self._filling), strict=True)]

    def host_fits(self) -> bool:
        """Whether what is off the device fits into the memory of the ranks' host."""
        if self.config.offload == OffloadConfig():
            return True
        rows = stages(self._plan(self._steady))
        return host.fits(host.use_of(self.config, self.hardware, rows), self.hardware)

    # ------------------------------------------------------------ time

    def _timed(self, microbatches: int, free: tuple[Op, ...] = ()) -> float:
        """Seconds of a step."""
        key = microbatches, free
        if key not in self._times:
            self._times[key] = self._walked(microbatches, self.hardware, free)
        return self._times[key]

    def _walked(self, microbatches: int, machine: Hardware, free: tuple[Op, ...] = (),
                change: Callable[[Table], Table] | None = None) -> float:
        analysis = self._plan(microbatches)
        return step(analysis, priced(analysis, machine, free, change), machine).total_s

    def _pace_s(self, free: tuple[Op, ...] = ()) -> float:
        """Seconds that one more micro-batch adds in the steady state; 0 if the short plan has all of them.
        `free`: ops that take no time."""
        if self._steady == self.m:
            return 0.0
        more = self._steady + 2 * self.p
        return (self._timed(more, free) - self._timed(self._steady, free)) / (more - self._steady)

    def free_s(self) -> float:
        """Of a step with free traffic over dp and free updates: no step that computes the same is shorter."""
        return self._timed(self._steady, _FREE) + (self.m - self._steady) * self._pace_s(_FREE)

    def least_s(self, microbatch_s: float, limit: float = math.inf) -> float:
        """No step that computes the same is shorter, where none of its micro-batches takes less than
        `microbatch_s`. It takes one plan; a second one where it is not above `limit` by the first."""
        filled, left = self._timed(self._filling, _FREE), self.m - self._filling
        least = filled + left * microbatch_s
        more = self._steady - self._filling
        # (Where positions wait for messages in turn, only an even number takes as long as the next ones.)
        if least > limit or self._hides or not more or (self.p > 1 and more % 2):
            return least
        # While the pipeline fills, one more micro-batch takes less than later.
        per = (self._timed(self._steady, _FREE) - filled) / more
        return max(least, filled + left * _FILLING * per)

    def step_s(self, alike: ShortPlans | None = None, limit: float = math.inf,
               microbatch_s: float = 0.0) -> float:
        """Seconds of a step; where it is above `limit`, maybe less, but above it. `alike`: of a layout that
        computes the same. `microbatch_s`: no micro-batch takes less.

        Where there is traffic over dp only at the start and the end of a step, it adds as much to a step of
        few micro-batches. Else two plans say what one more takes. Orders that end with backwards of many
        micro-batches hide traffic behind these: longer plans are made until there is little to hide."""
        alike = alike or self
        # (What one position gathers and reduces may take longer than few micro-batches that it is hidden by.)
        if not self._hides and self.p > 1:
            filled, left = self._timed(self._filling), self.m - self._filling
            first = filled + left * microbatch_s
            if first > limit or not left:
                return first
            # Each further micro-batch adds what it adds where traffic is free, or more.
            first = alike.free_s() + filled - alike._timed(self._filling, _FREE)
            if first > limit or not sends_often(self.config.zero):
                return first
        while True:
            less, left = self._timed(self._steady), self.m - self._steady
            free = alike._pace_s(_FREE)
            per = self._pace_s() if sends_often(self.config.zero) else free
            step_s = less + left * per
            behind = self._hides and step_s - alike.free_s() > (1 - _STEADY) * alike.free_s()
            if not left or (per > _STEADY * free and not behind):
                return step_s
            self._steady = min(self.m, self._steady + self.p * -(-self._steady // self.p))

    def would_take_s(self, times: int = 1, hardware: Hardware | None = None, free: tuple[Op, ...] = (),
                     change: Callable[[Table], Table] | None = None) -> float:
        """Seconds of a step with `times` as many micro-batches, extrapolated from short plans. The
        instructions are the same, and their costs may differ. `hardware`: another machine to price them for;
        `free`: ops that take no time; `change`: returns the table from which to price them."""
        def seconds(microbatches: int) -> float:
            if hardware is None and change is None:
                return self._timed(microbatches, free)
            return self._walked(microbatches, hardware or self.hardware, free, change)

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
            """Seconds that each position spends on `ops` in a step. `free`: ops that take no time."""
            @cache
            def seconds(count: int) -> list[float]:
                analysis = self._plan(count)
                price = priced(analysis, machine, free)
                return [sum(price(position, item) for item in program if item.op in ops)
                        for position, program in enumerate(analysis.plan.programs["train"])]

            def at(count: int, position: int) -> float:
                return seconds(count)[position]

            return [self._whole(partial(at, position=position)) for position in range(self.p)]

        def longer(ops: tuple[Op, ...]) -> float:
            return max(0.0, step_s - self.would_take_s(free=ops))

        step_s = self.would_take_s()
        rows, steps = takes(COMPUTE, self.hardware), takes((Op.STEP,), self.hardware)
        most = max(range(self.p), key=rows.__getitem__)
        inside, offload = max(self.config.parallel.tp, self.config.parallel.cp) > 1, self.config.offload
        busy = sum(rows) + sum(steps) * (offload.optimizer == "none")
        once = takes(COMPUTE, self.hardware, Op.RECOMPUTE)
        return StepParts(step_s, rows[most] - once[most],
                         rows[most] - takes(COMPUTE, fast)[most] if inside else 0.0,
                         longer(_OVER_DP) if self.config.data_ranks > 1 else 0.0, longer((Op.EXCHANGE,)),
                         longer((Op.OFFLOAD, Op.FETCH)) if offload != OffloadConfig() else 0.0,
                         max(0.0, 1 - busy / self.p / step_s))


def priced(analysis: Analysis, hardware: Hardware, free: Collection[Op] = (),
           change: Callable[[Table], Table] | None = None) -> Cost:
    """Seconds of an instruction. `free`: what takes none. `change`: what makes a table of other prices."""
    plan = analysis.plan
    price = cost(replace(plan, table=change(plan.table)) if change else plan, hardware)
    return lambda position, item: 0.0 if counts_as(item) in free else price(position, item)


_OVER_DP = (Op.GATHER, Op.REDUCE)  # of parameters and their gradients
_FREE = (*_OVER_DP, Op.OFFLOAD, Op.FETCH, Op.CLIP, Op.STEP)
_INPUTS = (SlotKind.KEPT, SlotKind.KEPT_PART)  # of RECOMPUTE: with it their moves are free


def counts_as(item: Instruction) -> Op | None:
    """The op with which an instruction is free. None for parts of messages, and for what travels over tp."""
    if item.kind in _INPUTS:
        return Op.RECOMPUTE
    if not item.of_slot:  # whole matrices go to their owners in an update
        return Op.STEP if item.op == Op.EXCHANGE else item.op
    # What units hand on travels in every micro-batch, and computation waits for it, by whatever op.
    return Op.EXCHANGE if item.group and GROUPS[item.group].lane != "compute" else None

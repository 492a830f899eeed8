"""Bounds: a step that none is shorter than, without a plan.

Prices of compute units are summed, as the plan has them, with the exchanges for which they wait. Nothing
communicates between positions; over dp goes what each micro-batch sends, and what a step's start and end wait
for; to the host, what each micro-batch reduces. No step is shorter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from threed.base.mesh import GROUPS
from threed.features.zero.plan import window
from threed.layout_search.layout import Layout, config_of
from threed.layout_search.short_plan import filling_count, steady_count
from threed.layout_search.units import MicroBatchCut, Units
from threed.prediction.analytic import cost
from threed.prediction.hardware import Hardware
from threed.program.instruction import Instruction, Op
from threed.program.plan import Plan
from threed.schedules.orders import SCHEDULES
from threed.schema import Config


class PartSeconds(NamedTuple):
    """What a layout does to a parameter unit, or to those of a compute unit: seconds."""

    windowed: float = 0.0  # to gather it each time that it comes into the window of residency
    gather: float = 0.0  # to gather it at all
    often: float = 0.0  # to reduce its gradient in a micro-batch
    lower: float = 0.0  # to take the reduced part to the host
    reduce: float = 0.0  # at the end of a step
    step: float = 0.0  # the optimizer's step; 0 where something else may run meanwhile


class Bounds:
    """Of layouts of one config on one kind of machine. It remembers their parts."""

    def __init__(self, config: Config, hardware: Hardware):
        self.config, self.hardware = config, hardware
        self._units: dict[object, Units] = {}
        self._bounds: dict[object, tuple[list[float], float, float]] = {}
        self._stage_times: dict[object, list[tuple[float, ...]]] = {}
        self._known: dict[object, tuple[list[PartSeconds], PartSeconds]] = {}

    def microbatches(self, layout: Layout) -> int:
        return self.config.train.global_batch_size // (layout.micro_batch_size * layout.dp)

    def units(self, tiles: str | None = None, tp: int = 1) -> Units:
        """The units of the model. Without tiles they are the same for each tp."""
        key = (tiles, 1 if tiles is None else tp)
        if key not in self._units:
            self._units[key] = Units(self.config, self.hardware, *key)
        return self._units[key]

    def cut(self, layout: Layout) -> MicroBatchCut:
        order = layout.axis_order
        near = order.endswith("tp") and (layout.ep <= layout.tp or order == "pp-dp-tp")
        mesh = None if near or layout.tp == layout.ep == 1 else (order, layout.pp, layout.dp)
        return MicroBatchCut(layout.tp, layout.sequence_parallel, layout.micro_batch_size, layout.policy,
                             layout.every, layout.tile_linears, layout.ep, mesh)

    def step_s(self, layout: Layout) -> float:
        """No step is shorter: all micro-batches of the busiest position; or, without messages, the last
        position waits for the first forward of those before it, computes all of its micro-batches, and they
        do its last backward. (Halves of backwards for weights' gradients may run meanwhile. The unit of the
        loss, which may not be computed again, counts once.)"""
        m = self.microbatches(layout)
        busy, before, weights = self._busy(layout)
        return max(m * (busy[-1] - weights) + before, self._most_s(layout, m, True))

    def microbatch_s(self, layout: Layout) -> float:
        """No micro-batch of a steady state takes less: what a position sends over dp; or what it computes,
        which takes longer meanwhile."""
        return self._most_s(layout, 1, False)

    def _most_s(self, layout: Layout, m: int, ends: bool) -> float:
        """Of so many micro-batches, at the position where it is most. `ends`: with a step's start and end."""
        busy, loss = self._busy(layout)[0], self.hardware.contention
        if not layout.often:
            return m * max(busy)
        most_s = max(max(sends_s, m * computes_s + loss * sends_s) for computes_s, sends_s in zip(
            busy, (m * each_s + ends * more_s for each_s, more_s in self._sent(layout)), strict=True))
        return max(most_s, m * max(self._lowered(layout)))

    def _lowered(self, layout: Layout) -> list[float]:
        """Seconds by position in which each micro-batch takes reduced gradients to the host."""
        kinds, same = self._prices(layout)[0], self.units(layout.tile_linears, layout.tp).same
        rows = [0.0] * layout.pp
        for position, (first, stop) in self._stages(layout):
            rows[position] += sum(kinds[kind].lower for kind in same[first:stop])
        return rows

    def _sent(self, layout: Layout) -> list[tuple[float, float]]:
        """Seconds by position for which each micro-batch sends over dp, to reduce gradients, if they are
        reduced each time, and to gather what is not resident; and a step's start and end besides."""
        (kinds, tied), same = self._prices(layout), self.units(layout.tile_linears, layout.tp).same
        stages, last = self._stages(layout), len(same) - 1
        sent = [[0.0, 0.0] for _ in range(layout.pp)]
        for position, (first, stop) in stages:
            sent[position][0] += sum(kinds[kind].often for kind in same[first:stop])
        for position in {stages[0][0], stages[-1][0]}:
            sent[position][0] += tied.often
        if layout.stage == 3 and layout.residency != "step":
            cut = tuple([(unit,) * (kinds[kind].windowed > 0)
                         + (TIED,) * (tied.windowed > 0 and unit in (0, last))
                         for unit, kind in enumerate(same)])
            for row, times in zip(sent, gathers(
                    layout.schedule, layout.pp, self.microbatches(layout), layout.virtual_stages,
                    layout.residency, tuple(stages), cut), strict=True):
                for at, counts in enumerate(times):
                    row[at] += sum(count * (tied if unit == TIED else kinds[same[unit]]).windowed
                                   for unit, count in counts.items())
        return [(each_s, more_s) for each_s, more_s in sent]

    def _stages(self, layout: Layout) -> list[tuple[int, tuple[int, int]]]:
        """Position, first unit and one past the last of each stage."""
        split = self.units(layout.tile_linears, layout.tp).split(layout.pp * layout.virtual_stages)
        assert split is not None, layout
        return [*zip(place_of(layout.schedule, layout.pp, layout.virtual_stages), split, strict=True)]

    def ends_s(self, layout: Layout) -> float:
        """Seconds of a step in which nothing is computed: all waits for the first forward of the first stage,
        and that for its parameters; and behind CLIP, which waits for all gradients, a position steps its own.
        """
        kinds, model = self._prices(layout)[0], self.units(layout.tile_linears, layout.tp)
        stages, steps = self._stages(layout), [0.0] * layout.pp
        for position, (first, stop) in stages:
            steps[position] += sum(kinds[kind].step for kind in model.same[first:stop])
        stop = stages[0][1][1]
        gathered = [kinds[kind].gather for kind in model.same[:stop]]
        computed = sum(unit.forward_s + unit.forward_wait_s
                       for unit in model.of(self.cut(layout))[:stop - 1])
        return max(gathered[0], sum(gathered) - computed) + max(steps)

    def reductions(self, layout: Layout) -> list[tuple[float, float]]:
        """Seconds to reduce the gradients of each stage at a step's end: all, and the least of a unit."""
        kinds, same = self._prices(layout)[0], self.units(layout.tile_linears, layout.tp).same
        rows = ([kinds[kind].reduce for kind in same[first:stop]]
                for _, (first, stop) in self._stages(layout))
        return [(sum(row), min(row)) for row in rows]

    def _prices(self, layout: Layout) -> tuple[list[PartSeconds], PartSeconds]:
        """Of each kind of compute unit, and of a tied embedding."""
        key = (layout.tp, layout.dp, layout.pp * (layout.axis_order != "pp-dp-tp"),
               layout.sequence_parallel, layout.stage, layout.shard_size, layout.reduce_every,
               layout.reduce_dtype, layout.offload_optimizer, layout.tile_linears, layout.ep,
               layout.micro_batch_size * layout.offload_optimizer)
        if key not in self._known:
            config = config_of(layout, self.config)
            table = self.units(layout.tile_linears, layout.tp).table(config)
            rows, away = table.parameters, config.offload
            times = 0.0 if layout.stage < 2 or layout.reduce_every == "step" else 1 / config.reduce_every
            meanwhile = layout.offload_optimizer and (away.overlap != "none" or away.ratio < 1)
            lowers = {p: Instruction(Op.OFFLOAD, p, kind="gshard") for p, row in rows.items()
                      if times and row.trains and table.shards.streams(p) and away.ratio == 1}
            each = config.num_microbatches // config.reduce_every
            programs = {"train": [tuple(lowers.values()) * each]} if lowers else {}
            price = cost(Plan(table, programs, config), self.hardware)

            def seconds(p: int) -> PartSeconds:
                row, gather_s, sums = rows[p], 0.0, [0.0]
                if table.shards.is_cut(p):
                    gather_s = price(0, Instruction(Op.GATHER, p, group=row.shard_group))
                if row.trains:
                    sums = [price(0, Instruction(Op.REDUCE, p, group=step.group)) for step in row.reductions
                            if GROUPS[step.group].lane == GROUPS["dp"].lane]
                return PartSeconds(gather_s * (not row.whole), gather_s, times * sums[0],
                                   times * price(0, lowers[p]) if p in lowers else 0.0, sum(sums),
                                   price(0, Instruction(Op.STEP, p)) if row.trains and not meanwhile else 0.0)

            tied = [seconds(p) for p, row in rows.items() if row.name == "tied embedding"]
            self._known[key] = [PartSeconds(*map(sum, zip(PartSeconds(), *(
                seconds(p) for p in unit.parameters if rows[p].name != "tied embedding"), strict=True)))
                for unit in table.units], tied[0] if tied else PartSeconds()
        return self._known[key]

    def _busy(self, layout: Layout) -> tuple[list[float], float, float]:
        """Seconds of a micro-batch: by position; of a forward and a last backward before the last one; and
        of the last one's halves for weights' gradients."""
        p, v = layout.pp, layout.virtual_stages
        key = self.cut(layout), layout.schedule, p, v
        if key not in self._bounds:
            place, busy, before, last = place_of(layout.schedule, p, v), [0.0] * p, 0.0, 0.0
            halves = splits(layout.schedule)
            for stage, (forward, backward, weight, again) in enumerate(self._stage_seconds(layout, key[0])):
                busy[place[stage]] += forward + backward + again
                last += weight * halves * (place[stage] == p - 1)
                before += (forward + (backward - weight * halves)) * (stage < p - 1)
            self._bounds[key] = busy, before, last
        return self._bounds[key]

    def _stage_seconds(self, layout: Layout, cut: MicroBatchCut) -> list[tuple[float, ...]]:
        """Of each stage: forward, backward, its half for weights' gradients, and what is computed again."""
        key = cut, layout.pp * layout.virtual_stages
        if key not in self._stage_times:
            model = self.units(layout.tile_linears, layout.tp)
            units, split = model.of(cut), model.split(key[1])
            assert split is not None, layout
            units = [*units[:-1], units[-1]._replace(again=False)]
            self._stage_times[key] = [tuple(sum(column) for column in zip(*[
                (unit.forward_s + unit.forward_wait_s, unit.backward_s + unit.backward_wait_s, unit.weight_s,
                 unit.again_s * unit.again) for unit in units[first:stop]], strict=True))
                for first, stop in split]
        return self._stage_times[key]


# ---------------------------------------------------------------- of schedules


TIED = -1  # the parameter unit of a tied embedding
Gathered = Mapping[int, float]  # parameter unit -> how often it is gathered


@lru_cache(2048)
def gathers(name: str, p: int, m: int, v: int, residency: int | str | None,
            stages: tuple[tuple[int, tuple[int, int]], ...],
            cut: tuple[tuple[int, ...], ...]) -> list[tuple[Gathered, Gathered]]:
    """By position, what is gathered for a micro-batch of a steady state, and for a step's start and end
    besides: at three positions, since others are alike. `cut`: of each compute unit, what it has gathered.
    `stages`: as Bounds._stages."""
    def count(microbatches: int) -> list[Counter[int]]:
        result = [Counter[int]() for _ in range(p)]
        orders = SCHEDULES[name].make(p, microbatches, v)
        for position in {0, p // 2, p - 1}:
            tasks = orders[position]
            used = [cut[unit] for task in tasks if task.kind != "W"
                    for unit in range(*stages[task.stage][1])[::1 if task.kind == "F" else -1] if cut[unit]]
            before = defaultdict[int, list[int]](list)
            size = residency if isinstance(residency, int) else max(
                len({held for unit in range(*units) for held in cut[unit]})
                for where, units in stages if where == position)
            window([(use, [*held]) for use, held in enumerate(used)], size, 1, before, defaultdict(list))
            result[position].update(held for some in before.values() for held in some)
        return result

    less, more = filling_count(name, p, m), steady_count(name, p, m)
    if less == more:
        return [({}, counts) for counts in count(more)]
    rows = []
    for first, then in zip(count(less), count(more), strict=True):
        each = {held: (times - first[held]) / (more - less) for held, times in then.items()}
        rows.append((each, {held: first[held] - less * times for held, times in each.items()}))
    return rows


@lru_cache(512)
def place_of(name: str, p: int, v: int) -> tuple[int, ...]:
    return SCHEDULES[name].place(p, v)


@lru_cache(64)
def splits(name: str) -> bool:
    """Whether a schedule's last weights' gradients come from halves of backwards."""
    return SCHEDULES[name].make(2, 4, 2)[0][-1].kind == "W"

"""The fast evaluator: the step time and the memory of a layout, with stages in place of units.

    stages' times -> play (rhythm) -> + gathers at the start, + reductions at the end -> CLIP -> STEP

The full plan walks each instruction of each unit; this walks tasks of stages, few micro-batches of them. What
happens once a step (gathers before the first forward, reductions after the last backward) is walked unit by
unit. What happens in every micro-batch (ZeRO-2, ZeRO-3) makes stages longer, as in a steady state.

Neglected: how a stage that takes longer by traffic in one micro-batch moves its neighbours; messages that wait
for each other; temporaries, which `memory` estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from threed.choosing.layout import Layout
from threed.choosing.rhythm import KEEP_ALL, Beat, Times, at_once, beat, held, place_of
from threed.choosing.traffic import Toll, Tolls
from threed.choosing.units import Cut, Strides, Unit, Units
from threed.pipeline.orders import SCHEDULES
from threed.prediction.hardware import Hardware
from threed.schema import Config


class Estimate(NamedTuple):
    """A layout's step and memory, and the parts of the step that something could shorten."""

    step_s: float
    bytes: int  # of the fullest rank, with temporaries, CUDA and NCCL
    compute_s: float  # of the busiest position: kernels alone, with what is computed again
    again_s: float  # of that: computed again
    tp_s: float  # exposed collectives of that position
    dp_s: float  # exposed: gathers, reductions, what they take from computation
    offload_s: float  # exposed moves to other tiers and steps there
    bubble: float  # share of the step in which a position neither computes nor steps, on average


class Stage(NamedTuple):
    """A stage's units, and the tolls of their parameters (None: a unit without parameters of its own)."""

    units: Sequence[Unit]
    tolls: Sequence[Toll | None]


class Fast:
    """Evaluates layouts of one config on one kind of machine."""

    def __init__(self, config: Config, hardware: Hardware):
        self.config, self.hardware = config, hardware
        self._units: dict[str | None, Units] = {}
        self._beats: dict[object, Beat] = {}
        self.beats = 0  # plays that were not known

    def units(self, tiles: str | None) -> Units:
        if tiles not in self._units:
            config = self.config
            if tiles != config.model.tile_linears:
                from copy import deepcopy

                config = deepcopy(config)
                config.model.tile_linears = tiles
            self._units[tiles] = Units(config, self.hardware)
        return self._units[tiles]

    def microbatches(self, layout: Layout) -> int:
        return self.config.train.global_batch_size // (layout.micro_batch_size * layout.dp)

    def cut(self, layout: Layout) -> Cut:
        stride = Strides(layout.axis_order, {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}).strides["tp"]
        return Cut(layout.tp, stride if layout.tp > 1 else 1, layout.sequence_parallel,
                   layout.micro_batch_size, layout.policy, layout.every)

    def bound_s(self, layout: Layout) -> float:
        """No step is shorter: all positions compute all the time, and nothing is sent but over tp."""
        units = self.units(layout.tile_linears).of(self.cut(layout))
        return self.microbatches(layout) * sum(u.forward_s + u.backward_s for u in units) / layout.pp

    def priced(self, layout: Layout) -> Priced:
        return Priced(self, layout)


class Priced:
    """One layout."""

    def __init__(self, fast: Fast, layout: Layout):
        self.fast, self.layout, self.hardware = fast, layout, fast.hardware
        self.m, self.v = fast.microbatches(layout), layout.virtual_stages
        units = fast.units(layout.tile_linears)
        cut = fast.cut(layout)
        all_units = units.of(cut)
        self.place = place_of(layout.schedule, layout.pp, self.v)
        split = units.split(len(self.place))
        assert split is not None, layout
        if at_once(layout.schedule, layout.pp, self.m, self.v):
            all_units = [*all_units[:-1], all_units[-1]._replace(again=False)]
        self.tolls = Tolls(fast.config, fast.hardware, layout)
        parts = units.parts(layout.tp, layout.shard_size)
        ends = {self.place[0], self.place[-1]}
        self.tied = self.tolls.of(parts[-1], len(ends)) if -1 in parts else None
        self.stages = [Stage(all_units[first:stop],
                             [self.tolls.of(parts[u]) if u in parts else None for u in range(first, stop)])
                       for first, stop in split]
        self.act_bytes = units.act_bytes[cut]
        self.messages = self.tolls.messages(self.place, self.act_bytes)
        self.often = layout.stage >= 2 and layout.reduce_every != "step" and layout.dp > 1
        # ZeRO-3 whose units do not stay gathered: the residency, else None.
        window = layout.residency if layout.stage == 3 and layout.dp > 1 else "step"
        self.window = 1 if window is None else None if window in ("step", "stage") else int(window)

    # ---------------------------------------------------------------- time

    def estimate(self, size: int | None = None) -> Estimate:
        fast, layout = self.fast, self.layout
        times = self._times()
        key = layout.schedule, layout.pp, self.m, self.v, times
        if key not in fast._beats:
            fast._beats[key] = beat(layout.schedule, layout.pp, self.m, self.v, times)
        played = fast._beats[key]
        late = self._start(played)
        end, moves = self._end(played)
        total = played.total_s + late + end
        steps = [sum(toll.step_s for toll in self._held(position)) for position in range(layout.pp)]
        total += self.tolls.clip_s() + max(steps)
        up = 0.0
        if layout.offload_optimizer:
            up = max(toll.up_s for toll in self._held(0))
            total += up
        busy = self._busy()
        worst = max(range(layout.pp), key=lambda position: busy[position][0])
        compute, again, sent = busy[worst]
        mean = sum(each[0] + each[2] for each in busy) / layout.pp
        stalls = sum(map(self._longer, range(len(self.stages)))) / layout.pp * self.m
        away = (max(steps) + up + moves) if layout.offload_optimizer else 0.0
        device = 0.0 if layout.offload_optimizer else sum(steps) / layout.pp
        return Estimate(total, self.bytes() if size is None else size, compute, again, sent,
                        late + end - moves + stalls, away, max(0.0, 1 - (mean + device) / total))

    def _times(self) -> Times:
        columns = [self._stage_times(index) for index in range(len(self.stages))]
        return Times(*zip(*columns, strict=True), self.messages)  # pyright: ignore[reportArgumentType]

    def _stage_times(self, index: int) -> tuple[float, ...]:
        """Forward, before, backward, input, weight."""
        units = self.stages[index].units
        before = units[-1].forward_s if units[-1].again else 0.0
        again = sum(unit.forward_s for unit in units if unit.again) - before
        forward, backward = (sum(column) for column in zip(*[unit[:2] for unit in units], strict=True))
        first, second = (sum(column) for column in zip(*[unit[2:4] for unit in units], strict=True))
        more = self._longer_parts(index)
        moves = self._kept_s(index)
        return (max(forward + more[0], moves), before,
                max(backward + again + more[1], moves - before),
                max(first + again + more[2], moves - before), second + more[3])

    def _kept_s(self, index: int) -> float:
        """The time of kept inputs to the host, or back, for a micro-batch."""
        if not self.layout.offload_activations:
            return 0.0
        size = sum(unit.kept_bytes for unit in self.stages[index].units if unit.again)
        return size * 8 / (self.hardware.link_gbps * 1e9)

    def _longer(self, index: int) -> float:
        split = SCHEDULES[self.layout.schedule].make is not None and _splits(self.layout.schedule)
        forward, backward, first, second = self._longer_parts(index)
        return forward + (first + second if split else backward)

    def _longer_parts(self, index: int) -> tuple[float, float, float, float]:
        """By how much traffic in every micro-batch makes forward, backward, and its halves longer."""
        if not self.often and self.window is None:
            return 0.0, 0.0, 0.0, 0.0
        return _stream(self.stages[index], Rule(
            self.window, self.often, self.hardware.contention, self.fast.config.zero.prefetch or 1,
            self.layout.schedule in KEEP_ALL))

    def _held(self, position: int) -> list[Toll]:
        """Tolls of a position's parameter units."""
        tolls = [toll for index, where in enumerate(self.place) if where == position
                 for toll in self.stages[index].tolls if toll is not None]
        if self.tied is not None and position in (self.place[0], self.place[-1]):
            tolls.append(self.tied)
        return tolls

    def _start(self, played: Beat) -> float:
        """How much later all runs since units wait for their first gather of the step."""
        layout = self.layout
        if layout.dp == 1 or layout.stage == 0 or self.window is not None:
            return 0.0
        # The first forwards come after no reduction.
        delay = -sum(self._longer_parts(index)[0] for index in range(len(self.stages)))
        lanes = [0.0] * layout.pp
        all_gathers = [sum(toll.gather_s for toll in self._held(position)) for position in range(layout.pp)]
        for index, stage in enumerate(self.stages):
            position = self.place[index]
            now = begin = played.first[index] + delay
            before = lanes[position]
            computed = 0.0
            for at, (unit, toll) in enumerate(zip(stage.units, stage.tolls, strict=True)):
                if self.tied is not None and index == 0 and at == 0:
                    before += self.tied.gather_s
                before += toll.gather_s if toll is not None else 0.0
                now = max(now, before)
                # Other units are gathered beside it.
                beside = max(0.0, min(unit.forward_s, all_gathers[position] - now))
                now += unit.forward_s + self.hardware.contention * beside
                computed += unit.forward_s
            lanes[position] = before
            delay += now - begin - computed
        if layout.pp == 1:
            # Forwards of the first micro-batch are over, and gathers may go on beside others.
            delay += self.hardware.contention * max(0.0, all_gathers[0] - now)
        return delay

    def _end(self, played: Beat) -> tuple[float, float]:
        """How much longer the step is than its last task by reductions after the last backwards; and by moves
        to the host."""
        layout, once = self.layout, not self.often
        if layout.dp == 1 and self.tied is None and not layout.offload_optimizer and layout.tp == 1:
            return 0.0, 0.0
        split = _splits(layout.schedule)
        chained, lanes, downs = 0.0, [-1e30] * layout.pp, [-1e30] * layout.pp
        ends = [-each for each in played.ends]
        for index in sorted(range(len(self.stages)), key=lambda index: -played.last[index]):
            position, stage = self.place[index], self.stages[index]
            seconds = [unit.weight_s if split else
                       unit.backward_s + unit.forward_s * (unit.again and unit is not stage.units[-1])
                       for unit in stage.units]
            longer = self._longer_parts(index)[3 if split else 1]
            now = -played.last[index] - sum(seconds) - longer + (0.0 if split else chained)
            late, freed = 0.0, [-1e30, -1e30]  # when gradients' buffers are free
            for unit in reversed(range(len(stage.units))):
                beside = max(0.0, min(seconds[unit], lanes[position] - now)) if once else 0.0
                longer = self.hardware.contention * beside
                tolls = [stage.tolls[unit]] if stage.tolls[unit] is not None else []
                if self.tied is not None and ((index == 0 and unit == 0) or (
                        unit == len(stage.units) - 1 and index == len(self.stages) - 1
                        and self.place[index] != self.place[0])):
                    tolls.append(self.tied)
                summed = sum(toll.sum_s for toll in tolls if toll) if once else 0.0
                now = max(now, freed[-2] if self.often else now) + seconds[unit] + longer + summed
                late += longer + summed
                for toll in tolls:
                    assert toll is not None
                    lanes[position] = max(lanes[position], now) + toll.reduce_s
                    freed.append(lanes[position])
                    downs[position] = max(downs[position], lanes[position]) + toll.down_s
            chained += late * (not split)
            ends[position] = max(ends[position] + (chained if not split else late), now)
        reduced = max(*ends, *lanes)
        if self.tied is not None and self.place[0] != self.place[-1]:
            both = (self.place[0], self.place[-1])
            reduced = max(reduced, max(lanes[at] for at in both) + self.tied.tie_s)
        down = max(downs) if layout.offload_optimizer else reduced
        return max(reduced, down), max(0.0, down - reduced)

    def _busy(self) -> list[tuple[float, float, float]]:
        """By position: seconds of kernels, those computed again, and of exposed collectives over tp."""
        rows = [(0.0, 0.0, 0.0)] * self.layout.pp
        for index, position in enumerate(self.place):
            compute = again = sent = 0.0
            for unit in self.stages[index].units:
                twice = unit.forward_s if unit.again else 0.0
                travels = sum(unit.sent_s) + (unit.sent_s[0] if unit.again else 0.0)
                compute += unit.forward_s + unit.backward_s + twice - travels
                again += twice
                sent += travels
            rows[position] = tuple(old + self.m * new for old, new in zip(
                rows[position], (compute, again, sent), strict=True))  # pyright: ignore
        return rows

    # ---------------------------------------------------------------- memory

    def bytes(self) -> int:
        """Of the fullest rank."""
        layout = self.layout
        taken = self.hardware.taken_bytes(self.tolls.communicators(self.place))
        fixed, window = [], (self.window or 0) + (self.fast.config.zero.prefetch or 1)
        saved = [sum(unit.kept_bytes * (not layout.offload_activations) if unit.again else unit.saved_bytes
                     for unit in stage.units) + sum(unit.handed_bytes for unit in stage.units)
                 for stage in self.stages]
        operands = [sum(unit.operand_bytes for unit in stage.units) for stage in self.stages]
        kept = held(layout.schedule, layout.pp, self.m, self.v)
        for position in range(layout.pp):
            mine = [index for index, where in enumerate(self.place) if where == position]
            tolls = self._held(position)
            gathered = window
            if layout.stage == 3 and self.window is None:
                gathered = len(tolls)
            peak = max(sum(row.saved[at] * saved[index] + row.operands[at] * operands[index]
                           for at, index in enumerate(mine)) for row in kept[position])
            units = [unit for index in mine for unit in self.stages[index].units]
            again = max((unit.saved_bytes for unit in units if unit.again), default=0)
            beside = max(max(unit.operand_bytes, 2 * unit.logits_bytes) for unit in units)
            fixed.append(self.tolls.states(tolls, gathered) + peak + again + 3 * self.act_bytes + beside)
        return max(fixed) + (taken if self.fast.config.run.device != "cpu" else 0)


def _splits(schedule: str) -> bool:
    """Whether its last weights' gradients come from halves of backwards."""
    return schedule in ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")


class Rule(NamedTuple):
    """How a stage's traffic runs."""

    window: int | None  # units that stay gathered between uses; None: all do
    often: bool  # whether gradients are reduced after each backward
    contention: float
    prefetch: int
    apart: bool  # whether all forwards come before all backwards, instead of in turns


def _stream(stage: Stage, rule: Rule) -> tuple[float, float, float, float]:
    """By how much forward, backward, input and weights' half of a stage are longer in the steady state."""
    count, stays = len(stage.units), rule.window or 0
    gathers = [toll.gather_s if toll is not None and rule.window is not None else 0.0 for toll in stage.tolls]
    sums = [toll.reduce_s if toll is not None and rule.often else 0.0 for toll in stage.tolls]
    tp = [toll.sum_s if toll is not None and rule.often else 0.0 for toll in stage.tolls]
    if rule.apart:  # one of the resident units makes room for the others
        stays = max(0, stays - 1)
    # (seconds, gather, reduction)
    ahead = [(unit.forward_s, gathers[u] * (u >= stays), 0.0) for u, unit in enumerate(stage.units)]
    back = []
    for u in reversed(range(count)):
        unit = stage.units[u]
        stay = u >= stays if rule.apart else u < count - stays
        back.append((unit.backward_s + unit.forward_s * unit.again + tp[u], gathers[u] * stay, sums[u]))
    if rule.apart:
        forward, backward = _last(ahead * 2, count, rule), _last(back * 2, count, rule)
    else:
        backward = _last((ahead + back) * 2, count, rule)
        forward = _last((ahead + back) * 2, 2 * count, rule) - backward
    forward -= sum(use[0] for use in ahead)
    backward -= sum(use[0] for use in back) - sum(tp)
    share = sum(sums) / (sum(gathers) + sum(sums)) if sum(sums) else 0.0
    return forward, backward, backward * (1 - share), backward * share


def _last(uses: list[tuple[float, float, float]], count: int, rule: Rule) -> float:
    """How long the last so many uses take, beside their traffic."""
    plain = [use[0] for use in uses]
    beside = _two_lanes(uses, plain, rule.prefetch)[1]
    longer = [seconds + rule.contention * each for seconds, each in zip(plain, beside, strict=True)]
    ends = _two_lanes(uses, longer, rule.prefetch)[0]
    return ends[-1] - ends[-1 - count]


def _two_lanes(uses: list[tuple[float, float, float]], seconds: list[float],
               prefetch: int) -> tuple[list[float], list[float]]:
    """Ends of uses whose parameters are gathered `prefetch` uses ahead, and whose gradients are reduced, on
    one lane; and for how long that lane is busy beside each."""
    lane, now = 0.0, 0.0
    starts: list[float] = []
    ends, busy = [], []
    gathered = [0.0] * (len(uses) + prefetch)
    reduced = [0.0] * (len(uses) + 2)
    for index in range(-prefetch, len(uses)):
        ahead = index + prefetch
        if ahead < len(uses) and uses[ahead][1]:
            begin = max(lane, now if index > 0 else 0.0)
            lane = gathered[ahead] = begin + uses[ahead][1]
            busy.append((begin, lane))
        if index < 0:
            continue
        now = max(now, gathered[index], reduced[index - 2] if index >= 2 else 0.0)
        starts.append(now)
        now += seconds[index]
        ends.append(now)
        if uses[index][2]:
            begin = max(lane, now)
            lane = reduced[index] = begin + uses[index][2]
            busy.append((begin, lane))
    beside, at = [], 0
    for start, end in zip(starts, ends, strict=True):
        while at < len(busy) and busy[at][1] <= start:
            at += 1
        inside, look = 0.0, at
        while look < len(busy) and busy[look][0] < end:
            inside += min(end, busy[look][1]) - max(start, busy[look][0])
            look += 1
        beside.append(inside)
    return ends, beside

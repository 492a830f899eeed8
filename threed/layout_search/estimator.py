"""The fast evaluator: the step time and the memory of a layout, with stages in place of units.

    stages' times -> play (rhythm) -> + gathers at the start, + reductions at the end -> CLIP -> STEP

The full plan walks each instruction of each unit; this walks tasks of stages, few micro-batches of them. What
happens once a step (gathers before the first forward, reductions after the last backward) is walked unit by
unit. Where there is traffic in every micro-batch (ZeRO-2, ZeRO-3), all units are walked (stream).

Neglected: how a gather that delays a stage moves its neighbours, where this is little; of memory, most
temporaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import add, mul
from typing import NamedTuple

from threed.layout_search.dp_cost import Message, Toll, Tolls, moved
from threed.layout_search.layout import Layout
from threed.layout_search.steady_state import Beat, Live, Times, apart, at_once, beat, held, place_of, splits
from threed.layout_search.stream import StageSteps, TrafficRule, UnitPiece, stream
from threed.layout_search.units import MicroBatchCut, Strides, UnitCost, Units
from threed.prediction.hardware import Hardware
from threed.schema import Config

_MUCH = 0.05  # of the step: traffic at its start and end that moves the positions' rhythm


class Estimate(NamedTuple):
    """A layout's step and memory, and the parts of the step that something could shorten."""

    step_s: float
    compute_s: float  # of the busiest position: kernels alone, with what is computed again
    again_s: float  # of that: computed again
    tp_s: float  # exposed collectives of that position
    dp_s: float  # exposed: gathers, reductions, what they take from computation
    offload_s: float  # exposed moves to other tiers and steps there
    bubble: float  # share of the step in which a position neither computes nor steps, on average


class StageCost(NamedTuple):
    """A stage's units, and the tolls of their parameters (None: a unit without parameters of its own)."""

    units: Sequence[UnitCost]
    tolls: Sequence[Toll | None]


class Fast:
    """Evaluates layouts of one config on one kind of machine, and remembers their parts."""

    def __init__(self, config: Config, hardware: Hardware):
        self.config, self.hardware = config, hardware
        self._units: dict[object, Units] = {}
        self.beats: dict[object, Beat] = {}
        self.bytes: dict[object, list[int]] = {}
        self._tolls: dict[object, Tolls] = {}
        self._bounds: dict[object, tuple[float, float, float, float]] = {}

    def microbatches(self, layout: Layout) -> int:
        return self.config.train.global_batch_size // (layout.micro_batch_size * layout.dp)

    def units(self, tiles: str | None = None, tp: int = 1) -> Units:
        """The units of the model. Without tiles they are the same for each tp."""
        key = (tiles, 1 if tiles is None else tp)
        if key not in self._units:
            self._units[key] = Units(self.config, self.hardware, *key)
        return self._units[key]

    def tolls(self, layout: Layout) -> Tolls:
        key = (layout.axis_order, layout.tp, layout.pp, layout.dp, layout.sequence_parallel, layout.stage,
               layout.shard_size, layout.reduce_every, layout.offload_optimizer, layout.reduce_dtype)
        if key not in self._tolls:
            self._tolls[key] = Tolls(self.config, self.hardware, layout)
        return self._tolls[key]

    def cut(self, layout: Layout) -> MicroBatchCut:
        stride = Strides(layout.axis_order, {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}).strides["tp"]
        return MicroBatchCut(layout.tp, stride if layout.tp > 1 else 1, layout.sequence_parallel,
                             layout.micro_batch_size, layout.policy, layout.every, layout.tile_linears)

    def bound_s(self, layout: Layout) -> float:
        """No step is shorter: without traffic over dp and messages, the last position waits for the first
        forward of those before it, computes all of its micro-batches, and they do its last backward. (Halves
        of backwards for weights' gradients may run meanwhile. The unit of the loss, which may not be computed
        again, counts once.)"""
        m, p, v = self.microbatches(layout), layout.pp, layout.virtual_stages
        key = self.cut(layout), layout.schedule, p, v
        if key not in self._bounds:
            model, place = self.units(layout.tile_linears, layout.tp), place_of(layout.schedule, p, v)
            units = model.of(key[0])
            units = [*units[:-1], units[-1]._replace(again=False)]
            split = model.split(p * v)
            assert split is not None, layout
            busy, before, last = [0.0] * p, 0.0, 0.0
            halves = splits(layout.schedule)
            for stage, (first, stop) in enumerate(split):
                forward, backward, _, weight, again = (sum(column) for column in zip(*[
                    (*unit[:4], unit.forward_s * unit.again) for unit in units[first:stop]], strict=True))
                busy[place[stage]] += forward + backward + again
                last += weight * halves * (place[stage] == p - 1)
                before += (forward + (backward - weight * halves)) * (stage < p - 1)
            self._bounds[key] = max(busy), busy[-1], before, last
        most, busy, before, weights = self._bounds[key]
        return max(m * most, m * (busy - weights) + before)

    def priced(self, layout: Layout) -> PricedLayout:
        return PricedLayout(self, layout)


class PricedLayout:
    """One layout."""

    def __init__(self, fast: Fast, layout: Layout):
        self.fast, self.layout, self.hardware = fast, layout, fast.hardware
        self.m, self.v = fast.microbatches(layout), layout.virtual_stages
        self.cut, self.tolls = fast.cut(layout), fast.tolls(layout)
        self.model = fast.units(layout.tile_linears, layout.tp)
        self.units = self.model.of(self.cut)
        self.place = place_of(layout.schedule, layout.pp, self.v)
        self.act_bytes = self.model.act_bytes[self.cut]
        # Under ZeRO-3 whose units do not stay gathered: units at a time, or stage.
        window = layout.residency if layout.stage == 3 and layout.dp > 1 else "step"
        self.window = 1 if window is None else None if window == "step" else window
        # Whether its rhythm changes: halves of backwards are apart for some micro-batches only.
        self.mixed = layout.schedule == "dualpipe-v"
        self.parts = self.model.parts(layout.tp, layout.shard_size)
        self.tied = (self.tolls.of(self.parts[-1], len({self.place[0], self.place[-1]}))
                     if -1 in self.parts else None)

    @cached_property
    def stages(self) -> list[StageCost]:
        units = self.units
        split = self.model.split(len(self.place))
        assert split is not None, self.layout
        if self._at_once:
            units = [*units[:-1], units[-1]._replace(again=False)]
        tolls = [self.tolls.of(self.parts[u]) if u in self.parts else None for u in range(len(units))]
        return [StageCost(units[first:stop], tolls[first:stop]) for first, stop in split]

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        return self.tolls.messages(self.place, self.act_bytes)

    @cached_property
    def sent_s(self) -> tuple[float, ...]:
        return tuple(message.sent_s for message in self.messages)

    @property
    def free_s(self) -> float:
        """Seconds of a step without traffic over dp."""
        return self._played.total_s

    # ---------------------------------------------------------------- time

    def estimate(self) -> Estimate:
        layout = self.layout
        free_s = (played := self._played).total_s
        end, moves = self._traffic(played)
        steps, up = self._updates()
        norms = [sum(toll.norm_s for toll in self._held(position)) for position in range(layout.pp)]
        total = free_s + end + max(norms) + self.tolls.clip_s() + max(steps) + up
        alone = total  # where ranks share processors, each takes longer, which is no bubble
        if self.hardware.waits:
            total = max(total, self._shared_s(norms + steps))
        busy = self._busy()
        compute, again, sent = max(busy)
        mean = sum(each[0] + each[2] for each in busy) / layout.pp
        away = max(steps) + up + moves if layout.offload_optimizer else 0.0
        device = 0.0 if layout.offload_optimizer else sum(steps) / layout.pp
        return Estimate(total, compute, again, sent, max(0.0, end - moves), away,
                        max(0.0, 1 - (mean + device) / alone))

    def _traffic(self, played: Beat) -> tuple[float, float]:
        """How much longer the step is with traffic over dp and with moves to the host; of that, the moves."""
        if not (self.layout.often or self.mixed):
            end, moves = self._end(played)
            end += self._start(played)
            if end <= _MUCH * played.total_s:
                return end, moves
        return self._streamed() - played.total_s, 0.0

    @cached_property
    def _played(self) -> Beat:
        """The step without its traffic over dp."""
        times, layout, known = self._times(), self.layout, self.fast.beats
        key = layout.schedule, layout.pp, self.m, self.v, times
        if key not in known:
            known[key] = beat(layout.schedule, layout.pp, self.m, self.v, times)
        played, last = known[key], self.units[-1]
        if not (last.again and self._at_once):
            return played
        late = apart(layout.schedule, layout.pp, self.m, self.v)  # they are computed again after all
        return played._replace(total_s=played.total_s + late * last.forward_s)

    @property
    def _at_once(self) -> bool:
        """Whether the last unit is not computed again, since its backward follows its forward."""
        return not self.mixed and at_once(self.layout.schedule, self.layout.pp, self.m, self.v)

    def _streamed(self) -> float:
        """Up to the last reduction, unit by unit."""
        layout, prefetch = self.layout, self.fast.config.zero.prefetch
        tolls = {part: self.tolls.of(held) for part, held in self.parts.items() if part >= 0}
        ends = (0, len(self.units) - 1) if self.tied is not None else ()
        parts = iter([((unit,) if unit in tolls else ()) + ((-1,) if unit in ends else ())
                      for unit in range(len(self.units))])
        tolls |= {-1: self.tied} if self.tied is not None else {}
        pieces = [[UnitPiece(unit, next(parts)) for unit in stage.units] for stage in self.stages]
        several = layout.shard_size < layout.dp or (self.tied is not None and self.place[0] != self.place[-1])
        once = layout.stage < 2 or layout.reduce_every == "step"
        every = self.m if once else int(layout.reduce_every or 1)
        rule = TrafficRule(self.window, 1 if prefetch is None else prefetch, every,
                           layout.stage >= 1 and layout.dp > 1, layout.stage >= 2,
                           layout.offload_optimizer and not several, self.hardware.contention)
        moves = [moved(self.messages, index) for index in range(len(self.stages))]
        steps = StageSteps(layout.schedule, self.place, pieces, self.sent_s, tolls, moves)
        seconds = stream(steps, rule, self.m)
        return seconds + (self.tied.tie_s if self.tied is not None else 0.0)

    def _updates(self) -> tuple[list[float], float]:
        """By position: seconds of its STEPs; and how much longer it takes until new weights are back from the
        host."""
        steps, late = [], 0.0
        for position in range(self.layout.pp):
            tolls = self._held(position)
            steps.append(sum(toll.step_s for toll in tolls))
            if self.layout.offload_optimizer:
                up = max(tolls[-1].up_s, tolls[0].step_s + sum(toll.up_s for toll in tolls) - steps[-1])
                late = max(late, up)
        return steps, late

    def _shared_s(self, updates: Sequence[float]) -> float:
        """For how long the processors of a machine are busy with all ranks that share them. (A gather in
        every micro-batch counts twice: forward, backward.)"""
        layout = self.layout
        busy = sum(compute + sent for compute, _, sent in self._busy()) + sum(updates)
        gathers = (2 * self.m if self.window is not None else 1) if layout.dp > 1 and layout.stage else 0
        reduces = self.m if layout.stage >= 2 and layout.reduce_every != "step" else 1
        busy += 2 * self.m * sum(message.split_s + message.join_s for message in self.messages)
        sent = 2 * self.m * sum(self.sent_s) + layout.pp * self.tolls.clip_s()
        for position in range(layout.pp):
            for toll in self._held(position):
                busy += toll.sum_s * reduces
                sent += toll.gather_s * gathers + toll.reduce_s * reduces + toll.copy_s + toll.tie_s
        busy += self.hardware.contention * sent
        return busy * layout.tp * layout.dp / self.hardware.devices

    def _times(self) -> Times:
        forward, before, backward, first, weight = zip(
            *(self._stage_times(index) for index in range(len(self.stages))), strict=True)
        return Times(forward, before, backward, first, weight, self.sent_s)

    def _stage_times(self, index: int) -> tuple[float, ...]:
        """Forward, before, backward, input, weight."""
        units = self.stages[index].units
        before = units[-1].forward_s if units[-1].again else 0.0
        again = sum(unit.forward_s for unit in units if unit.again) - before
        forward, backward, first, second = (sum(column) for column in
                                            zip(*[unit[:4] for unit in units], strict=True))
        (forth, back), moves = moved(self.messages, index), self._kept_s(index)
        return (max(forward + forth, moves), before, max(backward + again + back, moves - before),
                max(first + again + back, moves - before), second)

    def _kept_s(self, index: int) -> float:
        """The time of kept inputs to the host, or back, for a micro-batch."""
        if not self.layout.offload_activations:
            return 0.0
        size = sum(unit.kept_bytes for unit in self.stages[index].units if unit.again)
        return size * 8 / (self.hardware.link_gbps * 1e9)

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
        if layout.dp == 1 or layout.stage == 0:
            return 0.0
        delay = 0.0
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
        layout = self.layout
        if layout.dp == 1 and self.tied is None and not layout.offload_optimizer and layout.tp == 1:
            return 0.0, 0.0
        split = splits(layout.schedule)
        chained, lanes, downs = 0.0, [-1e30] * layout.pp, [-1e30] * layout.pp
        ends = [-each for each in played.ends]
        for index in sorted(range(len(self.stages)), key=lambda index: -played.last[index]):
            position, stage = self.place[index], self.stages[index]
            seconds = [unit.weight_s if split else
                       unit.backward_s + unit.forward_s * (unit.again and unit is not stage.units[-1])
                       for unit in stage.units]
            now, late = -played.last[index] - sum(seconds) + (0.0 if split else chained), 0.0
            for unit in reversed(range(len(stage.units))):
                beside = max(0.0, min(seconds[unit], lanes[position] - now))
                longer = self.hardware.contention * beside
                tolls = [stage.tolls[unit]] if stage.tolls[unit] is not None else []
                if self.tied is not None and ((index == 0 and unit == 0) or (
                        unit == len(stage.units) - 1 and index == len(self.stages) - 1
                        and self.place[index] != self.place[0])):
                    tolls.append(self.tied)
                summed = sum(toll.sum_s for toll in tolls if toll)
                now += seconds[unit] + longer + summed
                late += longer + summed
                for toll in tolls:
                    assert toll is not None
                    lanes[position] = max(lanes[position], now) + toll.reduce_s + toll.copy_s
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
            before = rows[position]
            rows[position] = (before[0] + self.m * compute, before[1] + self.m * again,
                              before[2] + self.m * sent)
        return rows

    # ---------------------------------------------------------------- memory

    def bytes(self) -> int:
        """Of the fullest rank, with temporaries, CUDA and NCCL."""
        fixed, kept = self._fixed(), self._kept()
        taken = self.hardware.taken_bytes(self.tolls.communicators(self.place))
        return max(map(add, fixed, kept)) + (taken if self.fast.config.run.device != "cpu" else 0)

    def host_bytes(self) -> int:
        """Of optimizer states on the host, of the ranks of a node."""
        ranks = round(min(self.hardware.node_ranks, self.tolls.strides.size))
        return ranks * max(self.tolls.host_bytes(self._held(position)) for position in range(self.layout.pp))

    def _fixed(self) -> list[int]:
        """By position: parameters, gradients, optimizer states, buffers."""
        layout, known = self.layout, self.fast.bytes
        key = id(self.tolls), id(self.model), self.place, self.window
        if key not in known:
            prefetch = self.fast.config.zero.prefetch
            ahead = 1 if prefetch is None else prefetch
            most = max(len(stage.units) for stage in self.stages)
            window = (most if self.window == "stage" else int(self.window or 0)) + ahead
            rows = [self._held(position) for position in range(layout.pp)]
            known[key] = [self.tolls.states(tolls, len(tolls) if self.window is None else window)
                          for tolls in rows]
        return known[key]

    def _kept(self) -> list[int]:
        """By position: activations and temporaries."""
        layout, known = self.layout, self.fast.bytes
        key = self.cut, layout.schedule, layout.pp, self.v, self.m, layout.offload_activations
        if key not in known:
            kept = held(layout.schedule, layout.pp, self.m, self.v)
            known[key] = [self._kept_at(position, kept[position]) for position in range(layout.pp)]
        return known[key]

    def _kept_at(self, position: int, kept: Sequence[Live]) -> int:
        """The highest of two: when the loss is made, or a forward ends; when a unit has been computed again.
        (Temporaries: logits once more, or about a third of the operands; and some of the residual stream.
        Where backward is split, the gradient of the logits is there before the logits go.)"""
        away = self.layout.offload_activations
        mine = [self.stages[index] for index, where in enumerate(self.place) if where == position]
        saved = [sum((unit.kept_bytes * (not away) if unit.again else unit.saved_bytes) + unit.handed_bytes
                     for unit in stage.units) for stage in mine]
        operands = [sum(unit.operand_bytes for unit in stage.units) for stage in mine]
        peak = max(sum(map(mul, (*row.saved, *row.operands), (*saved, *operands))) for row in kept)
        units = [unit for stage in mine for unit in stage.units]
        split = any(map(any, (row.operands for row in kept)))
        logits = max(max(unit.logits_bytes, split * bool(unit.logits_bytes) * unit.operand_bytes)
                     for unit in units)
        beside = [unit.operand_bytes // 3 for unit in units if not unit.logits_bytes]
        # Its saved tensors are gone when other units of its micro-batch are computed again.
        gone = sum(unit.saved_bytes for unit in units if unit.logits_bytes and not unit.again)
        again = max((unit.saved_bytes + unit.operand_bytes // 3 - gone * (not unit.logits_bytes)
                     for unit in units if unit.again), default=0)
        return peak + max(logits, again, max(beside, default=0)) + 3 * self.act_bytes

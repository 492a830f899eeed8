"""Bounds: what no layout is below, without a plan of it: the price of units for all micro-batches of the
busiest position, what a position gathers and reduces, and the bytes of parameters, gradients, optimizer
state, and what its order saves.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

from threed.features.zero.plan import window
from threed.layout_search.layout import Layout, MostHeld, config_of, most_held
from threed.layout_search.short_plan import FORWARDS_FIRST, filling_count, steady_count
from threed.layout_search.units import UnitBytes, Units
from threed.planner.facts import make_mesh
from threed.prediction.peak import groups
from threed.program.instruction import Op
from threed.schedules.timed import StageTimes, spans


class Bounds(Units):
    """Of layouts of one config on one kind of machine."""

    def step_s(self, layout: Layout) -> float:
        """Seconds: no step is shorter. The first forward of a position waits for those of the stages before
        its first one; then it computes all of its micro-batches."""
        stages, m = self.stage_prices(layout), self.microbatches(layout)
        return max(m * computes + sum(stage.forward for stage in stages[:layout.place.index(position)])
                   for position, computes in enumerate(self.busy(layout)))

    def microbatches(self, layout: Layout) -> int:
        return self.config.train.global_batch_size // (layout.micro_batch_size * layout.dp)

    def microbatch_s(self, layout: Layout) -> float:
        """Seconds: no micro-batch of a steady state takes less."""
        return max(self.busy(layout))

    def saved_bytes(self, layout: Layout) -> list[int]:
        """Bytes by position: what its order saves for the backward, at their most."""
        return self._most_saved(layout, temporaries=False)

    def working_bytes(self, layout: Layout) -> list[int]:
        """The same, with the temporaries of backward: they are measured, which takes a while."""
        return self._most_saved(layout, temporaries=True)

    def _most_saved(self, layout: Layout, temporaries: bool) -> list[int]:
        m, count = self.microbatches(layout), self._steady_count(layout)
        all_ahead = layout.schedule in FORWARDS_FIRST

        def most() -> list[int]:
            stages, rows = self.stage_prices(layout), most_held(layout, count)
            kinds, nothing = {at.kind for row in rows for at in row}, [0] * len(stages)
            beside = {kind: self._beside(layout, kind == "I") if temporaries and kind != "W" else nothing
                      for kind in kinds}

            def bytes_at(at: MostHeld) -> int:
                now = stages[at.stage].saved - stages[at.stage].waiting if at.kind != "W" else 0
                return now + beside[at.kind][at.stage] + sum(
                    (whole * m // count if all_ahead else whole) * stages[stage].waiting
                    + half * stages[stage].operands for stage, whole, half in at.held)

            return [max(map(bytes_at, row)) for row in rows]

        return self.once(("saved", layout.of_units(), layout.budgeted, layout.place, layout.schedule, count,
                          all_ahead and m, temporaries), most)

    def _beside(self, layout: Layout, split: bool) -> list[int]:
        """Of each stage: bytes that its backward, or the first half of it, holds beside what was saved
        before it, at least."""
        units = layout.of_units()
        held = self.once(("temporaries", units, layout.budgeted, split),
                         lambda: self.temporaries(units, layout.budgeted, split))
        prices, beside = self.prices(layout), []
        for _, stage in self.placed(layout):
            more, each = 0, []
            for unit in reversed(range(stage.start, stage.stop)):
                each.append(more + held[unit])
                more += prices[unit].operands * split - prices[unit].saved
            beside.append(max(*each, more))
        return beside

    def filled_s(self, layout: Layout) -> float:
        """Seconds that the order of its schedule takes, with messages and updates that take no time."""
        m, stages = self.microbatches(layout), self.stage_prices(layout)
        count = self._steady_count(layout)
        order = layout.order(count)
        times = StageTimes([each.forward for each in stages],
                           [each.backward - each.weight for each in stages], [each.weight for each in stages])
        at_work = spans(order, layout.place, times)
        end_s = max(end for _, end in at_work)
        step_s = end_s if m == count else 0.0
        for (start, end), busy, tasks in zip(at_work, self.busy(layout), order, strict=True):
            # No other position waits for the gradients of weights.
            step_s = max(step_s, start + m * busy + (end_s - end if tasks[-1].kind != "W" else 0.0))
        return step_s

    def _steady_count(self, layout: Layout) -> int:
        return steady_count(layout.schedule, layout.pp, self.microbatches(layout))

    def sent_s(self, layout: Layout) -> float:
        """Seconds: no step is shorter that gathers parameters and reduces their gradients, one after another:
        after each micro-batch, or at the end; where a position has one stage, in its last micro-batch.

        Of C seconds of these some run beside the computation of B seconds, which takes the share c of them
        longer, and the step at least as long as the others: B + C c / (1 + c)."""
        if layout.data_ranks == 1:
            return 0.0
        units, m, busy = self.sends(layout, Op.REDUCE), self.microbatches(layout), self.busy(layout)
        reduced: list[dict[object, float]] = [{} for _ in range(layout.pp)]
        for position, stage in self.placed(layout):
            reduced[position] |= _together(units[stage])  # (a tied embedding once)
        takes = [sum(each.values()) for each in reduced]
        most = max(range(layout.pp), key=takes.__getitem__)
        sent = self._gathers_s(layout, most) + (m if layout.reduces_often else 1) * takes[most]
        least = max(sent, m * busy[most] + sent * (share := self.hardware.contention) / (1 + share))
        if layout.reduces_often or len(layout.place) > layout.pp:
            return least
        return max(least, *(m * busy[position] - stage.again - stage.backward + takes[position]
                            for (position, _), stage in zip(self.placed(layout), self.stage_prices(layout),
                                                            strict=True)))

    def _gathers_s(self, layout: Layout, position: int) -> float:
        """Seconds that a position gathers, where parameters come and go: those of a few micro-batches, as the
        plan has them, and as much for each of the others."""
        units = self.sends(layout, Op.GATHER)
        stages = [units[stage] for place, stage in self.placed(layout) if place == position]
        capacity, takes = layout.window([len(_together(stage)) for stage in stages]), _together(units)
        if not capacity:
            return 0.0
        about = layout.of_model(), tuple(map(len, units)), layout.place, layout.schedule, capacity, position

        def seconds(microbatches: int) -> float:
            often = self.once(("gathers", *about, microbatches),
                              lambda: self._gathers(layout, position, microbatches, capacity))
            return sum(takes[name] * count for name, count in often.items())

        m, count = self.microbatches(layout), self._steady_count(layout)
        if m == count:
            return seconds(m)
        few = filling_count(layout.schedule, layout.pp, m)
        return seconds(count) + (m - count) * (seconds(count) - seconds(few)) / (count - few)

    def _gathers(self, layout: Layout, position: int, microbatches: int, capacity: int) -> Counter[object]:
        """Parameter unit -> how often a position gathers it, if so many may be gathered at a time."""
        units = [[*each] for each in self.sends(layout, Op.GATHER)]
        stages = [units[stage] for _, stage in self.placed(layout)]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(itertools.chain(*units)))}
        uses = [[numbers[name] for name in unit] for task in layout.order(microbatches)[position]
                if task.kind != "W" for unit in stages[task.stage][::1 if task.kind == "F" else -1] if unit]
        gathers: dict[int, list[int]] = defaultdict(list)
        window([*enumerate(uses)], capacity, 0, gathers, defaultdict(list))
        names = [*numbers]
        return Counter(names[number] for number in itertools.chain(*gathers.values()))

    def fixed_bytes(self, layout: Layout) -> list[int]:
        """By position: bytes of what is on the device all the time: parameters, gradients, optimizer state,
        and buffers for what comes and goes."""
        # Between micro-batches the gradients of all units are whole.
        summed = layout.adds_whole and self.microbatches(layout) > 1
        return self.once(("fixed", layout.of_parameters(), layout.place, summed),
                         lambda: self._fixed_bytes(layout, summed))

    def _fixed_bytes(self, layout: Layout, summed: bool) -> list[int]:
        alone = layout.of_parameters()
        units = self.once(("bytes", alone), lambda: self.parameter_bytes(alone))
        rows: list[list[dict[object, UnitBytes]]] = [[] for _ in range(layout.pp)]  # of each stage
        for position, stage in self.placed(layout):
            # (a tied embedding counts once)
            rows[position].append({p: each for unit in units[stage] for p, each in unit.items()})
        ahead = 1 if self.config.zero.prefetch is None else self.config.zero.prefetch
        return [_held(row, layout, ahead, summed) for row in rows]

    def taken_bytes(self, layout: Layout) -> int:
        """Bytes of a device that CUDA and communicators take, at least."""
        if self.config.run.device == "cpu":
            return 0
        return self.once(("taken", layout.of_mesh()), lambda: self.hardware.taken_bytes(
            groups(make_mesh(config_of(layout, self.config)), 0) + (layout.pp > 1)))


def _together(units: list[dict[object, float]]) -> dict[object, float]:
    """What parameter units take, each once."""
    return {name: each for unit in units for name, each in unit.items()}


def _held(stages: list[dict[object, UnitBytes]], layout: Layout, ahead: int, summed: bool) -> int:
    """Bytes of a position's stages, with buffers. `ahead`: units that are gathered before their turn.
    `summed`: whole gradients of all units at a time."""
    whole = {p: each for stage in stages for p, each in stage.items()}
    gathered = layout.alive([[each.gathered for each in stage.values()] for stage in stages], ahead)
    gradients = sorted((each.gradient for each in whole.values()), reverse=True)
    # One is sent while the next is computed.
    return sum(each.fixed for each in whole.values()) + gathered + sum(gradients[:None if summed else 2])

"""Bounds: what no layout is below, without a plan of it: the price of units for all micro-batches of the
busiest position, what a position gathers and reduces, and the bytes of parameters, gradients, optimizer
state, and what its order saves.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from operator import add

from threed.features.zero.plan import window
from threed.layout_search.layout import Layout, MostHeld, added_up, config_of, most_held
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
        """Seconds: no further micro-batch takes less, whichever position the others wait for."""
        return min(map(add, self.busy(layout), self.longer_s(layout)))

    def longer_s(self, layout: Layout) -> list[float]:
        """By position: seconds by which traffic over dp in each micro-batch makes it longer. Of C seconds of
        traffic those beside computation slow it down by the share c of them, and the others run while nothing
        is computed: together at least C c / (1 + c), but for those that run while it waits for exchanges."""
        m, share = self.microbatches(layout), self.hardware.contention
        waits = [0.0] * layout.pp
        for (position, _), stage in zip(self.placed(layout), self.stage_prices(layout), strict=True):
            waits[position] += stage.before_forward + stage.before_backward
        return [max(0.0, gathers / m + reduces * layout.reduces_often - wait) * share / (1 + share)
                for (gathers, reduces), wait in zip(self._traffic_s(layout), waits, strict=True)]

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

    def filled_s(self, layout: Layout) -> list[float]:
        """By position: seconds that the order of its schedule takes, with messages and updates that take no
        time."""
        m, stages = self.microbatches(layout), self.stage_prices(layout)
        count = self._steady_count(layout)
        order = layout.order(count)
        times = StageTimes([each.forward for each in stages],
                           [each.backward - each.weight for each in stages], [each.weight for each in stages])
        at_work = spans(order, layout.place, times)
        end_s = max(end for _, end in at_work)
        # No other position waits for the gradients of weights.
        return [max(end_s if m == count else 0.0,
                    start + m * busy + (end_s - end if tasks[-1].kind != "W" else 0.0))
                for (start, end), busy, tasks in zip(at_work, self.busy(layout), order, strict=True)]

    def _steady_count(self, layout: Layout) -> int:
        return steady_count(layout.schedule, layout.pp, self.microbatches(layout))

    def sent_s(self, layout: Layout, filled: Sequence[float]) -> float:
        """Seconds: no step is shorter that gathers parameters and reduces their gradients, one after another:
        after each micro-batch, or at the end; where a position has one stage, in its last micro-batch.
        `filled`: as from `filled_s`, of what computes the same."""
        traffic, m, busy = self._traffic_s(layout), self.microbatches(layout), self.busy(layout)
        # (What the first micro-batch gathers, and the last one reduces, others may compute beside.)
        least = max(took + (m - 1) * more for took, more in zip(filled, self.longer_s(layout), strict=True))
        least = max(least, *(gathers + (m if layout.reduces_often else 1) * reduces
                             for gathers, reduces in traffic))
        if layout.reduces_often or len(layout.place) > layout.pp:
            return least
        return max(least, *(m * busy[position] - stage.again - stage.backward + traffic[position][1]
                            for (position, _), stage in zip(self.placed(layout), self.stage_prices(layout),
                                                            strict=True)))

    def _traffic_s(self, layout: Layout) -> list[tuple[float, float]]:
        """By position: seconds of a step that gathers take in which parameters come and go; and of a
        reduction of all gradients."""
        if layout.data_ranks == 1:
            return [(0.0, 0.0)] * layout.pp
        units = self.sends(layout, Op.REDUCE)
        reduced: list[dict[object, float]] = [{} for _ in range(layout.pp)]
        for position, stage in self.placed(layout):
            reduced[position] |= _together(units[stage])  # (a tied embedding once)
        return [(self._gathers_s(layout, position), sum(each.values()))
                for position, each in enumerate(reduced)]

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
        # Between micro-batches whole gradients wait for the next.
        summed = added_up(layout, self._steady_count(layout)) if layout.adds_whole else None
        return self.once(("fixed", layout.of_parameters(), layout.place, summed),
                         lambda: self._fixed_bytes(layout, summed or [()] * layout.pp))

    def _fixed_bytes(self, layout: Layout, summed: Sequence[Collection[Collection[int]]]) -> list[int]:
        alone = layout.of_parameters()
        units = self.once(("bytes", alone), lambda: self.parameter_bytes(alone))
        rows: list[dict[int, dict[object, UnitBytes]]] = [{} for _ in range(layout.pp)]  # of each stage
        for number, (position, stage) in enumerate(self.placed(layout)):
            # (a tied embedding counts once)
            rows[position][number] = {p: each for unit in units[stage] for p, each in unit.items()}
        ahead = 1 if self.config.zero.prefetch is None else self.config.zero.prefetch
        return [_held(row, layout, ahead, together) for row, together in zip(rows, summed, strict=True)]

    def taken_bytes(self, layout: Layout) -> int:
        """Bytes of a device that CUDA and communicators take, at least."""
        if self.config.run.device == "cpu":
            return 0
        return self.once(("taken", layout.of_mesh()), lambda: self.hardware.taken_bytes(
            groups(make_mesh(config_of(layout, self.config)), 0) + (layout.pp > 1)))


def _together(units: list[dict[object, float]]) -> dict[object, float]:
    """What parameter units take, each once."""
    return {name: each for unit in units for name, each in unit.items()}


def _held(stages: Mapping[int, dict[object, UnitBytes]], layout: Layout, ahead: int,
          summed: Collection[Collection[int]]) -> int:
    """Bytes of a position's stages, with buffers. `ahead`: units that are gathered before their turn.
    `summed`: the stages of which whole gradients of all units wait, at each time."""
    whole = {p: each for stage in stages.values() for p, each in stage.items()}
    gathered = layout.alive([{p: each.gathered for p, each in stage.items()} for stage in stages.values()],
                            ahead)
    # One is sent while the next is computed.
    gradients = [sum(sorted((each.gradient for each in whole.values()), reverse=True)[:2])]
    gradients += [sum({p: each.gradient for stage in some for p, each in stages[stage].items()}.values())
                  for some in summed]
    streamed = Counter(each.streamed for each in whole.values())
    return (sum(each.fixed for each in whole.values()) + gathered + max(gradients)
            + sum(size * min(2, count) for size, count in streamed.items())
            + max((each.staging for each in whole.values()), default=0))

"""Bounds: what no layout is below, without a plan of it: the price of units for all micro-batches of the
busiest position, and the bytes of parameters, gradients, optimizer state, and what its order saves.
"""

from __future__ import annotations

from operator import add

from threed.layout_search.layout import Layout, config_of, most_held
from threed.layout_search.short_plan import FORWARDS_FIRST, steady_count
from threed.layout_search.units import UnitBytes, Units
from threed.planner.facts import make_mesh
from threed.prediction.peak import groups
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
            saved, sizes = [stage.saved for stage in self.stage_prices(layout)], list[int]()
            for position in most_held(layout, count):
                beside = self._beside(layout, position.split) if temporaries else [0] * len(saved)
                held = ((stage, sum(number * saved[at] for at, number in each))
                        for stage, each in position.before)
                sizes.append(max((size * m // count if all_ahead else size) + beside[stage]
                                 for stage, size in held))
            return sizes

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
            freed, each = 0, []
            for unit in reversed(range(stage.start, stage.stop)):
                each.append(held[unit] - freed)
                freed += prices[unit].saved
            beside.append(max(each))
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

    def reduced_s(self, layout: Layout) -> float:
        """Seconds: no step is shorter that reduces its gradients: after each micro-batch, or at the end;
        where a position has one stage, in its last micro-batch."""
        if layout.data_ranks == 1:
            return 0.0
        units, m = self.reductions(layout), self.microbatches(layout)
        takes = [0.0] * layout.pp
        for position, stage in self.placed(layout):
            takes[position] += sum(units[stage])
        if layout.reduces_often:
            return m * max(takes)
        busy = self.busy(layout)
        before = [m * busy[position] - stage.again - stage.backward for (position, _), stage in zip(
            self.placed(layout), self.stage_prices(layout), strict=True)]
        return max(map(add, takes, before)) if len(before) == layout.pp else max(takes)

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


def _held(stages: list[dict[object, UnitBytes]], layout: Layout, ahead: int, summed: bool) -> int:
    """Bytes of a position's stages, with buffers. `ahead`: units that are gathered before their turn.
    `summed`: whole gradients of all units at a time."""
    whole = {p: each for stage in stages for p, each in stage.items()}
    gathered = layout.alive([[each.gathered for each in stage.values()] for stage in stages], ahead)
    gradients = sorted((each.gradient for each in whole.values()), reverse=True)
    # One is sent while the next is computed.
    return sum(each.fixed for each in whole.values()) + gathered + sum(gradients[:None if summed else 2])

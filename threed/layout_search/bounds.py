"""Bounds: what no layout is below, without a plan of it: the price of units for all micro-batches of the
busiest position, and the bytes of parameters, gradients and optimizer state.

Prices and sizes are those of a table of all units on one position.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

from threed.base.mesh import axes_of
from threed.layout_search.cuts import Cuts
from threed.layout_search.layout import Layout, config_of
from threed.layout_search.short_plan import FORWARDS_FIRST, steady_count
from threed.planner.auto import marked_table
from threed.planner.facts import make_mesh, make_table
from threed.planner.passes import Pipeline
from threed.prediction.analytic import cost
from threed.prediction.hardware import Hardware, places
from threed.prediction.peak import groups
from threed.program.instruction import Instruction, Op, Slot, SlotKind
from threed.program.plan import Plan
from threed.program.summary import unit_bytes
from threed.program.table import Table
from threed.schedules.orders import Task
from threed.schedules.timed import StageTimes, spans
from threed.schema import Config


class UnitPrice(NamedTuple):
    """Of a compute unit, or of a stage, and a micro-batch."""

    forward: float  # seconds
    backward: float  # seconds
    again: float  # seconds of forward, computed again (a position may do this while it waits for a gradient)
    weight: float  # seconds of the half of backward that computes gradients of weights
    saved: int  # bytes from forward to backward


class Filled(NamedTuple):
    """Of the order of a schedule."""

    step_s: float
    saved_bytes: list[int]  # by position: for the backward, at their most


class UnitBytes(NamedTuple):
    """Of a parameter unit, on the device."""

    fixed: int  # all the time
    gathered: int  # of its weights, where they come and go
    gradient: int  # of its whole gradient, where that comes and goes


class Bounds(Cuts):
    """Of layouts of one config on one kind of machine."""

    def __init__(self, config: Config, hardware: Hardware):
        super().__init__(config)
        self.hardware = hardware

    def step_s(self, layout: Layout) -> float:
        """Seconds: no step is shorter. The first forward of a position waits for those of the stages before
        its first one; then it computes all of its micro-batches."""
        stages, m = self._stage_prices(layout), self.microbatches(layout)
        return max(m * computes + sum(stage.forward for stage in stages[:layout.place.index(position)])
                   for position, computes in enumerate(self._busy(layout)))

    def microbatches(self, layout: Layout) -> int:
        return self.config.train.global_batch_size // (layout.micro_batch_size * layout.dp)

    def microbatch_s(self, layout: Layout) -> float:
        """Seconds: no micro-batch of a steady state takes less."""
        return max(self._busy(layout))

    def saved_once(self, layout: Layout) -> list[int]:
        """Bytes by position: of one micro-batch, when its backward begins. No order saves less."""
        saved = [0] * layout.pp
        for (position, _), stage in zip(self.placed(layout), self._stage_prices(layout), strict=True):
            saved[position] += stage.saved
        return saved

    def filled(self, layout: Layout) -> Filled:
        """What the order of its schedule takes, with messages and updates that take no time."""
        m, stages = self.microbatches(layout), self._stage_prices(layout)
        count = steady_count(layout.schedule, layout.pp, m)
        order = layout.order(count)
        times = StageTimes([each.forward for each in stages],
                           [each.backward - each.weight for each in stages], [each.weight for each in stages])
        at_work = spans(order, layout.place, times)
        end_s = max(end for _, end in at_work)
        step_s = end_s if m == count else 0.0
        for (start, end), busy, tasks in zip(at_work, self._busy(layout), order, strict=True):
            # No other position waits for the gradients of weights.
            step_s = max(step_s, start + m * busy + (end_s - end if tasks[-1].kind != "W" else 0.0))
        all_saved = m if layout.schedule in FORWARDS_FIRST else count
        return Filled(step_s, [most_saved(tasks, stages) * all_saved // count for tasks in order])

    def reduced_s(self, layout: Layout) -> float:
        """Seconds: no step is shorter that reduces its gradients: after each micro-batch, or at the end;
        where a position has one stage, in its last micro-batch."""
        if layout.data_ranks == 1:
            return 0.0
        units, m = self._reduced(layout), self.microbatches(layout)
        takes = [0.0] * layout.pp
        for position, stage in self.placed(layout):
            takes[position] += sum(units[stage])
        if layout.reduces_often:
            return m * max(takes)
        busy = self._busy(layout)
        before = [m * busy[position] - stage.again - stage.backward for (position, _), stage in zip(
            self.placed(layout), self._stage_prices(layout), strict=True)]
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
        units = self.once(("bytes", alone), lambda: _fixed(self._table(alone)))
        rows: list[list[dict[int, UnitBytes]]] = [[] for _ in range(layout.pp)]  # of each stage
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

    def _busy(self, layout: Layout) -> list[float]:
        """Seconds by position in which it computes a micro-batch."""
        busy = [0.0] * layout.pp
        for (position, _), stage in zip(self.placed(layout), self._stage_prices(layout), strict=True):
            busy[position] += stage.forward + stage.again + stage.backward
        return busy

    def _stage_prices(self, layout: Layout) -> list[UnitPrice]:
        units = self._prices(layout)
        return [UnitPrice(*map(sum, zip(*units[stage], strict=True))) for _, stage in self.placed(layout)]

    def _prices(self, layout: Layout) -> Sequence[UnitPrice]:
        """Of each unit. The loss is not computed again: its backward may follow at once."""
        alone = layout.of_units()
        where = self.once(("places", layout.of_mesh()), lambda: self._places(layout))

        def price() -> list[UnitPrice]:
            config = config_of(layout, self.config)
            table = marked_table(self.alone(alone), Pipeline([[]], (0,)))
            seconds = cost(Plan(table, {}, config), self.hardware)

            def of(unit: int) -> UnitPrice:
                forward, backward, weight, again = (seconds(0, Instruction(op, unit, 0)) for op in (
                    Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT, Op.RECOMPUTE))
                repeated = table.units[unit].recompute and unit != table.last
                some = table.units[unit].recompute or layout.budgeted
                saved = 0 if some else table.size(Slot(SlotKind.SAVED, unit))
                return UnitPrice(forward, backward, again * repeated, weight, saved)

            return [*map(of, range(len(table.units)))]

        return self.once(("prices", alone, where, layout.budgeted), price)

    def _reduced(self, layout: Layout) -> Sequence[float]:
        """Seconds that a reduction of each unit's gradients takes, over its shard group. (A tied embedding's
        is the first unit's.)"""
        def price() -> list[float]:
            table = self._table(layout)
            seconds = cost(Plan(table, {}, config_of(layout, self.config)), self.hardware)
            taken = set[int]()
            result = []
            for unit in table.units:
                own = [p for p in unit.parameters if table.parameters[p].trains and p not in taken]
                taken.update(own)
                result.append(sum(seconds(0, Instruction(Op.REDUCE, p, group=table.parameters[p].shard_group))
                                  for p in own if table.shards.reductions(p)))
            return result

        return self.once(("reduced", layout.of_reductions()), price)

    def _places(self, layout: Layout) -> object:
        """How the groups lie in which ranks cut parameters, or tokens."""
        where = places(make_mesh(config_of(layout, self.config)), self.hardware.node_ranks)
        return tuple([(axis, *vars(where[axis]).values())
                      for axis in (*axes_of("tokens"), *axes_of("parameters"))])

    def _table(self, layout: Layout) -> Table:
        """Of all units on one position."""
        alone = layout.of_parameters()
        return self.once(("table", alone), lambda: make_table(self.alone(alone), (0,)))


def _fixed(table: Table) -> list[dict[int, UnitBytes]]:
    """Of each compute unit: parameter unit -> bytes."""
    bytes_of = {p: _unit_bytes(table, p) for p in table.parameters}
    return [{p: bytes_of[p] for p in unit.parameters} for unit in table.units]


def most_saved(tasks: Sequence[Task], stages: Sequence[UnitPrice]) -> int:
    """Bytes at their most of what the tasks of a position save."""
    now = most = 0
    for task in tasks:
        if task.kind != "W":
            now += stages[task.stage].saved * (1 if task.kind == "F" else -1)
            most = max(most, now)
    return most


def _held(stages: list[dict[int, UnitBytes]], layout: Layout, ahead: int, summed: bool) -> int:
    """Bytes of a position's stages, with buffers. `ahead`: units that are gathered before their turn.
    `summed`: whole gradients of all units at a time."""
    whole = {p: each for stage in stages for p, each in stage.items()}
    gathered = layout.alive([[each.gathered for each in stage.values()] for stage in stages], ahead)
    gradients = sorted((each.gradient for each in whole.values()), reverse=True)
    # One is sent while the next is computed.
    return sum(each.fixed for each in whole.values()) + sum(gathered) + sum(gradients[:None if summed else 2])


def _unit_bytes(table: Table, p: int) -> UnitBytes:
    held = table.parameters[p]
    comes = held.trains and not table.shards.in_place(p)
    gathered = table.shards.is_cut(p) and not held.whole
    return UnitBytes(unit_bytes(table, p), table.size(Slot(SlotKind.PARAM, p)) if gathered else 0,
                     table.size(Slot(SlotKind.WEIGHT_GRAD, p)) if comes else 0)

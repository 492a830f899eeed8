"""Bounds: what no layout is below, without a plan of it: the price of units for all micro-batches of the
busiest position, and the bytes of parameters, gradients and optimizer state.

Prices and sizes are those of a table of all units on one position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from operator import add
from typing import NamedTuple

from threed.base.mesh import axes_of
from threed.layout_search.cuts import Cuts
from threed.layout_search.layout import Layout, config_of
from threed.layout_search.short_plan import FORWARDS_FIRST, as_priced, short_plan, steady_count
from threed.planner.facts import make_mesh, make_table
from threed.planner.unit_kinds import TIED
from threed.prediction.analytic import cost
from threed.prediction.hardware import Hardware, places
from threed.prediction.peak import groups, temporaries_of
from threed.program.analysis import Analysis
from threed.program.effects import effects
from threed.program.instruction import BACKWARDS, Instruction, Op, Slot, SlotKind, Tier
from threed.program.plan import Plan
from threed.program.summary import activations, unit_bytes
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


class UnitBytes(NamedTuple):
    """Of a parameter unit, on the device."""

    fixed: int  # all the time
    gathered: int  # of its weights, where they come and go
    gradient: int  # of its whole gradient, where that comes and goes


class Bounds(Cuts):
    """Of layouts of one config on one kind of machine."""

    def __init__(self, config: Config, hardware: Hardware):
        super().__init__(as_priced(config, hardware))
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

    def saved_bytes(self, layout: Layout) -> list[int]:
        """Bytes by position: what its order saves for the backward, at their most."""
        return self._most_saved(layout, temporaries=False)

    def working_bytes(self, layout: Layout) -> list[int]:
        """The same, with the temporaries of backward: they are measured, which takes a while."""
        return self._most_saved(layout, temporaries=True)

    def _most_saved(self, layout: Layout, temporaries: bool) -> list[int]:
        m, count = self.microbatches(layout), self._steady_count(layout)
        times = Fraction(m if layout.schedule in FORWARDS_FIRST else count, count)

        def most() -> list[int]:
            saved = [stage.saved for stage in self._stage_prices(layout)]
            return [most_saved(tasks, saved, self._beside(layout, tasks) if temporaries else None, times)
                    for tasks in layout.order(count)]

        return self.once(("saved", layout.of_units(), layout.budgeted, layout.place, layout.schedule, count,
                          times, temporaries), most)

    def _beside(self, layout: Layout, tasks: Sequence[Task]) -> list[int]:
        """Of each stage: bytes that its backward holds beside what was saved before it, at least."""
        units, op = layout.of_units(), Op.BACKWARD
        if any(task.kind == "I" for task in tasks):
            op = Op.BACKWARD_INPUT
        held = self.once(("temporaries", units, layout.budgeted, op),
                         lambda: self._temporaries(units, layout.budgeted, op))
        prices, beside = self._prices(layout), []
        for _, stage in self.placed(layout):
            freed, each = 0, []
            for unit in reversed(range(stage.start, stage.stop)):
                each.append(held[unit] - freed)
                freed += prices[unit].saved
            beside.append(max(each))
        return beside

    def _temporaries(self, layout: Layout, budgeted: bool, op: Op) -> list[int]:
        """Of each unit: bytes that its backward holds, beside what its forward has saved."""
        analysis = self._short(layout)
        table, [program] = analysis.table, analysis.plan.programs["train"]
        if op == Op.BACKWARD_INPUT:
            program = tuple(half for item in program for half in (
                [item._replace(op=each) for each in BACKWARDS[1:]] if item.op == Op.BACKWARD else [item]))
        held = temporaries_of(replace(analysis.plan, programs={"train": [program]}))
        of = {item.unit: held(item) for item in program if item.op == op}
        saved = self._saved(analysis, budgeted)
        # What it reads is there again by then, if forward has not left it.
        return [of.get(kind, 0) + max(0, table.size(Slot(SlotKind.SAVED, kind)) - saved[kind])
                for kind in self.few(layout).units]

    def _short(self, units: Layout) -> Analysis:
        """The plan of one micro-batch on one position, with units of all kinds."""
        return self.once(("short", units), lambda: short_plan(self.fewest(units), 1))

    def filled_s(self, layout: Layout) -> float:
        """Seconds that the order of its schedule takes, with messages and updates that take no time."""
        m, stages = self.microbatches(layout), self._stage_prices(layout)
        count = self._steady_count(layout)
        order = layout.order(count)
        times = StageTimes([each.forward for each in stages],
                           [each.backward - each.weight for each in stages], [each.weight for each in stages])
        at_work = spans(order, layout.place, times)
        end_s = max(end for _, end in at_work)
        step_s = end_s if m == count else 0.0
        for (start, end), busy, tasks in zip(at_work, self._busy(layout), order, strict=True):
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
        units = self.once(("bytes", alone), lambda: self._bytes(alone))
        rows: list[list[dict[object, UnitBytes]]] = [[] for _ in range(layout.pp)]  # of each stage
        for position, stage in self.placed(layout):
            # (a tied embedding counts once)
            rows[position].append({p: each for unit in units[stage] for p, each in unit.items()})
        ahead = 1 if self.config.zero.prefetch is None else self.config.zero.prefetch
        return [_held(row, layout, ahead, summed) for row in rows]

    def _bytes(self, layout: Layout) -> list[dict[object, UnitBytes]]:
        """Of each compute unit, by parameter unit."""
        table = self._table(layout)
        bytes_of = {p: _unit_bytes(table, p) for p in table.parameters}
        return [{name: bytes_of[p] for name, p in names.items()} for names in self._parameters(table, layout)]

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
        def add_up() -> list[UnitPrice]:
            units = self._prices(layout)
            return [UnitPrice(*map(sum, zip(*units[stage], strict=True))) for _, stage in self.placed(layout)]

        return self.once(("stage prices", *self._priced_by(layout), len(layout.place)), add_up)

    def _prices(self, layout: Layout) -> Sequence[UnitPrice]:
        """Of each unit. The loss is not computed again: its backward may follow at once."""
        return self.once(("prices", *self._priced_by(layout)), lambda: self._priced(layout))

    def _priced_by(self, layout: Layout) -> tuple[object, ...]:
        """On what the prices of its units depend."""
        where = self.once(("places", layout.of_mesh()), lambda: self._places(layout))
        return layout.of_units(), where, layout.budgeted

    def _priced(self, layout: Layout) -> list[UnitPrice]:
        short = self._short(layout.of_units())
        table = self._all_units(short.table, layout)
        seconds = cost(Plan(table, {}, config_of(layout, self.config)), self.hardware)
        saved = self._saved(short, layout.budgeted)

        def of(unit: int, kind: int) -> UnitPrice:
            forward, backward, weight, again = (seconds(0, Instruction(op, unit, 0)) for op in (
                Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT, Op.RECOMPUTE))
            repeated = table.units[unit].recompute and unit != table.last
            return UnitPrice(forward, backward, again * repeated, weight, saved[kind])

        kinds = self.few(layout).units
        known = {kind: of(kinds.index(kind), kind) for kind in {*kinds}}
        return [known[kind] for kind in kinds]

    def _saved(self, short: Analysis, budgeted: bool) -> Counter[int]:
        return Counter() if budgeted else saved_by(short)

    def _all_units(self, few: Table, layout: Layout) -> Table:
        """The units of a layout's model, from a table of all of their kinds."""
        return replace(few, units=tuple(few.units[kind] for kind in self.few(layout).units))

    def _reduced(self, layout: Layout) -> Sequence[float]:
        """Seconds that a reduction of each unit's gradients takes, over its shard group. (A tied embedding's
        is the first unit's.)"""
        def price() -> list[float]:
            table = self._table(layout)
            seconds = cost(Plan(table, {}, config_of(layout, self.config)), self.hardware)
            each = {p: seconds(0, Instruction(Op.REDUCE, p, group=held.shard_group))
                    for p, held in table.parameters.items() if held.trains and table.shards.reductions(p)}
            taken = set[object]()
            result = []
            for names in self._parameters(table, layout.of_parameters()):
                result.append(sum(each.get(p, 0.0) for name, p in names.items() if name not in taken))
                taken.update(names)
            return result

        return self.once(("reduced", layout.of_reductions()), price)

    def _places(self, layout: Layout) -> object:
        """How the groups lie in which ranks cut parameters, or tokens."""
        where = places(make_mesh(config_of(layout, self.config)), self.hardware.node_ranks)
        return tuple([(axis, *vars(where[axis]).values())
                      for axis in (*axes_of("tokens"), *axes_of("parameters"))])

    def _table(self, layout: Layout) -> Table:
        """Of all kinds of units, on one position."""
        alone = layout.of_parameters()
        return self.once(("table", alone), lambda: make_table(self.fewest(alone), (0,)))

    def _parameters(self, few: Table, layout: Layout) -> Iterator[dict[object, int]]:
        """Of each unit, its parameter units: a name of its own -> the number in a table of all kinds. The
        tied embedding has one name in all units."""
        for unit, kind in enumerate(self.few(layout).units):
            yield {p if few.parameters[p].kind == TIED else (unit, p): p for p in few.units[kind].parameters}


def saved_by(analysis: Analysis) -> Counter[int]:
    """Compute unit -> bytes on the device when the first backward begins."""
    table, alive = analysis.table, set[Slot]()
    for item in analysis.plan.programs["train"][0]:
        if item.op in (*BACKWARDS, Op.RECOMPUTE):
            break
        seen = effects(item, table, 0)
        alive.update(seen.writes, seen.adds)
        alive.difference_update(seen.frees)
    kinds = activations(table)
    return Counter({unit: sum(table.size(slot) for slot in alive if slot.unit == unit and slot.kind in kinds
                              and slot.tier == Tier.DEVICE) for unit in range(len(table.units))})


def most_saved(tasks: Sequence[Task], saved: Sequence[int], beside: Sequence[int] | None = None,
               times: Fraction = Fraction(1)) -> int:
    """Bytes at their most of what the tasks of a position save. By stage: `saved`, `beside` that in its
    backward. `times`: of the tasks that there are, in an order with all forwards first."""
    now = most = 0
    for task in tasks:
        if task.kind == "F":
            now += saved[task.stage]
            most = max(most, int(now * times))
        elif task.kind != "W":
            if beside is not None:
                most = max(most, int(now * times) + beside[task.stage])
            now -= saved[task.stage]
    return most


def _held(stages: list[dict[object, UnitBytes]], layout: Layout, ahead: int, summed: bool) -> int:
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

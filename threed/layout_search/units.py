"""Units: what a layout's compute units and parameter units take on one kind of machine, by a plan of few
layers with units of all kinds, on one position.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from threed.base.axes import axes_of
from threed.layout_search.cuts import Cuts
from threed.layout_search.layout import Layout, config_of
from threed.layout_search.short_plan import as_priced, counts_as, short_plan
from threed.planner.facts import make_mesh, make_table
from threed.planner.unit_kinds import TIED
from threed.prediction.analytic import cost
from threed.prediction.hardware import Hardware, places
from threed.prediction.peak import temporaries_of
from threed.program.analysis import Analysis
from threed.program.buffers import staging_bytes
from threed.program.effects import effects
from threed.program.halves import halves
from threed.program.instruction import BACKWARDS, COMPUTE, Instruction, Op, Slot, SlotKind, Tier
from threed.program.plan import Plan
from threed.program.summary import activations, unit_bytes
from threed.program.table import Table
from threed.program.walk import Mode, walk
from threed.schema import Config


class UnitPrice(NamedTuple):
    """Of a compute unit, or of a stage, and a micro-batch."""

    forward: float  # seconds
    backward: float  # seconds
    again: float  # seconds of forward, computed again (a position may do this while it waits for a gradient)
    weight: float  # seconds of the half of backward that computes gradients of weights
    before_forward: float  # seconds in which nothing is computed until what another unit hands on has come
    before_backward: float
    saved: int  # bytes from forward to backward
    waiting: int  # bytes of them, where backward does not follow at once: the loss may be computed again then
    operands: int  # bytes from one half of backward to the other


class UnitBytes(NamedTuple):
    """Of a parameter unit, on the device."""

    fixed: int  # all the time
    gathered: int  # of its weights, where they come and go
    gradient: int  # of its whole gradient, where that comes and goes
    streamed: int  # of its part of the gradient, where that goes to the host after each reduction
    staging: int  # of the staging buffer, if it is the largest unit


class Units(Cuts):
    """Of layouts of one config on one kind of machine."""

    def __init__(self, config: Config, hardware: Hardware):
        super().__init__(as_priced(config, hardware))
        self.hardware = hardware

    def busy(self, layout: Layout) -> list[float]:
        """Seconds by position in which it computes a micro-batch, or waits for what its units hand on."""
        busy = [0.0] * layout.pp
        for (position, _), stage in zip(self.placed(layout), self.stage_prices(layout), strict=True):
            busy[position] += stage.forward + stage.again + stage.backward
        return busy

    def stage_prices(self, layout: Layout) -> list[UnitPrice]:
        def add_up() -> list[UnitPrice]:
            units = self.prices(layout)
            return [_stage_price(units[stage]) for _, stage in self.placed(layout)]

        return self.once(("stage prices", *self._priced_by(layout), len(layout.place)), add_up)

    def prices(self, layout: Layout) -> Sequence[UnitPrice]:
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
        saved, operands = Counter[int]() if layout.budgeted else saved_by(short), operands_of(short.table)
        before = self._waits(short, layout)

        def of(unit: int, kind: int) -> UnitPrice:
            forward, backward, weight, again = (seconds(0, Instruction(op, unit, 0)) for op in (
                Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT, Op.RECOMPUTE))
            last, own = unit == table.last, table.units[unit]
            return UnitPrice(forward, backward, again * (own.recompute and not last), weight,
                             before[kind, True], before[kind, False], saved[kind],
                             0 if own.recompute and last else saved[kind], operands[kind])

        kinds = self.few(layout).units
        known = {kind: of(kinds.index(kind), kind) for kind in {*kinds}}
        return [known[kind] for kind in kinds]

    def _waits(self, short: Analysis, layout: Layout) -> Mapping[tuple[int, bool], float]:
        """(compute unit, whether it is its forward) -> seconds before it in which it waits for what travels,
        if nothing else takes time."""
        waits, [links] = defaultdict[tuple[int, bool], float](float), short.simulated("train")
        if all(counts_as(form.item) != Op.EXCHANGE for form in dict.fromkeys(links.forms)):
            return waits
        seconds = cost(replace(short.plan, config=config_of(layout, self.config)), self.hardware)
        took = [seconds(0, item) if item.op in COMPUTE or counts_as(item) == Op.EXCHANGE else 0.0
                for item in links.program]
        when, ready = walk([links.program], [links], Mode.BUFFERED, [took]), 0.0
        for form, start, end in zip(links.forms, when.start[0], when.end[0], strict=True):
            if form.effect.lane == "compute":
                if form.item.op in COMPUTE:
                    waits[form.item.unit, form.item.op == Op.FORWARD] += start - ready
                ready = end
        return waits

    def _all_units(self, few: Table, layout: Layout) -> Table:
        """The units of a layout's model, from a table of all of their kinds."""
        return replace(few, units=tuple(few.units[kind] for kind in self.few(layout).units))

    def sends(self, layout: Layout, op: Op) -> list[dict[object, float]]:
        """Of each compute unit, by parameter unit: seconds that a GATHER of its weights, if they come and go,
        or a REDUCE of its gradient takes over its shard group."""
        def price() -> list[dict[object, float]]:
            table = self._table(layout)
            seconds = cost(Plan(table, {}, config_of(layout, self.config)), self.hardware)
            takes = {p: seconds(0, Instruction(op, p, group=held.shard_group))
                     for p, held in table.parameters.items() if _is_sent(table, p, op)}
            return [{name: takes[p] for name, p in names.items() if p in takes}
                    for names in self._parameters(table, layout.of_parameters())]

        return self.once(("sends", op, layout.of_reductions()), price)

    def _places(self, layout: Layout) -> object:
        """How the groups lie in which ranks cut parameters, or tokens."""
        axes = (*axes_of("tokens"), *axes_of("parameters"))
        where = places(make_mesh(config_of(layout, self.config)), self.hardware.node_ranks, axes)
        return tuple([(axis, *vars(where[axis]).values()) for axis in axes])

    def _table(self, layout: Layout) -> Table:
        """Of all kinds of units, on one position."""
        alone = layout.of_parameters()
        return self.once(("table", alone), lambda: make_table(self.fewest(alone), (0,)))

    def _parameters(self, few: Table, layout: Layout) -> Iterator[dict[object, int]]:
        """Of each unit, its parameter units: a name of its own -> the number in a table of all kinds. The
        tied embedding has one name in all units."""
        for unit, kind in enumerate(self.few(layout).units):
            yield {p if few.parameters[p].kind == TIED else (unit, p): p for p in few.units[kind].parameters}

    def temporaries(self, layout: Layout, budgeted: bool, split: bool) -> list[int]:
        """Of each unit: bytes that its backward holds, beside what its forward has saved. `split`: the first
        half of it."""
        analysis = self._short(layout)
        table, [program] = analysis.table, analysis.plan.programs["train"]
        if split:
            program = tuple(half for item in program for half in halves(item, table))
        held = temporaries_of(replace(analysis.plan, programs={"train": [program]}))
        of = {item.unit: held(item) for item in program if item.op in (Op.BACKWARD, Op.BACKWARD_INPUT)}
        saved = Counter[int]() if budgeted else saved_by(analysis)
        # What it reads is there again by then, if forward has not left it.
        return [of.get(kind, 0) + max(0, table.size(Slot(SlotKind.SAVED, kind)) - saved[kind])
                for kind in self.few(layout).units]

    def _short(self, units: Layout) -> Analysis:
        """The plan of one micro-batch on one position, with units of all kinds."""
        return self.once(("short", units), lambda: short_plan(self.fewest(units), 1))

    def parameter_bytes(self, layout: Layout) -> list[dict[object, UnitBytes]]:
        """Of each compute unit, by parameter unit."""
        table = self._table(layout)
        bytes_of = {p: _unit_bytes(table, p) for p in table.parameters}
        return [{name: bytes_of[p] for name, p in names.items()} for names in self._parameters(table, layout)]


def _stage_price(units: Sequence[UnitPrice]) -> UnitPrice:
    """Of a stage, with waits in its forward and backward. Its first unit, and backwards its last one, have
    what they need from another position."""
    whole = UnitPrice(*map(sum, zip(*units, strict=True)))
    ahead = whole.before_forward - units[0].before_forward
    back = whole.before_backward - units[-1].before_backward
    return whole._replace(forward=whole.forward + ahead, backward=whole.backward + back, before_forward=ahead,
                          before_backward=back)


def saved_by(analysis: Analysis) -> Counter[int]:
    """Compute unit -> bytes on the device when the first backward begins, without what may come twice: it
    is there by then for the last unit alone."""
    table, alive = analysis.table, set[Slot]()
    for item in analysis.plan.programs["train"][0]:
        if item.op in (*BACKWARDS, Op.RECOMPUTE):
            break
        seen = effects(item, table, 0)
        alive.update(seen.writes, seen.adds)
        alive.difference_update(seen.frees)
    twice = {read.name for unit in table.units for read in unit.reads if read.again}
    kinds = {*activations(table)} - twice
    return Counter({unit: sum(table.size(slot) for slot in alive if slot.unit == unit and slot.kind in kinds
                              and slot.tier == Tier.DEVICE) for unit in range(len(table.units))})


def operands_of(few: Table) -> Counter[int]:
    """Compute unit -> bytes of what it made that the second half of a backward reads, and frees."""
    made = Counter[int]()
    for unit in range(len(few.units)):
        for half in halves(Instruction(Op.BACKWARD, unit, 0), few)[1:]:
            for slot in effects(half, few, 0).frees:
                made[slot.unit] += few.size(slot)
    return made


def _unit_bytes(table: Table, p: int) -> UnitBytes:
    held = table.parameters[p]
    comes = held.trains and not table.shards.in_place(p)
    gathered = _is_sent(table, p, Op.GATHER)
    streamed = held.trains and table.shards.streams(p)
    return UnitBytes(unit_bytes(table, p), table.size(Slot(SlotKind.PARAM, p)) if gathered else 0,
                     table.size(Slot(SlotKind.WEIGHT_GRAD, p)) if comes else 0,
                     table.size(Slot(SlotKind.GRAD_SHARD, p)) if streamed else 0,
                     staging_bytes(table, (p,)) if held.trains else 0)


def _is_sent(table: Table, p: int, op: Op) -> bool:
    """Whether a parameter unit's weights come and go, or its gradient is reduced."""
    held = table.parameters[p]
    if op == Op.GATHER:
        return table.shards.is_cut(p) and not held.whole
    return held.trains and bool(table.shards.reductions(p))

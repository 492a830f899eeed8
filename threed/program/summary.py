"""Summary: the memory of a plan, and its traffic: bytes that a rank of each pipeline position holds and
sends, from the plan alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from threed.base.axes import AXES, QUIET
from threed.base.mesh import FOLDS
from threed.base.quantity import ring, show_bytes, show_count
from threed.base.texttable import render
from threed.program.analysis import Analysis
from threed.program.instruction import OF_MATRICES, SENT, WHOLES, Op, Slot, SlotKind, Tier
from threed.program.link import Memory
from threed.program.seam import seam_of
from threed.program.table import Table
from threed.program.traffic import moved_by, sent_by


def activations(table: Table) -> tuple[str, ...]:
    """Kinds of slots that hold activations and their gradients, and matrices on their way; none of them
    outlives the step."""
    kinds = (*SENT, SlotKind.SAVED, SlotKind.KEPT, *WHOLES, SlotKind.OPERANDS, *table.handed)
    kinds += (SlotKind.LOGITS,) if table.logits else ()
    turns = any(unit.turning is not None for unit in table.parameters.values())
    return (*kinds, *OF_MATRICES) if turns else kinds


@dataclass(frozen=True)
class Frozen:
    """Parameters of a position that are not trained, and bytes that they save."""

    parameters: int
    gradient_bytes: int
    optimizer_bytes: int
    reduce_bytes: int  # sent over dp each time that a gradient would be reduced


@dataclass(frozen=True)
class StageSummary:
    """Parameters and bytes of one rank of a pipeline position, and its collectives and bytes sent in a train
    step.

    Parameters, gradients and optimizer state keep their memory from step to step, sharded or whole as the
    ZeRO stage says.
    """

    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int  # that units share in turn: gathered parameters, gradients before reduction, staging
    host_bytes: int  # offloaded values, and buffers for values on their way
    disk_bytes: int
    snapshot_bytes: int  # on the host, of the copy from which a checkpoint is written
    activation_peak_bytes: int
    alive: Memory  # over the step
    gathers: int
    reduces: int
    sent_bytes: dict[str, int]  # by axis
    moved_bytes: dict[str, int]  # between tiers, by lane
    frozen: Frozen | None  # None: all parameters are trained
    units: list[str]  # names of its compute units

    @property
    def slot_peak_bytes(self) -> dict[str, int]:
        """By kind of slot: the most over the step, on all tiers."""
        return {kind: most for kind in sorted(self.alive.changes) if (most := self.alive.peak(kind))}

    @property
    def fixed_bytes(self) -> int:
        """Bytes that a rank holds on its device all the time."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.buffer_bytes

    def away(self) -> str:
        return f"holds {show_bytes(self.host_bytes)} on the host and {show_bytes(self.disk_bytes)} on disk"

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        names = ("slot_peak_bytes" if field.name == "alive" else field.name for field in fields(self))
        values = {name: getattr(self, name) for name in names}
        values["frozen"] = self.frozen and asdict(self.frozen)
        return {key: value for key, value in values.items() if value is not None}


def stages(analysis: Analysis) -> list[StageSummary]:
    """The summary of each pipeline position."""
    positions = range(analysis.table.num_positions)
    return [stage(analysis, position, analysis.memory(position)) for position in positions]


def stage(analysis: Analysis, position: int, alive: Memory) -> StageSummary:
    """The summary of one position. `alive`: its bytes in a train step, as `Analysis.memory` returns them."""
    table, links = analysis.table, analysis.links_at("train", position)
    sent: Counter[str] = Counter({axis: 0 for axis in AXES if axis not in QUIET})
    moved: Counter[str] = Counter()
    counts: Counter[Op] = Counter()
    for form, count in Counter(links.forms).items():
        sent.update({axis: count * size for axis, size in sent_by(table, form.item).items()})
        if form.item.op in (Op.OFFLOAD, Op.FETCH):
            moved[form.effect.lane] += count * moved_by(table, form.item)
        # Of parameter units; a REDUCE on the compute lane sums in place, and is not counted.
        if not form.item.of_slot and (form.item.op != Op.REDUCE or form.effect.lane != "compute"):
            counts[form.item.op] += count
    away = _away(table, position)
    held = table.stepped(position)
    return StageSummary(
        parameters=sum(table.parameters[p].numel - table.parameters[p].padding for p in table.held(position)),
        parameter_bytes=sum(parameter_bytes(table, p) for p in table.held(position)),
        gradient_bytes=sum(gradient_bytes(table, p) for p in held),
        optimizer_bytes=sum(table.size(table.shards.state(p)) for p in held
                            if table.parameters[p].state_home == Tier.DEVICE),
        buffer_bytes=analysis.buffers(position).bytes(table),
        host_bytes=host_bytes(analysis, position), disk_bytes=away[Tier.DISK],
        snapshot_bytes=snapshot_bytes(table, position),
        activation_peak_bytes=alive.peak(*activations(table)), alive=alive,
        gathers=counts[Op.GATHER], reduces=counts[Op.REDUCE],
        sent_bytes=dict(sent), moved_bytes=dict(moved), frozen=_frozen(table, position),
        units=[table.units[u].name for u in table.units_of(position)])


def host_bytes(analysis: Analysis, position: int) -> int:
    """Of a rank of a position, on the host: offloaded values, and buffers for values on their way."""
    table = analysis.table
    return _away(table, position)[Tier.HOST] + analysis.buffers(position).host_bytes(table)


def fixed_bytes(analysis: Analysis, position: int) -> int:
    """Of a rank of a position, on its device all the time: as StageSummary.fixed_bytes."""
    table = analysis.table
    return (sum(unit_bytes(table, p) for p in table.held(position))
            + analysis.buffers(position).bytes(table))


def unit_bytes(table: Table, unit: int) -> int:
    """Of a parameter unit, on the device all the time: weights, gradient and optimizer state."""
    held, size = table.parameters[unit], parameter_bytes(table, unit)
    if not held.trains:
        return size
    state = table.size(table.shards.state(unit)) if held.state_home == Tier.DEVICE else 0
    return size + gradient_bytes(table, unit) + state


def parameter_bytes(table: Table, unit: int) -> int:
    """Of a parameter unit, on the device all the time."""
    held = table.parameters[unit]
    if held.weight_home != Tier.DEVICE:
        return 0
    return table.size(Slot(SlotKind.PARAM if held.whole else SlotKind.PARAM_SHARD, unit))


def gradient_bytes(table: Table, unit: int) -> int:
    """Of the gradient of a unit that trains, on the device all the time."""
    kind = SlotKind.WEIGHT_GRAD if table.shards.in_place(unit) else SlotKind.GRAD_SHARD
    return 0 if table.shards.streams(unit) else table.size(Slot(kind, unit))


def _frozen(table: Table, position: int) -> Frozen | None:
    """The frozen parameters of a position, if there are any."""
    held = {p: unit for p in table.held(position) if not (unit := table.parameters[p]).trains}
    units = [*held.values()]
    if not units:
        return None
    parts = [(unit.numel, unit.numel // (unit.shards if table.zero.sharded else 1)) for unit in units]
    return Frozen(sum(unit.numel - unit.padding for unit in units),
                  sum((whole if table.zero.stage < 2 else part) * table.elements.grad
                      for whole, part in parts),
                  sum(part * table.shards.state_bytes(Tier.DEVICE, p)
                      for p, (_, part) in zip(held, parts, strict=True)),
                  sum(ring(unit.numel * table.elements.reduce, unit.shards) for unit in units))


def snapshot_bytes(table: Table, position: int) -> int:
    """Bytes of the copy from which a checkpoint is written while the run goes on."""
    return sum(table.size(slot) for slot in seam_of(table, position) if slot.kind == SlotKind.SNAPSHOT)


def _away(table: Table, position: int) -> dict[Tier, int]:
    """Bytes that stay on the host and on disk from step to step, and of gradients that STEP reads there."""
    sizes = {Tier.HOST: 0, Tier.DISK: 0}
    for p in table.held(position):
        held = table.parameters[p]
        for slot in (table.shards.weight(p), *((table.shards.state(p),) if held.trains else ())):
            if slot.tier != Tier.DEVICE:
                sizes[slot.tier] += table.size(slot)
        if table.shards.streams(p):
            sizes[Tier.HOST] += table.size(table.shards.gradient(p))
    return sizes


# ---------------------------------------------------------------- as text


def sent_over(rows: Sequence[StageSummary]) -> list[str]:
    """The axes of which the bytes sent are shown: those of AXES, and quiet ones and those of folds over which
    any are."""
    return [axis for axis in (*AXES, *FOLDS) if axis in {*AXES} - QUIET
            or any(row.sent_bytes.get(axis) for row in rows)]


def show(rows: Sequence[StageSummary], columns: int | None = None) -> str:
    """Summaries as a table, then the bytes on other tiers. `columns`: of a terminal, if it is to fit."""
    axes = sent_over(rows)
    head = ("a rank of", "parameters", "param", "grad", "optimizer", "buffers", "activations",
            *(f"sends {axis}" for axis in axes), "gathers", "reduces")
    lines = [render(head, [
        (f"pp{position}", show_count(row.parameters),
         *map(show_bytes, (row.parameter_bytes, row.gradient_bytes, row.optimizer_bytes, row.buffer_bytes,
                           row.activation_peak_bytes, *(row.sent_bytes.get(axis, 0) for axis in axes))),
         str(row.gathers), str(row.reduces)) for position, row in enumerate(rows)], columns)]
    for position, row in enumerate(rows):
        if row.moved_bytes:
            moved = ", ".join(f"{lane} {show_bytes(size)}" for lane, size in sorted(row.moved_bytes.items()))
            lines.append(f"pp{position} {row.away()}; moves a step: {moved}")
    for position, row in enumerate(rows):
        if (frozen := row.frozen) is not None:
            saves = ", ".join(f"{show_bytes(size)} of {what}" for size, what in (
                (frozen.gradient_bytes, "gradients"), (frozen.optimizer_bytes, "optimizer state"),
                (frozen.reduce_bytes, "each reduction")) if size)
            trained = show_count(row.parameters - frozen.parameters)
            lines.append(f"pp{position} trains {trained} parameters; {show_count(frozen.parameters)} are "
                         f"frozen, which saves {saves}")
    if copied := max(row.snapshot_bytes for row in rows):
        lines.append(f"a rank's copy on the host for checkpoints: {show_bytes(copied)} "
                     "(checkpoint.background)")
    return "\n".join(lines)

"""Traffic: the bytes that a rank sends to others and moves between tiers, by the ring formulas.

For a buffer of S bytes over n ranks, all-gather and reduce-scatter send S (n-1)/n, and all-reduce sends twice
as much.
"""

from __future__ import annotations

from threed.base.mesh import GROUPS
from threed.base.quantity import add_up, ring
from threed.program.entries import ParameterUnit, Reduction
from threed.program.instruction import COMPUTE, PARTS, Instruction, Op, SlotKind, Tier
from threed.program.table import Table
from threed.program.trips import trip_of


def sent_by(table: Table, instruction: Instruction) -> dict[str, int]:
    """Bytes that a rank sends for an instruction, by axis."""
    op, unit = instruction.op, instruction.unit
    if instruction.keep == "logits" and table.logits and unit in table.logits.sent:
        return table.logits.sent[unit]
    if op in COMPUTE:
        return add_up(table.units[unit].traffic.get(phase, {}) for phase in instruction.phases)
    if op == Op.SEND:
        return {GROUPS["pp"].counts: table.size(instruction.slot)}
    if instruction.of_slot and op != Op.RELEASE:
        return {GROUPS[instruction.group].counts: _of_slot(table, instruction)}
    if op == Op.EXCHANGE:  # the mean over the ranks of the group
        way = table.parameters[unit].turning
        assert way is not None, instruction
        elements = way.sent if instruction.kind == SlotKind.UPDATE else way.returned
        return {GROUPS[instruction.group].counts: round(elements * way.element / way.ranks)}
    if op == Op.GATHER:
        held, element = table.parameters[unit], table.shards.param_bytes(unit)
        return {GROUPS[instruction.group].counts: ring(held.numel * element, held.shards)}
    if op == Op.REDUCE:
        step = next(step for step in table.shards.reductions(unit) if step.group == instruction.group)
        return {GROUPS[step.group].counts: _reduced_bytes(table, table.parameters[unit], step)}
    return {}


def _of_slot(table: Table, instruction: Instruction) -> int:
    """Of an exchange: the bytes that leave, if all ranks get equally many."""
    if instruction.kind in PARTS:
        return ring(table.size(instruction.slot), table.cut_over(instruction.kind)[1])
    trip = trip_of(instruction, table)
    # Where rows go by counts, one of both sizes is the most that there may be: the other one is expected.
    # What is gathered, and the gradient of that, is the larger of both.
    size = min if instruction.op == Op.EXCHANGE else max
    return ring(size(table.size(trip.source), table.size(trip.target)), trip.tensor.ranks)


def _reduced_bytes(table: Table, unit: ParameterUnit, step: Reduction) -> int:
    part = ring(step.numel * step.bytes, step.ranks)
    if step.group != unit.shard_group:
        return 2 * part
    # Where gradients are not sharded, the summed parts are gathered again.
    return part if table.zero.sharded else part + ring(step.numel * table.elements.grad, step.ranks)


def moved_by(table: Table, instruction: Instruction) -> int:
    """Bytes that an instruction moves between tiers, on its lane."""
    if instruction.op not in (Op.OFFLOAD, Op.FETCH):
        return 0
    slot = instruction.slot
    inside = instruction.op == Op.FETCH and slot.kind == SlotKind.PARAM_SHARD and table.size(slot) == 0
    return table.size(slot.on(Tier.HOST) if inside else slot)  # inside: of a whole unit's buffer

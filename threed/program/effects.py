"""The only dependency rule: what an instruction reads, writes, adds to, updates and frees, on which lane it
runs, and which ranks take part.

Checker, memory meter, simulator, loopback and engine all call `effects`; no other code states the rule again.

A **lane** is one queue of work: `compute`; one for each kind of group that has its own (mesh.GROUPS: dp,
tie); `send` and `recv` for each (peer, kind of slot); `d2h` and `h2d` (device to host and back); `read` and
`write` (disk to host and back); `host` (the optimizer there). Order holds within a lane; across lanes only
through slots and their memory (`order`).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from threed.base.mesh import GROUPS
from threed.program.access import Effects
from threed.program.entries import MadeTensor, ReadTensor, gradient_of
from threed.program.instruction import (
    CARRIED,
    PARTS,
    SENT,
    WHOLES,
    WORDS,
    Instruction,
    Op,
    Slot,
    SlotKind,
    Tier,
)
from threed.program.table import Table
from threed.program.trips import comes_again, trip_of
from threed.program.turning import arrival_of, part_of, travels


def effects(instruction: Instruction, table: Table, position: int) -> Effects:
    """Effects of one instruction of a position's program. Raises KeyError where the instruction names
    something that does not exist."""
    if (instruction.keep, instruction.gradients, instruction.age, instruction.part) not in _WORDS:
        raise KeyError(f"{instruction}: the words that a field may hold are {WORDS}")
    return _EFFECTS[instruction.op](instruction, table, position)  # its KeyError names the instruction


_WORDS = frozenset(product(*(WORDS[field] for field in ("keep", "gradients", "age", "part"))))


# ---- forward and backward


def _computes(item: Instruction, table: Table) -> None:
    if not 0 <= item.unit < len(table.units):
        raise KeyError(str(item))


def _forward(item: Instruction, table: Table, _: int) -> Effects:
    _computes(item, table)
    unit, microbatch = item.turn
    reads = _reads(item, table)
    before = _slots(SlotKind.ACT, unit - 1, microbatch, unit > 0)
    after = _slots(SlotKind.ACT, unit, microbatch, unit < table.last)
    forward_only, made = item.keep in ("none", "logits"), item.keep == "logits"
    keeps = SlotKind.KEPT if item.keep == "input" else SlotKind.SAVED
    saved = _slots(keeps, unit, microbatch, not forward_only)
    saved += _slots(SlotKind.LOGITS, unit, microbatch, made and table.makes_logits(unit))
    spends = item.keep == "all"
    unused = [slot for slot, read in reads if (read.last if forward_only else spends and read.spent)]
    if forward_only:  # what has left and stays is not gathered again
        unused += [slot._replace(kind=read.again) for slot, read in reads if read.again]
    loss = (Slot(SlotKind.LOSS),) if table.units[unit].loss and not made else ()
    return Effects("compute", (*_params(table, unit), *before, *(slot for slot, _ in reads)),
                   (*after, *saved, *(slot for slot, _ in _makes(item, table))), adds=loss,
                   frees=(*before, *unused), groups=table.groups_of(item))


def _recompute(item: Instruction, table: Table, _: int) -> Effects:
    _computes(item, table)
    unit, microbatch = item.turn
    kept, makes, reads = (Slot(SlotKind.KEPT, unit, microbatch),), _makes(item, table), _reads(item, table)
    fixed = [slot for slot, made in makes if not made.grad]
    again = [slot for slot, made in makes if made.grad and not made.over]
    return Effects("compute", (*_params(table, unit), *kept, *(slot for slot, _ in reads), *fixed),
                   (Slot(SlotKind.SAVED, unit, microbatch),),
                   updates=(*again,), frees=(*kept, *(slot for slot, read in reads if read.spent)),
                   groups=table.groups_of(item))


def _backward(item: Instruction, table: Table, _: int) -> Effects:
    """BACKWARD, and BACKWARD_INPUT, which leaves the weights' gradients to BACKWARD_WEIGHT."""
    _computes(item, table)
    unit, microbatch = item.turn
    makes, reads = _makes(item, table), _reads(item, table)
    used = Slot(SlotKind.SAVED, unit, microbatch), *_slots(SlotKind.GRAD, unit, microbatch, unit < table.last)
    used += tuple(slot for slot, made in makes if not made.leaves)
    used += tuple(slot._replace(kind=made.becomes) for slot, made in makes if made.over and not made.grad)
    # readers of what it makes ran backward before this unit
    used += tuple(gradient_of(slot) for slot, made in makes if made.grad)
    adds = tuple(gradient_of(slot) for slot, read in reads if read.grad)
    writes = _slots(SlotKind.GRAD, unit - 1, microbatch, unit > 0)
    if item.op == Op.BACKWARD:
        adds = (*_wgrads(table, unit), *adds)
    else:
        writes = (*writes, Slot(SlotKind.OPERANDS, unit, microbatch))
    came = _came(item, table)
    needs = (*_params(table, unit), *used, *(slot for slot, read in reads if not read.spent))
    return Effects("compute", needs, writes, adds=adds, frees=(*used, *came), groups=table.groups_of(item))


def _backward_weight(item: Instruction, table: Table, _: int) -> Effects:
    _computes(item, table)
    operands = (Slot(SlotKind.OPERANDS, item.unit, item.microbatch), *_came(item, table))
    return Effects("compute", operands, adds=_wgrads(table, item.unit), frees=operands,
                   groups=table.groups_of(item))


def _makes(item: Instruction, table: Table) -> list[tuple[Slot, MadeTensor]]:
    return [(Slot(made.name, *item.turn), made) for made in table.units[item.unit].makes]


def _reads(item: Instruction, table: Table) -> list[tuple[Slot, ReadTensor]]:
    return [(Slot(read.name, read.unit, item.microbatch), read) for read in table.units[item.unit].reads]


def _came(item: Instruction, table: Table) -> list[Slot]:
    """What came from other ranks, and a backward reads for the last time. It is an operand of weights'
    gradients, too, unless it came twice."""
    again = {Op.BACKWARD: (True, False), Op.BACKWARD_INPUT: (True,), Op.BACKWARD_WEIGHT: (False,)}[item.op]
    return [slot for slot, read in _reads(item, table)
            if read.came and not read.spent and bool(read.again) in again]


def _slots(kind: str, unit: int, microbatch: int, exists: bool) -> tuple[Slot, ...]:
    return (Slot(kind, unit, microbatch),) if exists else ()


def _params(table: Table, unit: int) -> tuple[Slot, ...]:
    return tuple(Slot(SlotKind.PARAM, p) for p in table.units[unit].parameters)


def _wgrads(table: Table, unit: int) -> tuple[Slot, ...]:
    return tuple(Slot(SlotKind.WEIGHT_GRAD, p) for p in table.units[unit].parameters
                 if table.parameters[p].trains)


# ---- messages


def _send(item: Instruction, table: Table, _: int) -> Effects:
    slot = (_message(item, table),)
    return Effects(f"send {item.peer} {item.kind}", slot, frees=slot)


def _recv(item: Instruction, table: Table, _: int) -> Effects:
    return Effects(f"recv {item.peer} {item.kind}", writes=(_message(item, table),))


def _message(item: Instruction, table: Table) -> Slot:
    if item.kind not in SENT and not table.sent_in_parts(WHOLES.get(item.kind, ""), item.unit):
        raise KeyError(f"messages are act or grad, or parts of them where tp cuts them, not '{item.kind}'")
    return item.slot


# ---- tensors of a micro-batch and other ranks


def _of_slot(item: Instruction, table: Table) -> Effects:
    return _cut(item, table) if item.kind in PARTS else _travel(item, table)


def _cut(item: Instruction, table: Table) -> Effects:
    """RELEASE: of a kept input, or a message, which is the same on all ranks of a group, each keeps its part;
    GATHER: all get all of it."""
    (group, _), upper = table.cut_over(item.kind), item.slot
    moves = _keeps(item, table) if item.kind == SlotKind.KEPT else table.sent_in_parts(item.kind, item.unit)
    if not group or not moves or item.group != (group if item.op == Op.GATHER else ""):
        raise KeyError(f"{item}: it is not cut{f' over {group}' if group else ''}")
    part = (upper._replace(kind=PARTS[item.kind]),)
    source, target = ((upper,), part) if item.op == Op.RELEASE else (part, (upper,))
    return Effects("compute", source, target, frees=source, groups=(group,) if item.op == Op.GATHER else ())


def _travel(item: Instruction, table: Table) -> Effects:
    trip = trip_of(item, table)
    return Effects(GROUPS[item.group].lane, (trip.source, *trip.counts), (trip.target,),
                   frees=(trip.source,) if trip.back or trip.tensor.leaves else (), groups=(item.group,))


# ---- parameters and gradients


def _gather(item: Instruction, table: Table, _: int) -> Effects:
    if item.of_slot:
        return _of_slot(item, table)
    unit = table.parameters.get(item.unit)
    if unit is None or item.group != unit.shard_group:
        raise KeyError(f"p{item.unit} is sharded over {unit.shard_group if unit else 'nothing'}, not "
                       f"'{item.group}'")
    if unit.whole and not unit.trains:
        raise KeyError(f"every rank holds all of p{item.unit}, and nothing of it is gathered")
    part, whole = (Slot(SlotKind.PARAM_SHARD, item.unit),), (Slot(SlotKind.PARAM, item.unit),)
    resident = table.shards.weight(item.unit) in part  # otherwise it was fetched for this GATHER
    return Effects(GROUPS[item.group].lane, part, whole, frees=() if resident else part, groups=(item.group,))


def _release(item: Instruction, table: Table, _: int) -> Effects:
    if item.of_slot and item.kind in PARTS:
        return _cut(item, table)
    if item.of_slot and not comes_again(item.slot, table):
        raise KeyError(f"{item}: it does not come again")
    return Effects("compute", frees=(item.slot if item.of_slot else Slot(SlotKind.PARAM, item.unit),))


def _reduce(item: Instruction, table: Table, _: int) -> Effects:
    """A gradient is summed over a group, on its way from `wgrad` to `gshard`."""
    if item.of_slot:
        return _travel(item, table)
    unit = item.unit
    step = next((step for step in table.shards.reductions(unit) if step.group == item.group), None)
    if step is None:
        raise KeyError(f"p{unit} has no reduction over '{item.group}'")
    source, target, lane = (Slot(step.takes, unit),), (Slot(step.makes, unit),), GROUPS[item.group].lane
    if lane == "compute":  # summed in place: nothing may be added to `wgrad` until the next reduction
        if source == target:
            return Effects(lane, updates=target, groups=(item.group,))
        return Effects(lane, source, target, groups=(item.group,))
    frees = (*source, Slot(SlotKind.WEIGHT_GRAD, unit)) if step.takes == SlotKind.TP_SUM else source
    # From ZeRO-2 on a step has several such reductions: their results are added up on the device of the rank
    # that keeps them. (Where `streams` says so, they are added up on its host instead.)
    several = (item.group == table.parameters[unit].shard_group and not table.shards.in_place(unit)
               and not table.shards.streams(unit))
    writes, adds = ((), target) if several else (target, ())
    return Effects(lane, source, writes, adds, frees=frees, groups=(item.group,))


def _clip(item: Instruction, table: Table, position: int) -> Effects:
    held = table.stepped(position)
    gradients = () if item.gradients == "none" else tuple(map(table.shards.gradient, held))
    loss = (Slot(SlotKind.LOSS),) if any(table.units[u].loss for u in table.units_of(position)) else ()
    waiting = table.waiting(position) if item.gradients == "wait" else ()
    freed = (gradients if item.gradients == "drop" else
             tuple(slot._replace(kind=SlotKind.GRAD_SHARD) for slot in waiting))
    return Effects("compute", (*gradients, *loss), (Slot(SlotKind.SCALE), *waiting), frees=(*freed, *loss),
                   groups=("world",))


def _step(item: Instruction, table: Table, position: int) -> Effects:
    unit = item.unit
    if not table.parameters[unit].trains:
        raise KeyError(f"p{unit} is frozen")
    if item.age and not (table.update.overlap and table.shards.away(unit)):
        raise KeyError(f"{item}: no gradient of p{unit} waits for the next step")
    snapshot = tuple[Slot, ...]()
    tier = Tier.HOST if table.shards.away(unit) else Tier.DEVICE
    gradient = (Slot(SlotKind.PREVIOUS_GRAD if item.age else SlotKind.GRAD_SHARD, unit, tier=tier),)
    # The scale of a gradient of the step before is known since the CLIP of that step.
    reads = gradient if item.age else (*gradient, Slot(SlotKind.SCALE))
    if table.update.snapshots and table.saves(position, unit):  # STEP overwrites what the snapshot copies
        snapshot = (Slot(SlotKind.SNAPSHOT, unit, tier=Tier.HOST),)
    if item.part or table.parameters[unit].turning is not None:
        return _part(item, table, snapshot)
    return _stepped(table, unit, (*reads, *snapshot), gradient)


def _stepped(table: Table, unit: int, reads: tuple[Slot, ...], frees: tuple[Slot, ...]) -> Effects:
    """A step, where the state is: new weights go to their home, or to a buffer of the host."""
    weight, state = table.shards.weight(unit), table.shards.state(unit)
    if state.tier == Tier.DEVICE:
        return Effects("compute", reads, updates=(weight, state), frees=frees)
    host_state, host_weight = state.on(Tier.HOST), weight.on(Tier.HOST)
    if weight == host_weight:
        return Effects("host", reads, updates=(weight, host_state), frees=frees)
    return Effects("host", reads, (host_weight,), updates=(host_state,), frees=frees)


def _part(item: Instruction, table: Table, snapshot: tuple[Slot, ...]) -> Effects:
    used, made, steps = part_of(item, table)
    reads = used, Slot(SlotKind.SCALE)
    if not steps:
        return Effects("compute", reads, made, frees=(used,))
    if item.part == "begin" and table.shards.away(item.unit):  # weights change with `end`
        return Effects("host", (*reads, *snapshot), made,
                       updates=(table.shards.state(item.unit).on(Tier.HOST),), frees=(used,))
    stepped = _stepped(table, item.unit, (*reads, *snapshot), (used,))
    return stepped._replace(writes=(*stepped.writes, *made))


def _exchange(item: Instruction, table: Table, _: int) -> Effects:
    source, arrives = (item.slot,), arrival_of(item, table)
    if arrives is None:
        return _travel(item, table)
    return Effects(GROUPS[item.group].lane, source, (arrives,), frees=source, groups=(item.group,))


# ---- moves between forms and tiers


def _move(item: Instruction, table: Table, position: int) -> Effects:
    """OFFLOAD and FETCH, by the kind of slot."""
    move = _MOVES.get(item.kind)
    if move is None:
        raise KeyError(f"{item.op} does not move '{item.slot}'")
    return move(item, table, position)


_LANES = {(Op.OFFLOAD, Tier.DEVICE): "d2h", (Op.FETCH, Tier.DEVICE): "h2d", (Op.OFFLOAD, Tier.HOST): "write",
          (Op.FETCH, Tier.HOST): "read"}


def _move_activation(item: Instruction, table: Table, _: int) -> Effects:
    """A kept input goes to the host, or comes back."""
    upper = item.slot
    moves = upper.kind in (SlotKind.KEPT, SlotKind.KEPT_PART) and _keeps(item, table)
    if not moves or item.tier != Tier.DEVICE:
        raise KeyError(str(item))
    source, target = (upper, upper.below) if item.op == Op.OFFLOAD else (upper.below, upper)
    return Effects(_LANES[item.op, item.tier], (source,), (target,), frees=(source,))


def _keeps(item: Instruction, table: Table) -> bool:
    return 0 <= item.unit < len(table.units) and table.keeps_stream(item.unit)


def _of_unit(move: Callable[[Instruction, Table], Effects | None],
             ) -> Callable[[Instruction, Table, int], Effects]:
    """A move of a parameter unit's slot between tiers. Where `move` returns None there is no such move."""

    def checked(item: Instruction, table: Table, _: int) -> Effects:
        legal = ((item.op, item.tier) in _LANES and item.unit in table.parameters
                 and item.microbatch < 0 and not item.age)
        effect = move(item, table) if legal else None
        if effect is None:
            raise KeyError(f"{item.op} does not move '{item.slot}'")
        return effect

    return checked


def _move_gradient(item: Instruction, table: Table) -> Effects | None:
    """A gradient goes to the host, where STEP reads it: once, before its STEP, or part by part."""
    upper, streams = item.slot, table.shards.streams(item.unit)
    waits = upper.kind == SlotKind.PREVIOUS_GRAD
    if (item.op != Op.OFFLOAD or upper.tier != Tier.DEVICE or not table.shards.away(item.unit)
            or (waits and (streams or not table.update.overlap))):
        return None
    writes, adds = ((), (upper.below,)) if streams else ((upper.below,), ())
    return Effects("d2h", (upper,), writes, adds, frees=(upper,))


def _move_matrices(item: Instruction, table: Table) -> Effects | None:
    """FETCH takes an update from the host to the device, to be turned. OFFLOAD takes its direction back."""
    upper = item.slot
    if upper.tier != Tier.DEVICE or not travels(upper, table) or item.op != CARRIED[upper.kind]:
        return None
    source, target = (upper, upper.below) if item.op == Op.OFFLOAD else (upper.below, upper)
    return Effects(_LANES[item.op, upper.tier], (source,), (target,), frees=(source,))


def _move_state(item: Instruction, table: Table) -> Effects | None:
    """Optimizer state goes between host and disk: only one of the two holds it."""
    upper = item.slot
    if upper.tier != Tier.HOST or table.shards.state(item.unit) != upper.below:
        return None
    source, target = (upper, upper.below) if item.op == Op.OFFLOAD else (upper.below, upper)
    return Effects(_LANES[item.op, upper.tier], (source,), (target,), frees=(source,))


def _move_weight(item: Instruction, table: Table) -> Effects | None:
    """A weight goes up for a GATHER, or to its home tier after the host has stepped it."""
    upper, weight = item.slot, table.shards.weight(item.unit)
    lower, lane = upper.below, _LANES[item.op, item.tier]
    if item.op == Op.FETCH and upper == weight and table.shards.state(item.unit).tier != Tier.DEVICE:
        return Effects(lane, (lower,), updates=(upper,), frees=(lower,))
    if item.op == Op.FETCH and upper.kind == SlotKind.PARAM_SHARD and weight.tier.depth >= lower.tier.depth:
        return Effects(lane, (lower,), (upper,), frees=() if lower == weight else (lower,))
    if item.op == Op.OFFLOAD and lower == weight and upper.tier == Tier.HOST:
        return Effects(lane, (upper,), updates=(lower,), frees=(upper,))
    return None


def _move_snapshot(item: Instruction, table: Table, position: int) -> Effects:
    """Copy to the host what a checkpoint keeps of a parameter unit."""
    unit = item.unit
    saves = table.update.snapshots and unit in table.copied(position)
    if item.op != Op.OFFLOAD or item.tier != Tier.DEVICE or item.microbatch >= 0 or item.age or not saves:
        raise KeyError(str(item))
    state = table.shards.state(unit)
    lane = "d2h" if state.tier == Tier.DEVICE else "host"  # a copy inside the host is a thread's work
    return Effects(lane, (table.shards.weight(unit), state), updates=(item.slot.below,))


_MOVES: dict[str, Callable[[Instruction, Table, int], Effects]] = {
    **dict.fromkeys((SlotKind.KEPT, SlotKind.KEPT_PART), _move_activation),
    **dict.fromkeys((SlotKind.GRAD_SHARD, SlotKind.PREVIOUS_GRAD), _of_unit(_move_gradient)),
    SlotKind.STATE: _of_unit(_move_state),
    **dict.fromkeys(CARRIED, _of_unit(_move_matrices)),
    **dict.fromkeys((SlotKind.PARAM, SlotKind.PARAM_SHARD), _of_unit(_move_weight)),
    SlotKind.SNAPSHOT: _move_snapshot,
}
_EFFECTS: dict[Op, Callable[[Instruction, Table, int], Effects]] = {
    Op.FORWARD: _forward,
    Op.RECOMPUTE: _recompute,
    **dict.fromkeys((Op.BACKWARD, Op.BACKWARD_INPUT), _backward),
    Op.BACKWARD_WEIGHT: _backward_weight,
    Op.SEND: _send,
    Op.RECV: _recv,
    Op.GATHER: _gather,
    Op.RELEASE: _release,
    Op.REDUCE: _reduce,
    Op.EXCHANGE: _exchange,
    Op.CLIP: _clip,
    Op.STEP: _step,
    **dict.fromkeys((Op.OFFLOAD, Op.FETCH), _move),
}
assert set(_EFFECTS) == set(Op)

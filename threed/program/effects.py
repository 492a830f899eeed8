"""The only dependency rule: what an instruction reads, writes, adds to, updates and frees, and on which lane it runs.

Checker, memory meter, simulator, loopback and engine all call `effects`; nobody restates it.

A **lane** is one queue of work: `compute`; `dp` (collectives over dp and its sub-groups); `tie`; `send` and `recv` for
each (peer, act or grad); `d2h` and `h2d` (device to host and back); `read` and `write` (disk to host and back); `host` (the
optimizer there). Order holds within a lane; across lanes only through slots: using a slot waits for it.
"""

from __future__ import annotations

from itertools import compress
from typing import NamedTuple

from threed.program.instruction import COMPUTE, MESSAGES, MOVES, TIERS, Instruction, Op, Slot, at, below, tier
from threed.program.table import Table, gradient_kind

# What `keep` may be. Gradients that CLIP looks at are kept for STEP (all), or wait for a later one, or are dropped; none: there
# are no gradients.
KEEPS = {Op.FORWARD: ("all", "input", "none"), Op.CLIP: ("all", "later", "drop", "none"), Op.OFFLOAD: ("all", "later")}


class Effects(NamedTuple):
    lane: str
    reads: tuple[Slot, ...] = ()
    writes: tuple[Slot, ...] = ()  # must not be alive before
    adds: tuple[Slot, ...] = ()  # alive or not; not after the sum has been read
    updates: tuple[Slot, ...] = ()  # alive before and after, with another value
    frees: tuple[Slot, ...] = ()  # alive before, not after; happens last


def effects(instruction: Instruction, table: Table, position: int) -> Effects:
    """Effects of one instruction of the program of a pipeline position. KeyError: it names what does not exist."""
    known = table.known.get(instruction)
    if known is None:
        known = _effects(instruction, table, position)
        if instruction.op in COMPUTE:  # the same at every position, and asked for by one pass after another
            table.known[instruction] = known
    return known


def _effects(instruction: Instruction, table: Table, position: int) -> Effects:
    op, unit, microbatch, group, peer, keep = instruction
    if (op in COMPUTE and not 0 <= unit < len(table.units)) or keep not in KEEPS.get(op, ("all",)):
        raise KeyError(str(instruction))
    if op == Op.FORWARD:
        before = _slots("act", unit - 1, microbatch, unit > 0)
        after = _slots("act", unit, microbatch, unit < table.last)
        saved = _slots("kept" if keep == "input" else "saved", unit, microbatch, keep != "none")
        loss = (Slot("loss"),) if table.units[unit].loss else ()
        made, shared = _handed(table, unit, microbatch)
        last = [read.last for read in table.units[unit].reads]
        done = compress(shared, last) if keep == "none" else ()
        return Effects("compute", (*_params(table, unit), *before, *shared), (*after, *saved, *made), adds=loss,
                       frees=(*before, *done))
    if op == Op.RECOMPUTE:
        kept, (made, shared) = (Slot("kept", unit, microbatch),), _handed(table, unit, microbatch)
        return Effects("compute", (*_params(table, unit), *kept, *shared), (Slot("saved", unit, microbatch),), updates=made,
                       frees=kept)
    if op in MOVES:
        if group == "snapshot":
            return _snapshot(instruction, table, position)
        return _keep(instruction, table) if group in ("kept", "kpart") else _state(instruction, table)
    if op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        used = (Slot("saved", unit, microbatch), *_slots("grad", unit, microbatch, unit < table.last))
        made = _slots("grad", unit - 1, microbatch, unit > 0)
        handed, shared = _handed(table, unit, microbatch)
        used += (*handed, *map(_gradient_of, handed))  # its readers' backwards come before its own
        reads, adds = (*_params(table, unit), *used, *shared), tuple(map(_gradient_of, shared))
        if op == Op.BACKWARD:
            return Effects("compute", reads, made, adds=(*_wgrads(table, unit), *adds), frees=used)
        return Effects("compute", reads, (*made, Slot("operands", unit, microbatch)), adds=adds, frees=used)
    if op == Op.BACKWARD_WEIGHT:
        operands = (Slot("operands", unit, microbatch),)
        return Effects("compute", operands, adds=_wgrads(table, unit), frees=operands)
    if op in MESSAGES and group not in ("act", "grad"):
        raise KeyError(f"messages are act or grad, not '{group}'")
    if op == Op.SEND:
        slot = (Slot(group, unit, microbatch),)
        return Effects(f"send {peer} {group}", slot, frees=slot)
    if op == Op.RECV:
        return Effects(f"recv {peer} {group}", writes=(Slot(group, unit, microbatch),))
    if op == Op.GATHER:
        if group != table.shard_group:
            raise KeyError(f"p{unit} is sharded over {table.shard_group}, not '{group}'")
        part = (Slot("pshard", unit),)
        here = unit not in table.parameters or table.weight(unit) in part  # else it was fetched for this
        return Effects("dp", part, (Slot("param", unit),), frees=() if here else part)
    if op == Op.RELEASE:
        return Effects("compute", frees=(Slot("param", unit),))
    if op == Op.REDUCE:
        return _reduce(instruction, table)
    if op == Op.CLIP:
        gradients = () if keep == "none" else tuple(_gradient(table, p) for p in table.held(position))
        loss = (Slot("loss"),) if table.makes_loss(position) else ()
        if keep == "later":
            waiting = tuple(Slot("host_gprev", p) for p in table.held(position))
            return Effects("compute", (*gradients, *loss), (Slot("scale"), *waiting), frees=(*gradients, *loss))
        dropped = gradients if keep == "drop" else ()
        return Effects("compute", (*gradients, *loss), (Slot("scale"),), frees=(*dropped, *loss))
    if op == Op.STEP:
        return _step(instruction, table, position)
    raise AssertionError(op)


def _step(instruction: Instruction, table: Table, position: int) -> Effects:
    unit, group = instruction.unit, instruction.group
    if group not in ("", "prev"):
        raise KeyError(f"STEP is of this step's gradient, or of 'prev', not '{group}'")
    gradient, weight, state = (_gradient(table, unit),), table.weight(unit), table.state(unit)
    reads = (*gradient, Slot("scale"))
    if group == "prev":
        reads = gradient = (Slot("host_gprev", unit),)
    if table.snapshots and table.saves(position, unit):  # it overwrites what is being copied
        reads = (*reads, Slot("host_snapshot", unit))
    if tier(state.kind) == "device":
        return Effects("compute", reads, updates=(weight, state), frees=gradient)
    host_state = (at("host", Slot("state", unit)),)
    if tier(weight.kind) == "host":
        return Effects("host", reads, updates=(weight, *host_state), frees=gradient)
    return Effects("host", reads, (_on_host(weight),), updates=host_state, frees=gradient)


def _snapshot(instruction: Instruction, table: Table, position: int) -> Effects:
    """What a checkpoint keeps of a parameter unit is copied to the host. `keep=later`: with the gradients that wait."""
    op, unit, microbatch, _, _, keep = instruction
    saves = table.snapshots and unit in table.held(position) and table.saves(position, unit)
    if op != Op.OFFLOAD or microbatch >= 0 or not saves:
        raise KeyError(str(instruction))
    waiting = (Slot("host_gprev", unit),) if keep == "later" else ()
    state = table.state(unit)
    lane = "d2h" if tier(state.kind) == "device" else "host"  # inside the host it is a thread's work
    return Effects(lane, (table.weight(unit), state, *waiting), updates=(Slot("host_snapshot", unit),))


def _keep(instruction: Instruction, table: Table) -> Effects:
    """A kept input goes into another form, or to the host, or comes back."""
    op, unit, microbatch, kind, *_ = instruction
    if not 0 <= unit < len(table.units) or not table.keeps_stream(unit) or (op in (Op.SPLIT, Op.JOIN) and kind != "kept"):
        raise KeyError(str(instruction))
    here = Slot(kind, unit, microbatch)
    lane = {Op.OFFLOAD: "d2h", Op.FETCH: "h2d"}.get(op, "compute")
    away = Slot("kpart", unit, microbatch) if lane == "compute" else below(here)
    taken, made = (here, away) if op in (Op.SPLIT, Op.OFFLOAD) else (away, here)
    return Effects(lane, (taken,), (made,), frees=(taken,))


def _state(instruction: Instruction, table: Table) -> Effects:
    """A gradient goes down, a parameter comes up, optimizer state goes between host and disk."""
    op, unit, microbatch, kind, *_ = instruction
    if op in (Op.SPLIT, Op.JOIN) or unit not in table.parameters or microbatch >= 0:
        raise KeyError(str(instruction))
    here = Slot(kind, unit)
    away, weight, state = below(here), table.weight(unit), table.state(unit)
    lane = {("device", Op.OFFLOAD): "d2h", ("device", Op.FETCH): "h2d", ("host", Op.OFFLOAD): "write",
            ("host", Op.FETCH): "read"}.get((tier(kind), op), "")
    if op == Op.OFFLOAD and kind == "gshard" and tier(state.kind) != "device":
        # Once, where it is added up on the device: there it may lie in what the next backward would write.
        made = {"adds": (away,)} if table.streams(unit) else {"writes": (away,)}
        return Effects(lane, (here,), **made, frees=(here,))
    if away == state and tier(kind) == "host":  # between host and disk: one of the two has it
        taken, made = (here, away) if op == Op.OFFLOAD else (away, here)
        return Effects(lane, (taken,), (made,), frees=(taken,))
    if op == Op.FETCH and here == weight and tier(state.kind) != "device":  # what the host has stepped
        return Effects(lane, (away,), updates=(here,), frees=(away,))
    if op == Op.FETCH and kind in ("pshard", "host_pshard") and _home(weight) >= _home(away):
        return Effects(lane, (away,), (here,), frees=() if away == weight else (away,))
    if op == Op.OFFLOAD and away == weight and tier(kind) == "host":
        return Effects(lane, (here,), updates=(away,), frees=(here,))
    raise KeyError(f"{op} does not move '{here}'")


def _home(slot: Slot) -> int:
    return TIERS.index(tier(slot.kind))


def _on_host(weight: Slot) -> Slot:
    """What the host's step leaves there, to be brought to where the weights live."""
    return below(weight) if tier(weight.kind) == "device" else weight._replace(kind=weight.kind.replace("disk_", "host_"))


def _gradient(table: Table, unit: int) -> Slot:
    """What CLIP and STEP read."""
    return Slot("gshard" if table.parameters[unit].state_home == "device" else "host_gshard", unit)


def chain(table: Table, unit: int) -> list[tuple[str, Slot, Slot]]:
    """The reductions of a parameter unit's gradient: (group, slot it takes, slot it makes), in order."""
    groups = table.parameters[unit].reductions
    steps, taken = [], "wgrad"
    for group in groups:
        made = "gshard" if group == groups[-1] else _MADE[group]
        steps.append((group, Slot(taken, unit), Slot(made, unit)))
        taken = made
    return steps


_MADE = {"tp": "wsum", "dp": "gpart", "shard": "gpart", "replica": "gfull"}


def _reduce(instruction: Instruction, table: Table) -> Effects:
    for group, taken, made in chain(table, instruction.unit) if instruction.unit in table.parameters else ():
        if group == instruction.group:
            if group == "tp":  # summed where it lies: nothing may be added to it before that has gone on
                return Effects("compute", (taken,), (made,))
            lane = "tie" if group == "tie" else "dp"
            frees = (taken, Slot("wgrad", instruction.unit)) if taken.kind == "wsum" else (taken,)
            # One of several, added up on the rank that keeps it: on its device, or as they come down to its host.
            if group == table.shard_group and table.zero_stage >= 2 and not table.streams(instruction.unit):
                return Effects(lane, (taken,), adds=(made,), frees=frees)
            return Effects(lane, (taken,), (made,), frees=frees)
    raise KeyError(f"p{instruction.unit} has no reduction over '{instruction.group}'")


def _slots(kind: str, unit: int, microbatch: int, exists: bool) -> tuple[Slot, ...]:
    return (Slot(kind, unit, microbatch),) if exists else ()


def _handed(table: Table, unit: int, microbatch: int) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """What a unit makes for later units of its stage, and what it reads of earlier ones."""
    makes, reads = table.units[unit].makes, table.units[unit].reads
    return (tuple(Slot(handed.name, unit, microbatch) for handed in makes),
            tuple(Slot(read.name, read.unit, microbatch) for read in reads))


def _gradient_of(handed: Slot) -> Slot:
    return handed._replace(kind=gradient_kind(handed.kind))


def _params(table: Table, unit: int) -> tuple[Slot, ...]:
    return tuple(Slot("param", p) for p in table.units[unit].parameters)


def _wgrads(table: Table, unit: int) -> tuple[Slot, ...]:
    return tuple(Slot("wgrad", p) for p in table.units[unit].parameters)

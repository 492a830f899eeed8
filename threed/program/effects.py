"""The only dependency rule: what an instruction reads, writes, adds to, updates and frees, and on which lane it runs.

Checker, memory meter, simulator, loopback and engine all call `effects`; nobody restates it.

A **lane** is one queue of work: `compute`; `dp` (collectives over dp and its sub-groups); `tie`; `send` and `recv` for
each (peer, act or grad); `d2h` and `h2d` (device to host and back). Order holds within a lane; across lanes only through
slots: using a slot waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

from threed.program.instruction import COMPUTE, MESSAGES, MOVES, Instruction, Op, Slot
from threed.program.table import Table


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
    if ((op in COMPUTE or op in MOVES) and not 0 <= unit < len(table.units)) or keep not in ("all", "input", "none"):
        raise KeyError(str(instruction))
    if op == Op.FORWARD:
        before = _slots("act", unit - 1, microbatch, unit > 0)
        after = _slots("act", unit, microbatch, unit < table.last)
        saved = _slots("kept" if keep == "input" else "saved", unit, microbatch, keep != "none")
        loss = (Slot("loss"),) if unit == table.last else ()
        return Effects("compute", (*_params(table, unit), *before), (*after, *saved), adds=loss, frees=before)
    if op == Op.RECOMPUTE:
        kept = (Slot("kept", unit, microbatch),)
        return Effects("compute", (*_params(table, unit), *kept), (Slot("saved", unit, microbatch),), frees=kept)
    if op in MOVES:
        return _move(instruction)
    if op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        used = (Slot("saved", unit, microbatch), *_slots("grad", unit, microbatch, unit < table.last))
        made = _slots("grad", unit - 1, microbatch, unit > 0)
        if op == Op.BACKWARD:
            return Effects("compute", (*_params(table, unit), *used), made, adds=_wgrads(table, unit), frees=used)
        return Effects("compute", (*_params(table, unit), *used), (*made, Slot("operands", unit, microbatch)), frees=used)
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
        return Effects("dp", (Slot("pshard", unit),), (Slot("param", unit),))
    if op == Op.RELEASE:
        return Effects("compute", frees=(Slot("param", unit),))
    if op == Op.REDUCE:
        return _reduce(instruction, table)
    if op == Op.CLIP:
        gradients = () if keep == "none" else tuple(Slot("gshard", p) for p in table.held(position))
        loss = (Slot("loss"),) if table.position(table.last) == position else ()
        return Effects("compute", (*gradients, *loss), (Slot("scale"),), frees=loss)
    if op == Op.STEP:
        gradient = (Slot("gshard", unit),)
        stepped = (Slot("pshard" if table.sharded else "param", unit), Slot("state", unit))
        return Effects("compute", (*gradient, Slot("scale")), updates=stepped, frees=gradient)
    raise AssertionError(op)


def _move(instruction: Instruction) -> Effects:
    op, unit, microbatch, kind, *_ = instruction
    lane, there = {Op.OFFLOAD: ("d2h", f"host_{kind}"), Op.FETCH: ("h2d", f"host_{kind}")}.get(op, ("compute", "kpart"))
    if kind not in (("kept",) if lane == "compute" else ("kept", "kpart")):
        raise KeyError(f"{op} does not move '{kind}'")
    here, away = (Slot(kind, unit, microbatch),), (Slot(there, unit, microbatch),)
    taken, made = (here, away) if op in (Op.SPLIT, Op.OFFLOAD) else (away, here)
    return Effects(lane, taken, made, frees=taken)


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
            if group == table.shard_group and table.zero_stage >= 2:  # one of several, added up on the rank that keeps it
                return Effects(lane, (taken,), adds=(made,), frees=frees)
            return Effects(lane, (taken,), (made,), frees=frees)
    raise KeyError(f"p{instruction.unit} has no reduction over '{instruction.group}'")


def _slots(kind: str, unit: int, microbatch: int, exists: bool) -> tuple[Slot, ...]:
    return (Slot(kind, unit, microbatch),) if exists else ()


def _params(table: Table, unit: int) -> tuple[Slot, ...]:
    return tuple(Slot("param", p) for p in table.units[unit].parameters)


def _wgrads(table: Table, unit: int) -> tuple[Slot, ...]:
    return tuple(Slot("wgrad", p) for p in table.units[unit].parameters)

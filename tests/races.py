"""Races of a program: pairs of instructions that use the same memory, one of them to write, in no order.

A second account of what program/order.py says, from the other end: that module names waits, this one knows
what memory each instruction uses and which instructions have ended when another begins. Only lanes and waits
order instructions: the host may issue all of a program before any of it has run, as on a GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from threed.program.access import Effects
from threed.program.buffers import Buffers, pool_of, size_in
from threed.program.instruction import MESSAGES, Op, Slot, Tier
from threed.program.link import Program
from threed.program.table import Table

# A gradient as it is made and reduced; the last ones are parts of the first, or have memory of their own.
_GRADIENTS = ("wgrad", "gpart", "gfull", "gshard", "gprev")


class Race(NamedTuple):
    first: int
    then: int
    memory: str


def races(program: Program, effects: Sequence[Effects], waits: Sequence[Sequence[int]], table: Table,
          pools: Buffers) -> list[Race]:
    """All pairs of uses of the same memory of which one writes, and which nothing orders."""
    ended = _histories(program, effects, waits)
    wrong = []
    for memory, uses in _uses(effects, table, pools).items():
        writes: list[int] = []
        reads: list[int] = []
        for index, written in uses:
            others = [*writes, *reads] if written else writes
            wrong += [Race(other, index, str(memory)) for other in others
                      if other > ended[index].get(effects[other].lane, -1) and other != index]
            (writes if written else reads).append(index)
    return wrong


def _histories(program: Program, effects: Sequence[Effects],
               waits: Sequence[Sequence[int]]) -> list[dict[str, int]]:
    """For each instruction, when it begins: lane -> the latest instruction of it that has ended."""
    lanes: dict[str, dict[str, int]] = defaultdict(dict)  # the same, for what comes next on a lane
    histories: list[dict[str, int]] = []
    for index, (item, effect) in enumerate(zip(program, effects, strict=True)):
        history = dict(lanes[effect.lane])
        for need in waits[index]:
            _join(history, {**histories[need], effects[need].lane: need})
        if item.op in MESSAGES:  # it is issued where the computation is
            _join(lanes["compute"], {effects[need].lane: need for need in waits[index]})
            _join(history, lanes["compute"])
        histories.append(history)
        lanes[effect.lane] = {**history, effect.lane: index}
    return histories


def _join(into: dict[str, int], other: dict[str, int]) -> None:
    for lane, index in other.items():
        into[lane] = max(index, into.get(lane, -1))


def _uses(effects: Sequence[Effects], table: Table, pools: Buffers) -> dict[object, list[tuple[int, bool]]]:
    """Memory -> its uses in order: (index, whether it is written)."""
    uses: dict[object, list[tuple[int, bool]]] = defaultdict(list)
    free: dict[tuple[str, int], deque[object]] = {}
    for name in pools.pools():
        for numel, count in getattr(pools, name).items():
            free[name, numel] = deque((name, numel, number) for number in range(count))
    place: dict[Slot, object] = {}

    def pool(slot: Slot) -> tuple[str, int] | None:
        name = pool_of(slot, table)
        if name is None:
            return None
        sizes = sorted(getattr(pools, name))
        return name, sizes[bisect_left(sizes, size_in(slot, name, table))]

    def memory(slot: Slot) -> object:
        if slot.kind == "wsum":  # summed in place
            return memory(slot._replace(kind="wgrad"))
        if slot not in place:
            key = pool(slot)
            place[slot] = free[key].popleft() if key is not None else _own(slot, table)
        return place[slot]

    for index, effect in enumerate(effects):
        for slot in (*effect.updates, *effect.writes, *effect.adds):
            uses[memory(slot)].append((index, True))
        for slot in effect.reads:
            uses[memory(slot)].append((index, False))
        for slot in effect.frees:
            taken = place.pop(slot, None)
            if taken is not None and (key := pool(slot)) is not None:
                free[key].append(taken)
    return uses


def _own(slot: Slot, table: Table) -> object:
    """Memory of a slot that has its own. Some slots are parts of others."""
    if slot.kind == "pshard" and slot.tier == Tier.DEVICE and table.parameters[slot.unit].whole:
        return slot._replace(kind="param")
    if slot.kind == "gprev" and table.shards.streams(slot.unit):
        return slot._replace(kind="gshard")
    if slot.tier == Tier.DEVICE and slot.kind in _GRADIENTS and table.shards.in_place(slot.unit):
        return "whole gradient", slot.unit
    if slot.tier == Tier.DEVICE and slot.kind in _GRADIENTS[1:]:
        return "reduced gradient", slot.unit
    return slot


def is_no_race(program: Program, effects: Sequence[Effects], index: int, need: int) -> bool:
    """Whether a wait keeps no two uses of a slot's memory in order: kept inputs leave one at a time, and come
    back into memory from the device's allocator, whose users this account does not know."""
    kept = [program[at].kind in ("kept", "kpart") and effects[at].lane in ("d2h", "h2d")
            for at in (need, index)]
    return (kept[0] and program[need].op == Op.OFFLOAD and effects[index].lane == "compute") or (
        kept[1] and program[index].op == Op.FETCH and effects[need].lane == "compute")

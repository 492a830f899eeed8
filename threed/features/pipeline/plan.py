"""From an order to programs: stages become units, and messages are added. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from threed.base.errors import PlanError
from threed.program.forms import Forms
from threed.program.instruction import COMPUTE, SENT, Instruction, Op, Programs, SlotKind
from threed.program.pairs import cost_in_pair
from threed.program.table import Table
from threed.program.trips import leaving, trip_of
from threed.schedules.orders import Order

_OPS = {"B": Op.BACKWARD, "I": Op.BACKWARD_INPUT, "W": Op.BACKWARD_WEIGHT}


def expand(order: Order, table: Table, keep: str = "all") -> Programs:
    """Tasks of stages -> instructions of units. Backward runs through a stage's units last to first."""
    units: list[list[int]] = [[] for _ in table.stage_positions]
    for index, unit in enumerate(table.units):
        units[unit.stage].append(index)
    programs: Programs = []
    for tasks in order:
        program = []
        for kind, stage, microbatch in tasks:
            if kind == "F":
                program += [Instruction(Op.FORWARD, u, microbatch, keep=keep) for u in units[stage]]
            else:
                program += [Instruction(_OPS[kind], u, microbatch) for u in reversed(units[stage])]
        programs.append(program)
    return programs


def communicate(programs: Programs, table: Table) -> Programs:
    """Add a SEND and a RECV for every value that one position makes and another uses.

    A walk over all positions puts every event of the step in one sequence, in which a message comes as soon
    as its value is ready. The program of a position is its part of that sequence. So both ends of a channel
    agree on the order of messages; a RECV comes as early as its value can arrive; and the plan cannot
    deadlock, even where every call blocks, because the ranks can run the sequence itself.
    """
    return [[event[-1] for event in sorted(events)] for events in _events(programs, table)]


# (time, whether it comes among the compute of that moment, sequence number, instruction). Sorted, messages of
# one moment come before the compute that waits for them. But late in a step of many FLOPs (from 2^53 on), the
# time of a layer without matrix products is lost to rounding: its message comes behind it.
_Event = tuple[float, bool, int, Instruction]


def _events(programs: Programs, table: Table) -> list[list[_Event]]:
    """Walk all positions together with a clock (compute takes time in proportion to its FLOPs, messages take
    none). The events of each position."""
    clock = [0.0] * len(programs)
    lanes: list[dict[str, float]] = [{} for _ in programs]  # until when each is busy with what travels
    heads = [0] * len(programs)
    ready: dict[tuple[_Value, int], float] = {}  # a value of a micro-batch -> when it is there
    events: list[list[_Event]] = [[] for _ in programs]
    passing = [_passing(program, table, position) for position, program in enumerate(programs)]
    number, moved = 0, True
    while moved:
        moved = False
        for position, program in enumerate(programs):
            now, head, mine = clock[position], heads[position], events[position]
            while head < len(program):
                item = program[head]
                takes, reads, writes, leaves = passing[position][head]
                microbatch, start = item.microbatch, now
                for value in reads:
                    at = ready.get((value, microbatch), math.inf)
                    start = at if at > start else start
                if start == math.inf:
                    break
                mine.append((start, True, number, item))
                now = start + takes
                at_once = now == start
                for value, reader in writes:
                    ready[value, microbatch] = now
                    if reader != position:
                        kind, unit = value
                        mine.append((now, at_once, number + 1, Instruction(
                            Op.SEND, unit, microbatch, kind, peer=reader)))
                        events[reader].append((now, at_once, number + 2, Instruction(
                            Op.RECV, unit, microbatch, kind, peer=position)))
                        number += 2
                for value, lane, travels in leaves:
                    lanes[position][lane] = max(now, lanes[position].get(lane, 0.0)) + travels
                    ready[value, microbatch] = lanes[position][lane]
                number += 1
                head += 1
                moved = True
            clock[position], heads[position] = now, head
    _check_finished(programs, heads)
    return events


_Value = tuple[str, int]  # act or grad, or what has travelled, which one unit makes for another; the unit


class _Passing(NamedTuple):
    """What an instruction of some form passes to other units."""

    takes: float  # how long it computes
    reads: tuple[_Value, ...]
    writes: tuple[tuple[_Value, int], ...]  # with the position of the unit that reads it
    leaves: tuple[tuple[_Value, str, float], ...]  # what comes of what travels; the lane; how long it takes


def _passing(program: Sequence[Instruction], table: Table, position: int) -> list[_Passing]:
    """Of each instruction."""
    forms = Forms(table).of(program, position)
    known, costs = {}, table.pair is not None
    behind = {form: leaving(form.item, table) if costs and form.item.op in COMPUTE else []
              for form in dict.fromkeys(forms)}
    travelled = {(slot.kind, slot.unit) for items in behind.values() for slot in
                 (trip_of(item, table).target for item in items)}
    for form, items in behind.items():
        item, takes = form.item, 0.0
        if item.op in COMPUTE:
            takes = cost_in_pair(item, table) if costs else _cost(
                item.op, table.units[item.unit].forward_flops)
        reads, writes = (tuple((slot.kind, slot.unit) for slot in slots if slot.kind in SENT)
                         for slots in (form.effect.reads, form.effect.writes))
        reads += tuple((slot.kind, slot.unit) for slot in form.effect.reads
                       if (slot.kind, slot.unit) in travelled)
        readers = tuple(table.position(unit + (kind == SlotKind.ACT)) for kind, unit in writes)
        moves = [(trip_of(each, table).target, each) for each in items]
        known[form] = _Passing(takes, reads, tuple(zip(writes, readers, strict=True)), tuple(
            ((slot.kind, slot.unit), each.group, cost_in_pair(each, table)) for slot, each in moves))
    return [known[form] for form in forms]


def _check_finished(programs: Programs, heads: list[int]) -> None:
    stuck = [f"pp{position} {program[head]}"
             for position, (program, head) in enumerate(zip(programs, heads, strict=True))
             if head < len(program)]
    if stuck:
        raise PlanError(f"the order can never run: each of these waits for another: {'; '.join(stuck)}")


def _cost(op: Op, forward_flops: int) -> float:
    """A backward costs two forwards, and each of its halves costs one."""
    flops = forward_flops + 1.0  # + 1: even a layer without matrix products takes some time
    return 2 * flops if op == Op.BACKWARD else flops

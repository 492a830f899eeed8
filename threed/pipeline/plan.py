"""From an order to programs: stages become units, and messages are added. No torch."""

from __future__ import annotations

import math

from threed.errors import PlanError
from threed.pipeline.orders import Order
from threed.program.effects import effects
from threed.program.instruction import COMPUTE, Instruction, Op, Programs, Slot
from threed.program.table import Table

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
    result: Programs = [[] for _ in programs]
    for *_, position, instruction in sorted(_events(programs, table)):
        result[position].append(instruction)
    return result


# (time, whether it is compute, sequence number, position, instruction). Sorted, the messages of one moment
# come before the compute that waits for them.
_Event = tuple[float, bool, int, int, Instruction]


def _events(programs: Programs, table: Table) -> list[_Event]:
    """Walk all positions together with a clock (compute takes time in proportion to its FLOPs, messages take
    none)."""
    clock = [0.0] * len(programs)
    heads = [0] * len(programs)
    ready: dict[Slot, float] = {}
    events: list[_Event] = []
    costs = {(op, u): _cost(op, unit.forward_flops) for u, unit in enumerate(table.units) for op in COMPUTE}
    positions = [table.position(u) for u in range(len(table.units))]
    moved = True
    while moved:
        moved = False
        for position, program in enumerate(programs):
            now, head = clock[position], heads[position]
            while head < len(program):
                instruction = program[head]
                effect = effects(instruction, table, position)
                start = now
                for slot in effect.reads:
                    if slot.kind in _PASSED:
                        start = max(start, ready.get(slot, math.inf))
                if start == math.inf:
                    break
                events.append((start, True, len(events), position, instruction))
                now = start + costs.get((instruction.op, instruction.unit), 0.0)
                for slot in effect.writes:
                    if slot.kind in _PASSED:
                        ready[slot] = now
                        reader = positions[slot.unit + (slot.kind == "act")]
                        if reader != position:
                            for op, end, peer in ((Op.SEND, position, reader), (Op.RECV, reader, position)):
                                message = Instruction(op, slot.unit, slot.microbatch, kind=slot.kind,
                                                      peer=peer)
                                events.append((now, False, len(events), end, message))
                head += 1
                moved = True
            clock[position], heads[position] = now, head
    _check_finished(programs, heads)
    return events


_PASSED = ("act", "grad")  # kinds of slots that one unit makes for another


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

"""From an order to programs: stages become units, and messages are put in. No torch."""

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
    """Put in a SEND and a RECV wherever a value is made at one position and used at another.

    All positions are walked together with a clock (work in proportion to FLOPs, messages free), which puts
    every event of the step in one sequence: a message goes where its value is ready. Each position's program
    is that sequence's part for the position. So both ends of a channel agree on the order of messages;
    receives come as early as the value can be there; and the plan cannot deadlock, even where every call
    blocks, since the sequence itself is a way to run it.
    """
    clock = [0.0] * len(programs)
    heads = [0] * len(programs)
    ready: dict[Slot, float] = {}
    # (time, whether it is compute, sequence number, position, instruction): of events at one time, messages
    # come before the compute that they are ready for.
    events: list[tuple[float, bool, int, int, Instruction]] = []
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
                            for op, here, there in ((Op.SEND, position, reader), (Op.RECV, reader, position)):
                                message = Instruction(op, *slot[1:3], kind=slot.kind, peer=there)
                                events.append((now, False, len(events), here, message))
                head += 1
                moved = True
            clock[position], heads[position] = now, head
    if any(heads[position] < len(program) for position, program in enumerate(programs)):
        stuck = [f"pp{position} {program[heads[position]]}" for position, program in enumerate(programs)
                 if heads[position] < len(program)]
        raise PlanError(f"the order can never run: each of these waits for another: {'; '.join(stuck)}")
    events.sort()
    result: Programs = [[] for _ in programs]
    for *_, position, instruction in events:
        result[position].append(instruction)
    return result


_PASSED = ("act", "grad")  # kinds of slots that one unit makes for another


def _cost(op: Op, forward_flops: int) -> float:
    """A backward is two forwards long, each of its halves one."""
    flops = forward_flops + 1.0  # + 1: even a layer without products takes its turn
    return 2 * flops if op == Op.BACKWARD else flops

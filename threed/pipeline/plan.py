"""From an order to programs: stages become units, and messages are put in. No torch."""

from __future__ import annotations

from threed.errors import PlanError
from threed.pipeline.orders import Order
from threed.program.effects import effects
from threed.program.instruction import COMPUTE, Instruction, Op, Programs, Slot
from threed.program.table import Table


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
                program += [Instruction(Op.BACKWARD, u, microbatch) for u in reversed(units[stage])]
        programs.append(program)
    return programs


def communicate(programs: Programs, table: Table) -> Programs:
    """Put in a SEND and a RECV wherever a value is made at one position and used at another.

    All positions are walked together with a clock (work in proportion to FLOPs, messages free), which puts every event
    of the step in one sequence: a message goes where its value is ready. Each position's program is that sequence's
    part for the position. So both ends of a channel agree on the order of messages; receives come as early as the
    value can be there; and the plan cannot deadlock, even where every call blocks, since the sequence itself is a way
    to run it.
    """
    clock = [0.0] * len(programs)
    heads = [0] * len(programs)
    ready: dict[Slot, float] = {}
    events: list[tuple[float, int, int, Instruction]] = []  # (time, sequence number, position, instruction)

    def put(time: float, position: int, instruction: Instruction) -> None:
        events.append((time, len(events), position, instruction))

    moved = True
    while moved:
        moved = False
        for position, program in enumerate(programs):
            while heads[position] < len(program):
                instruction = program[heads[position]]
                effect = effects(instruction, table, position)
                needs = [slot for slot in effect.reads if slot.kind in ("act", "grad")]
                if any(slot not in ready for slot in needs):
                    break
                start = max([clock[position], *(ready[slot] for slot in needs)])
                put(start, position, instruction)
                clock[position] = start + _cost(instruction, table)
                for slot in effect.writes:
                    if slot.kind in ("act", "grad"):
                        ready[slot] = clock[position]
                        reader = table.position(slot.unit + (slot.kind == "act"))
                        if reader != position:
                            put(clock[position], position, _message(Op.SEND, slot, reader))
                            put(clock[position], reader, _message(Op.RECV, slot, position))
                heads[position] += 1
                moved = True
    if any(heads[position] < len(program) for position, program in enumerate(programs)):
        stuck = [f"pp{position} {program[heads[position]]}" for position, program in enumerate(programs)
                 if heads[position] < len(program)]
        raise PlanError(f"the order can never run: each of these waits for another: {'; '.join(stuck)}")
    # Of events at one time, messages come before the compute that they are ready for.
    events.sort(key=lambda event: (event[0], event[3].op in COMPUTE, event[1]))
    result: Programs = [[] for _ in programs]
    for _, _, position, instruction in events:
        result[position].append(instruction)
    return result


def _cost(instruction: Instruction, table: Table) -> float:
    flops = table.units[instruction.unit].forward_flops + 1.0  # + 1: even a layer without products takes its turn
    return 2 * flops if instruction.op == Op.BACKWARD else flops


def _message(op: Op, slot: Slot, peer: int) -> Instruction:
    return Instruction(op, slot.unit, slot.microbatch, slot.kind, peer)

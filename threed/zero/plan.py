"""ZeRO as a pass: where parameters are gathered and gradients reduced, and the optimizer step. No torch.

    stage 0   ... BACKWARD  REDUCE ...                     CLIP  STEP on everything
    stage 1   GATHER ... FORWARD ... BACKWARD  REDUCE ...  CLIP  STEP on this rank's shard

A unit's gradient is reduced right after the last backward that adds to it, so that the reduction overlaps with what is
left of backward. Stage 1 gathers at the start of the step, in order of first use: a unit's forward waits for its own
parameters only, so the gathers overlap with the forwards before it.
"""

from __future__ import annotations

from threed.program.effects import chain, effects
from threed.program.instruction import Instruction, Op, Programs
from threed.program.table import Table


def reductions(replicated: int, sequence_parallel: bool, tied: bool) -> tuple[str, ...]:
    """The groups that a parameter unit's gradient is reduced over, in order.

    tp: under sequence parallelism each tp rank has the gradient of its own tokens for parameters replicated over tp.
    tie: the two ends of the pipeline each have half of a tied embedding's gradient.
    """
    return (*(("tp",) if sequence_parallel and replicated else ()), "dp", *(("tie",) if tied else ()))


def train(programs: Programs, table: Table) -> Programs:
    """Add GATHER, REDUCE, CLIP and STEP to forward and backward."""
    result = []
    for position, program in enumerate(programs):
        last_add: dict[int, int] = {}
        for index, instruction in enumerate(program):
            for slot in effects(instruction, table, position).adds:
                if slot.kind == "wgrad":
                    last_add[slot.unit] = index
        out = _gathers(program, table, position)
        late = []
        for index, instruction in enumerate(program):
            out.append(instruction)
            for unit in [p for p, last in last_add.items() if last == index]:
                for group, _, _ in chain(table, unit):
                    # Both ends of the pipeline meet for a tie: at the end, where neither makes the other wait.
                    (late if group == "tie" else out).append(Instruction(Op.REDUCE, unit, group=group))
        out += late
        out.append(Instruction(Op.CLIP))
        out += [Instruction(Op.STEP, unit) for unit in table.held(position)]
        result.append(out)
    return result


def evaluate(programs: Programs, table: Table) -> Programs:
    """Forward only: gather, run, bring the loss together, release."""
    result = []
    for position, program in enumerate(programs):
        gathers = _gathers(program, table, position)
        releases = [Instruction(Op.RELEASE, gather.unit) for gather in gathers]
        result.append([*gathers, *program, Instruction(Op.CLIP, keep="none"), *releases])
    return result


def _gathers(program: list[Instruction], table: Table, position: int) -> list[Instruction]:
    """A GATHER for each parameter unit that the program uses, in order of first use."""
    if not table.sharded:
        return []
    used = dict.fromkeys(slot.unit for instruction in program
                         for slot in effects(instruction, table, position).reads if slot.kind == "param")
    return [Instruction(Op.GATHER, unit, group="dp") for unit in used]

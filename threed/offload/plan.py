"""Offload as a pass: where gradients go down to the host, are stepped there, and parameters come up again. No
torch.

    state on the host     ... REDUCE  OFFLOAD gshard ...  CLIP  STEP (on the host)  FETCH pshard
    on disk, too          ...                             CLIP  FETCH host_state  STEP  OFFLOAD host_state ...
    parameters there      ... FETCH pshard  GATHER ... RELEASE ...

A gradient goes down as soon as it is reduced. Units are stepped one after the other: while one is stepped,
the state of the next is read from disk and the parameters of the one before come up, so two or three units at
a time are on their way. Units whose state is on the device are stepped meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

from threed.program.instruction import Instruction, Op, Programs, Tier
from threed.program.table import DELAYED_STEPS, Table

Program = list[Instruction]


def homes(sizes: dict[int, int], ratio: float, home: Tier) -> dict[int, Tier]:
    """Parameter unit -> where its state lives, such that a share of `ratio` of all `sizes` is at `home`, as
    nearly as units allow: largest first, a unit goes there as long as that brings the share nearer to it."""
    goal, there = ratio * sum(sizes.values()), 0
    found = {}
    for unit, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        goes = abs(there + size - goal) < abs(there - goal)
        found[unit] = home if goes else Tier.DEVICE
        there += size * goes
    return found


def optimizer(programs: Programs, table: Table) -> Programs:
    """Gradients down, steps on the host, parameters up."""
    result = []
    for position, program in enumerate(programs):
        away = _away(table, position)
        if not away:
            result.append(program)
            continue
        out, here = _down(program, table, away)
        turns = _turns(away, table, Instruction(Op.STEP),
                       lambda unit: [*_weights_home(unit, table), *_state_home(unit, table)])
        result.append([*out, *turns[0], *turns[1], *here, *(item for turn in turns[2:] for item in turn)])
    return result


def _delay(programs: Programs, table: Table, steps: tuple[str, ...]) -> Programs:
    """The same, one step late. `steps`: whose gradients are stepped, of the step before (prev) and of this
    one ("").

        train   [STEP prev, a unit at a time, beside forward and backward]  FETCH weights  CLIP: this step's
                gradients wait
        enter   forward and backward                                                       CLIP: this step's
                gradients wait
        drain   as train                                                                   CLIP  STEP ...

    Everything is on the host. The steps are spread evenly over the program, since one waits for the state of
    the one before to be on disk. New weights come up after the last backward: all micro-batches of a step see
    the same.
    """
    result = []
    for position, program in enumerate(programs):
        away = _away(table, position)
        (*work, clip), _ = _down(program, table, away)
        if "prev" in steps:
            turns = _turns(away, table, Instruction(Op.STEP, age="prev"),
                           lambda unit: _state_home(unit, table))
            work = [*_spread(work, turns), *(item for unit in away for item in _weights_home(unit, table))]
        if "" in steps:
            turns = _turns(away, table, Instruction(Op.STEP),
                           lambda unit: [*_weights_home(unit, table), *_state_home(unit, table)])
            result.append([*work, clip, *(item for turn in turns for item in turn)])
        else:
            result.append([*work, clip._replace(gradients="wait")])
    return result


# The programs of delayed updates (program.table.Plan), each by its pass.
DELAYED = {name: partial(_delay, steps=steps) for name, steps in DELAYED_STEPS.items()}


def _away(table: Table, position: int) -> list[int]:
    return [p for p in table.held(position) if table.parameters[p].state_home != Tier.DEVICE]


def _down(program: Program, table: Table, away: list[int]) -> tuple[Program, Program]:
    """The program up to CLIP, with gradients of these units on their way down; and the STEPs of the
    others."""
    out: Program = []
    for item in program:
        if item.op != Op.STEP:
            out.append(item)
        if item.op == Op.REDUCE and item.unit in away and item.group == table.reductions(item.unit)[-1].group:
            out.append(Instruction(Op.OFFLOAD, item.unit, kind="gshard"))
    return out, [item for item in program if item.op == Op.STEP and item.unit not in away]


def _turns(away: list[int], table: Table, step: Instruction, then: Callable[[int], Program]) -> list[Program]:
    """The steps of units whose state is away, one unit reading, one stepping and one writing (`then`) at a
    time."""
    turns: list[Program] = []
    for turn in range(len(away) + 2):
        reads = [unit for unit in away[turn:turn + 1] if table.parameters[unit].state_home == Tier.DISK]
        turns.append([Instruction(Op.FETCH, unit, kind="state", tier=Tier.HOST) for unit in reads])
        if 1 <= turn <= len(away):
            turns[-1].append(step._replace(unit=away[turn - 1]))
        if turn >= 2:
            turns[-1] += then(away[turn - 2])
    return turns


def _spread(program: Program, turns: list[Program]) -> Program:
    """The turns, evenly over a program."""
    out: Program = []
    for turn, items in enumerate(turns):
        first, stop = (len(program) * at // len(turns) for at in (turn, turn + 1))
        out += [*items, *program[first:stop]]
    return out


def _weights_home(unit: int, table: Table) -> Program:
    """After a unit's step on the host."""
    weight = table.weight(unit)
    if weight.tier == Tier.DEVICE:
        return [Instruction(Op.FETCH, unit, kind=weight.kind)]
    return [Instruction(Op.OFFLOAD, unit, kind=weight.kind,
                        tier=Tier.HOST)] if weight.tier == Tier.DISK else []


def _state_home(unit: int, table: Table) -> Program:
    on_disk = table.state(unit).tier == Tier.DISK
    return [Instruction(Op.OFFLOAD, unit, kind="state", tier=Tier.HOST)] if on_disk else []


def snapshot(_: Programs, table: Table, age: str = "") -> Programs:
    """Between two steps: a copy on the host of what a checkpoint keeps, taken beside what comes next. A
    unit's next STEP waits for its own."""
    return [[Instruction(Op.OFFLOAD, p, kind="snapshot", age=age) for p in table.held(position)
             if table.saves(position, p)] for position in range(table.num_positions)]


def snapshot_waiting(programs: Programs, table: Table) -> Programs:
    """The same, with the gradients that wait for the next step."""
    return snapshot(programs, table, age="prev")


def parameters(programs: Programs, table: Table) -> Programs:
    """Bring this rank's part up before it is gathered; from disk one GATHER earlier than that."""
    result = []
    for program in programs:
        gathers = [index for index, item in enumerate(program)
                   if item.op == Op.GATHER and table.parameters[item.unit].weight_home != Tier.DEVICE]
        before: dict[int, Program] = defaultdict(list)
        for use, index in enumerate(gathers):
            unit = program[index].unit
            if table.parameters[unit].weight_home == Tier.DISK:
                ahead = gathers[max(0, use - 1)]
                # Not while the part is up for the GATHER before.
                before[index if program[ahead].unit == unit else ahead].append(
                    Instruction(Op.FETCH, unit, kind="pshard", tier=Tier.HOST))
        for index in gathers:
            before[index].append(Instruction(Op.FETCH, program[index].unit, kind="pshard"))
        result.append([each for index, item in enumerate(program) for each in (*before[index], item)])
    return result

"""Offload as a pass: where gradients go down to the host, are stepped there, and parameters come up again. No torch.

    state on the host     ... REDUCE  OFFLOAD gshard ...  CLIP  STEP (on the host)  FETCH pshard
    on disk, too          ...                             CLIP  FETCH host_state  STEP  OFFLOAD host_state ...
    parameters there      ... FETCH pshard  GATHER ... RELEASE ...

A gradient goes down as soon as it is reduced. Units are stepped one after the other: while one is stepped, the state of the
next is read from disk and the parameters of the one before come up, so two or three units at a time are on their way. Units
whose state is on the device are stepped meanwhile.
"""

from __future__ import annotations

from collections import defaultdict

from threed.program.effects import chain
from threed.program.instruction import Instruction, Op, Programs
from threed.program.table import Table

Program = list[Instruction]


def homes(sizes: dict[int, int], ratio: float, home: str) -> dict[int, str]:
    """Parameter unit -> where its state lives, such that a share of `ratio` of all `sizes` is at `home`, as nearly as units
    allow: largest first, a unit goes there as long as that brings the share nearer to it."""
    goal, there = ratio * sum(sizes.values()), 0
    found = {}
    for unit, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        goes = abs(there + size - goal) < abs(there - goal)
        found[unit] = home if goes else "device"
        there += size * goes
    return found


def optimizer(programs: Programs, table: Table) -> Programs:
    """Gradients down, steps on the host, parameters up."""
    result = []
    for position, program in enumerate(programs):
        away = [p for p in table.held(position) if table.parameters[p].state_home != "device"]
        out: Program = []
        for item in program:
            if item.op != Op.STEP or item.unit not in away:
                out.append(item)
            if item.op == Op.REDUCE and item.unit in away and item.group == chain(table, item.unit)[-1][0]:
                out.append(Instruction(Op.OFFLOAD, item.unit, group="gshard"))
        here = [item for item in out if item.op == Op.STEP]
        result.append([*out[:len(out) - len(here)], *_steps(away, here, table)] if away else program)
    return result


def _steps(away: list[int], here: Program, table: Table) -> Program:
    """The steps of units whose state is away, one unit reading, one stepping and one writing at a time; and of the others."""
    out: Program = []
    for turn in range(len(away) + 2):
        if turn < len(away) and table.parameters[away[turn]].state_home == "disk":
            out.append(Instruction(Op.FETCH, away[turn], group="host_state"))
        if 1 <= turn <= len(away):
            out.append(Instruction(Op.STEP, away[turn - 1]))
        if turn == 1:
            out += here
        if turn >= 2:
            out += _home_again(away[turn - 2], table)
    return out


def _home_again(unit: int, table: Table) -> Program:
    """After a unit's step on the host."""
    held, kind = table.parameters[unit], table.weight(unit).kind
    out: Program = []
    if held.weight_home == "device":
        out.append(Instruction(Op.FETCH, unit, group=kind))
    elif held.weight_home == "disk":
        out.append(Instruction(Op.OFFLOAD, unit, group=kind.replace("disk_", "host_")))
    if held.state_home == "disk":
        out.append(Instruction(Op.OFFLOAD, unit, group="host_state"))
    return out


def parameters(programs: Programs, table: Table) -> Programs:
    """Bring this rank's part up before it is gathered; from disk one GATHER earlier than that."""
    result = []
    for program in programs:
        gathers = [index for index, item in enumerate(program)
                   if item.op == Op.GATHER and table.parameters[item.unit].weight_home != "device"]
        before: dict[int, Program] = defaultdict(list)
        for use, index in enumerate(gathers):
            unit = program[index].unit
            if table.parameters[unit].weight_home == "disk":
                ahead = gathers[max(0, use - 1)]
                # Not while the part is up for the GATHER before.
                before[index if program[ahead].unit == unit else ahead].append(Instruction(Op.FETCH, unit, group="host_pshard"))
        for index in gathers:
            before[index].append(Instruction(Op.FETCH, program[index].unit, group="pshard"))
        result.append([each for index, item in enumerate(program) for each in (*before[index], item)])
    return result

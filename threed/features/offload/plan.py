"""Offload as a pass: gradients go to the host, the optimizer steps there, parameters come back. No torch.

    state on the host     ... REDUCE  OFFLOAD gshard ...  CLIP  STEP (on the host)  FETCH pshard
    state on disk         ...                             CLIP  FETCH host_state  STEP  OFFLOAD host_state ...
    parameters, too       ... FETCH pshard  GATHER ... RELEASE ...

A gradient goes to the host as soon as it is reduced. Units are stepped one after the other: during one unit's
step the state of the next is read from disk and the parameters of the one before go to the device, so two or
three units at a time are under way. Units whose state is on the device are stepped meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial

from threed.program.instruction import Instruction, Op, Programs, Tier, insert
from threed.program.names import DELAYED_STEPS
from threed.program.table import Table

Program = list[Instruction]


def homes(sizes: dict[int, int], ratio: float, home: Tier) -> dict[int, Tier]:
    """Parameter unit -> tier of its state, such that about `ratio` of the sum of `sizes` is at `home`.
    Largest first, a unit is placed at `home` if that brings the share nearer to `ratio`."""
    goal, placed = ratio * sum(sizes.values()), 0
    tiers = {}
    for unit, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        nearer = abs(placed + size - goal) < abs(placed - goal)
        tiers[unit] = home if nearer else Tier.DEVICE
        placed += size * nearer
    return tiers


def optimizer(programs: Programs, table: Table) -> Programs:
    """Gradients to the host, steps on the host, parameters to the device."""
    result = []
    for position, program in enumerate(programs):
        away = _away(table, position)
        if not away:
            result.append(program)
            continue
        out, on_device = _down(program, table, away)
        turns = _turns(away, table, Instruction(Op.STEP),
                       lambda unit: [*_weights_home(unit, table), *_state_home(unit, table)])
        rest = (item for turn in turns[2:] for item in turn)
        result.append([*out, *turns[0], *turns[1], *on_device, *rest])
    return result


def _delay(programs: Programs, table: Table, steps: tuple[str, ...]) -> Programs:
    """As `optimizer`, with updates one step late. `steps`: the gradients to apply, "prev" of the step before
    and "" of this one.

        train   [STEP prev of each unit, beside forward and backward]  FETCH weights  CLIP
        enter   forward and backward                                                  CLIP
        drain   as train                                                              CLIP  STEP ...

    After the CLIP of `train` and `enter` this step's gradients wait for the next. All state is on the host or
    on disk. The STEPs are spread evenly over the program, since each waits until the state of the unit before
    is on disk. New weights go to the device after the last backward: all micro-batches of a step see the same
    weights.
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


# name of a program of delayed updates (program.table.Plan) -> its pass
DELAYED = {name: partial(_delay, steps=steps) for name, steps in DELAYED_STEPS.items()}


def _away(table: Table, position: int) -> list[int]:
    return [p for p in table.stepped(position) if table.parameters[p].state_home != Tier.DEVICE]


def _down(program: Program, table: Table, away: list[int]) -> tuple[Program, Program]:
    """The program up to CLIP, with an OFFLOAD of the gradient of each unit in `away`; and the STEPs of the
    other units."""
    out: Program = []
    for item in program:
        if item.op != Op.STEP:
            out.append(item)
        last = table.reductions(item.unit)[-1].group if item.unit in away else ""
        if item.op == Op.REDUCE and not item.of_slot and item.group == last:
            out.append(Instruction(Op.OFFLOAD, item.unit, kind="gshard"))
    return out, [item for item in program if item.op == Op.STEP and item.unit not in away]


def _turns(away: list[int], table: Table, step: Instruction, then: Callable[[int], Program]) -> list[Program]:
    """The STEPs of units whose state is off the device, as a pipeline: in one turn one unit reads its state,
    one is stepped, and one is written back (`then`)."""
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
    """The turns, spread evenly over a program."""
    out: Program = []
    for turn, items in enumerate(turns):
        first, stop = (len(program) * at // len(turns) for at in (turn, turn + 1))
        out += [*items, *program[first:stop]]
    return out


def _weights_home(unit: int, table: Table) -> Program:
    """Bring new weights to their tier after a step on the host."""
    weight = table.weight(unit)
    if weight.tier == Tier.DEVICE:
        return [Instruction(Op.FETCH, unit, kind=weight.kind)]
    if weight.tier == Tier.DISK:
        return [Instruction(Op.OFFLOAD, unit, kind=weight.kind, tier=Tier.HOST)]
    return []


def _state_home(unit: int, table: Table) -> Program:
    """Bring the optimizer state to its tier after a step on the host."""
    on_disk = table.state(unit).tier == Tier.DISK
    return [Instruction(Op.OFFLOAD, unit, kind="state", tier=Tier.HOST)] if on_disk else []


def snapshot(_: Programs, table: Table, age: str = "") -> Programs:
    """Between two steps: copy the content of a checkpoint to the host, beside the next step. A unit's next
    STEP waits for the unit's copy."""
    return [[Instruction(Op.OFFLOAD, p, kind="snapshot", age=age) for p in table.copied(position)]
            for position in range(table.num_positions)]


def snapshot_waiting(programs: Programs, table: Table) -> Programs:
    """`snapshot`, with the gradients that wait for the next step."""
    return snapshot(programs, table, age="prev")


def parameters(programs: Programs, table: Table) -> Programs:
    """Bring this rank's part of a unit to the device before its GATHER; from disk to the host already before
    the GATHER of the unit before."""
    if all(unit.weight_home == Tier.DEVICE for unit in table.parameters.values()):
        return programs
    result = []
    for program in programs:
        gathers = [index for index, item in enumerate(program)
                   if item.op == Op.GATHER and not item.of_slot
                   and table.parameters[item.unit].weight_home != Tier.DEVICE]
        before: dict[int, Program] = defaultdict(list)
        for use, index in enumerate(gathers):
            unit = program[index].unit
            if table.parameters[unit].weight_home == Tier.DISK:
                ahead = gathers[max(0, use - 1)]
                # Not earlier if the GATHER before is of the same unit.
                before[index if program[ahead].unit == unit else ahead].append(
                    Instruction(Op.FETCH, unit, kind="pshard", tier=Tier.HOST))
        for index in gathers:
            before[index].append(Instruction(Op.FETCH, program[index].unit, kind="pshard"))
        result.append(insert(program, before, {}))
    return result

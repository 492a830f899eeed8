"""Offload as a pass: the optimizer steps on the host, and parameters come back. No torch.

    state on the host     ... REDUCE ...  CLIP  OFFLOAD gshard  STEP (on the host)  FETCH pshard
    state on disk         ...             CLIP  OFFLOAD gshard, FETCH host_state  STEP  OFFLOAD host_state ...
    parameters, too       ... FETCH pshard  GATHER ... RELEASE ...

Units are stepped one after the other, in turns: during one unit's step the gradient of the next comes down,
its state is read from disk, and the parameters of the one before go to the device. So the host has gradients
of three units at a time. Units whose state is on the device are stepped meanwhile.

With offload.overlap=next the turns run in the next step's program, in the order in which the step uses the
units: a unit's first reader waits for its own update alone, and the other turns run beside what does not need
them yet. Nobody reads weights that are an update behind.

Matrices that are turned go to the device and come back. In one turn the host begins the step of a unit,
those of the unit before are turned, and the host ends the step of the unit before that.

Where gradients do not fit the device (Shards.streams), each part goes to the host as soon as it is reduced,
and is added up there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence

from threed.program.forms import Forms
from threed.program.instruction import COMPUTE, Instruction, Op, Programs, SlotKind, Tier, insert
from threed.program.table import Table

Program = list[Instruction]
# Units by which new weights come before their use: their GATHER, and what reads them from a disk for it, come
# one unit before each.
AHEAD = 2


def homes(sizes: dict[int, int], ratio: float, home: Tier) -> dict[int, Tier]:
    """Parameter unit -> tier of its state, such that about `ratio` of the sum of `sizes` is at `home`.
    Largest first, a unit is placed at `home` if that brings the share nearer to `ratio`."""
    goal, placed = ratio * sum(sizes.values()), 0
    tiers = {}
    for unit, size in sorted(sizes.items(), key=lambda entry: (-entry[1], entry[0])):
        nearer = abs(placed + size - goal) < abs(placed - goal)
        tiers[unit] = home if nearer else Tier.DEVICE
        placed += size * nearer
    return tiers


def optimizer(programs: Programs, table: Table) -> Programs:
    """The host's steps at the end of the step."""
    result = []
    for position, program in enumerate(programs):
        away = _away(table, position)
        out, on_device = _split(program, table, away)
        turns = _turns(away, table, "")
        rest = (item for turn in turns[2:] for item in turn)
        result.append([*out, *turns[0], *turns[1], *on_device, *rest])
    return result


def enter(programs: Programs, table: Table) -> Programs:
    """The programs of a step at whose start no update on the host is pending. The host updates of the step
    itself are deferred to the next step."""
    result = []
    for position, program in enumerate(programs):
        (*work, clip), on_device = _split(program, table, _away(table, position))
        result.append([*work, clip._replace(gradients="wait"), *on_device])
    return result


def head(programs: Programs, table: Table) -> Programs:
    """`enter` plus the previous step's host updates. New weights come AHEAD units before their first use."""
    result = []
    for position, program in enumerate(enter(programs, table)):
        uses = _first_uses(program, table, position)
        starts, away = sorted({*uses.values()}), _away(table, position)
        order = sorted(away, key=lambda unit: (uses.get(unit, 0), unit))
        before: dict[int, Program] = defaultdict(list)
        for turn, items in enumerate(_turns(order, table, "prev")):
            before[_ahead(starts, uses.get(order[turn - 2], 0), AHEAD) if turn >= 2 else 0] += items
        # A GATHER waits for the unit's update, and so does the thread that issues it to a GPU.
        first = {item.unit: index for index, item in reversed([*enumerate(program)])
                 if item.op == Op.GATHER and not item.of_slot and item.unit in away}
        for unit, index in first.items():
            before[max(index, _ahead(starts, uses.get(unit, 0), 1))].append(program[index])
        gone = {*first.values()}
        result.append([each for index, item in enumerate(program)
                       for each in (*before.get(index, ()), *([] if index in gone else [item]))])
    return result


def _ahead(starts: Sequence[int], start: int, count: int) -> int:
    """Of the indices at which units are first used: the one so many before another; 0 where there is none."""
    at = bisect_left(starts, start) - count
    return starts[at] if at > 0 else 0


def settle(_: Programs, table: Table) -> Programs:
    """The updates that wait, and nothing else."""
    return [[item for turn in _turns(_away(table, position), table, "prev") for item in turn]
            for position in range(table.num_positions)]


def _away(table: Table, position: int) -> list[int]:
    return [p for p in table.stepped(position) if table.shards.away(p)]


def _split(program: Program, table: Table, away: Collection[int]) -> tuple[Program, Program]:
    """The program up to CLIP, with an OFFLOAD of each reduced part of a gradient that does not stay on the
    device; and the updates of units whose state is there."""
    end = 1 + next(index for index, item in enumerate(program) if item.op == Op.CLIP)
    out: Program = []
    for item in program[:end]:
        out.append(item)
        if item.op == Op.REDUCE and not item.of_slot and table.shards.streams(item.unit):
            if item.group == table.shards.reductions(item.unit)[-1].group:
                out.append(Instruction(Op.OFFLOAD, item.unit, kind=SlotKind.GRAD_SHARD))
    return out, [item for item in program[end:] if item.unit not in away]


def _turns(away: Sequence[int], table: Table, age: str) -> list[Program]:
    """The STEPs of units whose state is off the device, as a pipeline. One turn brings a unit's inputs to the
    host, steps another unit, and takes the results of a third one home. `age`: of the gradients."""
    parts = [_parts(unit, table, age) for unit in away]
    turns: list[Program] = [[] for _ in range(len(away) - 1 + max(map(len, parts), default=3))]
    for first, of_unit in reversed([*enumerate(parts)]):  # what comes to the host first
        for turn, items in enumerate(of_unit, first):
            turns[turn] += items
    return turns


def _parts(unit: int, table: Table, age: str) -> list[Program]:
    """What is done for the STEP of a unit, turn by turn."""
    gradient, down = SlotKind.PREVIOUS_GRAD if age else SlotKind.GRAD_SHARD, list[Instruction]()
    if not table.shards.streams(unit):
        down.append(Instruction(Op.OFFLOAD, unit, kind=gradient))
    if table.parameters[unit].state_home == Tier.DISK:
        down.append(Instruction(Op.FETCH, unit, kind=SlotKind.STATE, tier=Tier.HOST))
    way, home = table.parameters[unit].turning, _home(unit, table)
    if way is None:
        return [down, [Instruction(Op.STEP, unit, age=age)], home]
    turn = [Instruction(Op.FETCH, unit, kind=SlotKind.UPDATE),
            Instruction(Op.EXCHANGE, unit, kind=SlotKind.UPDATE, group=way.group),
            Instruction(Op.STEP, unit, part="turn"),
            Instruction(Op.EXCHANGE, unit, kind=SlotKind.TURNED, group=way.group),
            Instruction(Op.OFFLOAD, unit, kind=SlotKind.DIRECTION)]
    return [down, [Instruction(Op.STEP, unit, part="begin")], turn,
            [Instruction(Op.STEP, unit, part="end"), *home]]


def _home(unit: int, table: Table) -> Program:
    """After a step on the host: bring new weights and state to their tiers."""
    weight, home = table.shards.weight(unit), list[Instruction]()
    if weight.tier == Tier.DEVICE:
        home.append(Instruction(Op.FETCH, unit, kind=weight.kind))
    elif weight.tier == Tier.DISK:
        home.append(Instruction(Op.OFFLOAD, unit, kind=weight.kind, tier=Tier.HOST))
    if table.shards.state(unit).tier == Tier.DISK:
        home.append(Instruction(Op.OFFLOAD, unit, kind=SlotKind.STATE, tier=Tier.HOST))
    return home


def _first_uses(program: Program, table: Table, position: int) -> dict[int, int]:
    """Parameter unit -> index of the first instruction that computes with its weights."""
    uses: dict[int, int] = {}
    forms = Forms(table).of(program, position)
    reads = {form: [slot.unit for slot in form.effect.reads if slot.kind == SlotKind.PARAM]
             for form in dict.fromkeys(forms) if form.item.op in COMPUTE}
    for index, form in enumerate(forms):
        for unit in reads.get(form, ()):
            uses.setdefault(unit, index)
    return uses


def snapshot(_: Programs, table: Table) -> Programs:
    """Between two steps: copy the content of a checkpoint to the host, beside the next step. A unit's next
    STEP waits for the unit's copy."""
    return [[Instruction(Op.OFFLOAD, p, kind=SlotKind.SNAPSHOT) for p in table.copied(position)]
            for position in range(table.num_positions)]


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
        written = {item.unit: index for index, item in enumerate(program)  # new values, to the disk
                   if item.op == Op.OFFLOAD and item.kind == SlotKind.PARAM_SHARD and item.tier == Tier.HOST}
        for use, index in enumerate(gathers):
            unit = program[index].unit
            if table.parameters[unit].weight_home == Tier.DISK:
                ahead, home = gathers[max(0, use - 1)], written.get(unit, index)
                # Not earlier if the GATHER before is of the same unit, or new values are written behind it.
                same, late = program[ahead].unit == unit, ahead <= home < index
                before[index if same else home + 1 if late else ahead].append(
                    Instruction(Op.FETCH, unit, kind=SlotKind.PARAM_SHARD, tier=Tier.HOST))
        for index in gathers:
            before[index].append(Instruction(Op.FETCH, program[index].unit, kind=SlotKind.PARAM_SHARD))
        result.append(insert(program, before, {}))
    return result

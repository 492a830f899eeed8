"""ZeRO as a pass: where parameters are gathered and released, where gradients are reduced, and the optimizer
step. No torch.

    stage 0   ... BACKWARD  REDUCE ...                              CLIP  STEP on everything
    stage 1   GATHER ... FORWARD ... BACKWARD  REDUCE  RELEASE ...  CLIP  STEP on this rank's shard
    stage 2   as 1, and a REDUCE after every `reduce_every` micro-batches, which adds to this rank's shard
    stage 3   as 2, and a GATHER before each use of a unit that is not resident, and a RELEASE when another
              unit needs its place

A unit's gradient is reduced right after the backward that completes it, so that the reduction overlaps with
the rest of backward. Units that stay whole are gathered at the start of the step, in order of first use: a
unit's forward waits for its own parameters only, so the gathers overlap with the forwards before it. Of the
other units `residency` are resident at a time, each gathered `prefetch` uses ahead. The unit whose next use
is farthest away is released first (Belady 1966).
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from threed.base.mesh import GROUPS
from threed.features.zero.steps import steps
from threed.program.entries import Reduction
from threed.program.forms import Forms
from threed.program.instruction import Instruction, Op, Programs, SlotKind, insert
from threed.program.pairs import has_pairs
from threed.program.settings import Elements
from threed.program.table import Table

Program = list[Instruction]


class Sums(NamedTuple):
    """Sizes of the sums of a unit's gradient over groups besides the shard group."""

    # group whose ranks hold partial gradients -> (number of its ranks, number of elements to sum)
    partial: dict[str, tuple[int, int]]
    kept: int  # elements that a rank keeps of the sum over the shard group
    copies: int  # number of shard groups, each with a copy of the unit
    tied: int  # number of pipeline positions, each with a part of the gradient
    replica: str = "replica"  # the group of ranks with copies of a shard


def reductions(numel: int, shards: int, shard_group: str, sums: Sums,
               elements: Elements) -> tuple[Reduction, ...]:
    """The reductions of a parameter unit's gradient, in order.

    tp: for parameters replicated over tp, each tp rank has the gradient of its own tokens (under sequence
    parallelism) or of its own heads. replica: several shard groups each have a copy of the unit, and its
    gradient is summed over them. tie: the two ends of the pipeline each have a part of a tied embedding's
    gradient.
    """
    steps = [(group, ranks, count, elements.grad, False, SlotKind.TP_SUM)
             for group, (ranks, count) in sums.partial.items()]
    steps.append((shard_group, shards, numel, elements.reduce, True, SlotKind.SHARD_SUM))
    if sums.copies > 1:
        steps.append((sums.replica, sums.copies, sums.kept, elements.reduce, True, SlotKind.REPLICA_SUM))
    if sums.tied > 1:
        steps.append(("tie", sums.tied, sums.kept, elements.grad, False, SlotKind.GRAD_SHARD))
    chain, source = [], SlotKind.WEIGHT_GRAD
    for index, (group, ranks, count, size, staged, target) in enumerate(steps):
        target = SlotKind.GRAD_SHARD if index == len(steps) - 1 else target
        chain.append(Reduction(group, ranks, source, target, count, size, staged))
        source = target
    return tuple(chain)


def train(programs: Programs, table: Table) -> Programs:
    """Add GATHER, RELEASE, REDUCE, CLIP and STEP to forward and backward."""
    result = []
    for position, program in enumerate(programs):
        out, late = _reduce(program, table, position)
        out = _gather(out, table, position)
        out += late
        out.append(Instruction(Op.CLIP))
        result.append([*out, *steps(table, position)])
    return result


def rehearse(programs: Programs, table: Table) -> Programs:
    """A step up to its CLIP, which then drops the gradients: there is no update."""
    result = []
    for program in programs:
        end = next(index for index, item in enumerate(program) if item.op == Op.CLIP)
        result.append([*program[:end], program[end]._replace(gradients="drop")])
    return result


def forward(programs: Programs, table: Table) -> Programs:
    """Forward only: gather, run, release."""
    return [_gather(program, table, position) for position, program in enumerate(programs)]


def evaluate(programs: Programs, table: Table) -> Programs:
    """Forward only, and then the loss is summed over ranks."""
    return [[*program, Instruction(Op.CLIP, gradients="none")] for program in forward(programs, table)]


def _reduce(program: Program, table: Table, position: int) -> tuple[Program, Program]:
    """The program with its REDUCEs; and the REDUCEs that come after the whole program."""
    added: dict[int, list[int]] = defaultdict(list)  # parameter unit -> instructions that add to its gradient
    users: dict[int, set[int]] = defaultdict(set)  # parameter unit -> compute units of these instructions
    forms = Forms(table).of(program, position)
    adds = {form: units for form in dict.fromkeys(forms)
            if (units := [slot.unit for slot in form.effect.adds if slot.kind == SlotKind.WEIGHT_GRAD])}
    for index, form in enumerate(forms):
        for unit in adds.get(form, ()):
            added[unit].append(index)
            users[unit].add(form.item.unit)
    after: dict[int, Program] = defaultdict(list)
    late = []
    for unit, places in added.items():
        groups = [step.group for step in table.shards.reductions(unit)]
        often = groups.index(table.parameters[unit].shard_group) + 1
        period = len(places) if table.shards.in_place(unit) else table.zero.reduce_every * len(users[unit])
        for place in {*places[period - 1::period], places[-1]}:
            after[place] += [Instruction(Op.REDUCE, unit, group=group) for group in groups[:often]]
        for group in groups[often:]:
            # Sums over positions come at the end of the program, so that no position waits for another
            # before.
            target = late if GROUPS[group].across_positions else after[places[-1]]
            target.append(Instruction(Op.REDUCE, unit, group=group))
    return insert(program, {}, after), late


def _gather(program: Program, table: Table, position: int) -> Program:
    """The program with its GATHERs and RELEASEs."""
    if not table.zero.sharded:
        return program
    forms = Forms(table).of(program, position)
    read = {form: [slot.unit for slot in form.effect.reads
                   if slot.kind == SlotKind.PARAM and table.shards.is_cut(slot.unit)]
            for form in dict.fromkeys(forms)}
    uses = [(index, read[form]) for index, form in enumerate(forms) if read[form]]
    last = {unit: index for index, units in uses for unit in units}
    gathers: dict[int, list[int]] = defaultdict(list)  # units to gather before this instruction
    releases: dict[int, list[int]] = defaultdict(list)  # units to release after this one
    once = [unit for unit in last if table.parameters[unit].whole or table.zero.residency == "step"]
    for unit in once:
        gathers[0].append(unit)
        releases[last[unit]].append(unit)
    if len(once) < len(last):
        windowed = [(index, [unit for unit in units if unit not in once]) for index, units in uses]
        runs = 2 if has_pairs(program, table) else 1  # as many for each of two that are computed together
        window([use for use in windowed if use[1]], runs * _capacity(table, position), table.zero.prefetch,
               gathers, releases)
    groups = {unit: table.parameters[unit].shard_group for unit in last}
    before = {index: [Instruction(Op.GATHER, unit, group=groups[unit]) for unit in units]
              for index, units in gathers.items()}
    after = {index: [Instruction(Op.RELEASE, unit) for unit in units] for index, units in releases.items()}
    return insert(program, before, after)


def _capacity(table: Table, position: int) -> int:
    """How many windowed units may be resident, besides those that are gathered ahead."""
    if isinstance(table.zero.residency, int):
        return table.zero.residency
    of_stage: dict[int, set[int]] = defaultdict(set)
    for unit in table.units_of(position):
        of_stage[table.units[unit].stage].update(p for p in table.units[unit].parameters
                                                 if not table.parameters[p].whole)
    return max(map(len, of_stage.values()))


def window(uses: list[tuple[int, list[int]]], capacity: int, prefetch: int, gathers: dict[int, list[int]],
           releases: dict[int, list[int]]) -> None:
    """Demand paging with known future: at each use missing units are gathered, and the units that are needed
    farthest in the future are released. `uses`: index of an instruction, and the units that it uses. The
    result is added to `gathers` (before an instruction) and `releases` (after it)."""
    next_use: list[dict[int, int]] = []  # for each use: unit -> its next use
    coming: dict[int, int] = {}
    for use in range(len(uses) - 1, -1, -1):
        next_use.append({unit: coming.get(unit, len(uses)) for unit in uses[use][1]})
        coming.update(dict.fromkeys(uses[use][1], use))
    next_use.reverse()
    resident: dict[int, tuple[int, int]] = {}  # unit -> (latest use, next use)
    released: dict[int, int] = {}  # unit -> index of the instruction after which it was released
    for use, (index, needed) in enumerate(uses):
        missing = [unit for unit in needed if unit not in resident]
        others = sorted((unit for unit in resident if unit not in needed), key=lambda unit: resident[unit][1])
        for unit in others[max(0, capacity - len(needed)):]:
            released[unit] = uses[resident.pop(unit)[0]][0]
            releases[released[unit]].append(unit)
        for unit in missing:
            ahead = uses[use - prefetch][0] if use >= prefetch else 0
            gathers[max(ahead, released.get(unit, -1) + 1)].append(unit)
        for unit in needed:
            resident[unit] = use, next_use[use][unit]
        for unit in [unit for unit, (_, then) in resident.items() if then == len(uses)]:
            releases[index].append(unit)
            del resident[unit]
    assert not resident

"""Check that a plan is legal, complete and free of deadlock. An error names the position, the instruction,
its neighbours, and what is wrong.

Legal: slots are written once, read while alive and freed once, and the slots alive at the end of a program
are those of its seam. Complete: every unit runs forward and backward once for every micro-batch, at its own
position. Messages: the two ends of each channel name the same slots in the same order (there are no tags).
Deadlock: `walk` in its three modes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from operator import itemgetter

from threed.base.errors import PlanError
from threed.base.mesh import GROUPS
from threed.program.access import Effects
from threed.program.analysis import Analysis
from threed.program.forms import Form
from threed.program.instruction import BACKWARDS, WORDS, Instruction, Op, Slot, SlotKind
from threed.program.link import Links, Program
from threed.program.names import (
    APPLIES_WAITING,
    FORWARD_ONLY,
    GENERATE,
    LEAVES_WAITING,
    SETTLE,
    SNAPSHOT,
    VERIFY,
)
from threed.program.plan import Plan
from threed.program.seam import seam_of
from threed.program.table import Table
from threed.program.walk import Mode, all_meet, channels, walk


def check(plan: Plan | Analysis) -> Analysis:
    """Raise PlanError unless every program of the plan can run and does all of its work. Returns what was
    derived from the plan for it, which may be given."""
    analysis = plan if isinstance(plan, Analysis) else Analysis(plan)
    for name in analysis.plan.programs:
        check_program(analysis, name)
    return analysis


def check_programs(name: str, programs: Sequence[Program], table: Table) -> list[Links]:
    """Check the programs of all positions that run together, without a plan: see `check_program`."""
    analysis = Analysis(Plan(table, {name: [*map(tuple, programs)]}))
    check_program(analysis, name)
    return analysis.links(name)


def check_program(analysis: Analysis, name: str) -> None:
    """PlanError where one program, of all positions, is wrong. `evaluate`, `generate` and the snapshot
    programs do not train; every other program does."""
    programs, table = analysis.plan.programs[name], analysis.table
    if len(programs) != table.num_positions:
        raise PlanError(f"program '{name}' has {len(programs)} positions, but the table has "
                        f"{table.num_positions}")
    links = analysis.links(name)
    for position, (program, linked) in enumerate(zip(programs, links, strict=True)):
        ends = seam_of(table, position, name, end=True)
        _check_fields(name, programs, position, linked)
        if linked.faults:
            raise PlanError(describe(name, programs, position, *linked.faults[0]))
        left = linked.alive - ends - {Slot(SlotKind.SCALE)}
        lost = ends - linked.alive
        if left or lost:
            what = f"leaves '{min(left)}' behind" if left else f"has lost '{min(lost)}'"
            raise PlanError(describe(name, programs, position, len(program) - 1,
                                     f"the program ends here and {what}"))
        _check_complete(name, programs, position, table, linked)
        _check_copies(name, programs, position, table, linked)
    _check_channels(name, programs)
    _check_collectives(name, programs, table, links)
    for mode in () if all_meet(links) else Mode:
        if stuck := walk(programs, links, mode).stuck:
            raise PlanError(f"deadlock ({mode.value}): each of these waits for another\n" + "\n".join(
                describe(name, programs, position, index, "never runs") for position, index in stuck))


def describe(name: str, programs: Sequence[Program], position: int, index: int, reason: str) -> str:
    """A fault with its place and its neighbours."""
    program = programs[position]
    lines = [f"program '{name}', position pp{position}, instruction {index} of {len(program)}: {reason}"]
    for near in range(max(0, index - 2), min(len(program), index + 3)):
        lines.append(f"  {'>' if near == index else ' '} {near:5d}  {program[near]}")
    return "\n".join(lines)


def _check_fields(name: str, programs: Sequence[Program], position: int, links: Links) -> None:
    """Instructions of one form set the same fields, but for the micro-batch."""
    strays = {form for form in dict.fromkeys(links.forms) if form.item.strays()}
    for index, form in enumerate(links.forms) if strays else ():
        if form in strays:
            raise PlanError(describe(name, programs, position, index,
                                     f"sets {' and '.join(programs[position][index].strays())}, which "
                                     f"{form.item.op} does not use"))


def _check_complete(name: str, programs: Sequence[Program], position: int, table: Table,
                    links: Links) -> None:
    """For each unit of the position and each micro-batch, FORWARD runs once, and BACKWARD once, whole or as
    its two halves."""
    program, trains, m = programs[position], name not in FORWARD_ONLY, table.microbatches(name)
    if name == SNAPSHOT:
        _check_snapshot(name, programs, position, table)
        return
    if name == SETTLE:
        _check_steps(name, programs, position, table, links)
        return
    if not _each_once(links, table, position, trains, m):
        seen = Counter([_turn(item) for item in program if item.op in _COMPUTING])
        expected = _expected(range(m), table, position, trains, seen)
        for turn in (seen - expected) + (expected - seen):
            index = next((i for i, item in enumerate(program) if _turn(item) == turn), len(program) - 1)
            raise PlanError(describe(
                name, programs, position, index,
                f"'{Instruction(*turn)}' runs {seen[turn]} times here, not {expected[turn]}"))
    if trains:
        _check_steps(name, programs, position, table, links)
    clips = _places(links, Op.CLIP)
    wrong = next((i for i in clips if (program[i].gradients != "none") != trains), None)
    if len(clips) != (name != GENERATE) or wrong is not None:  # without a loss there is nothing to sum
        raise PlanError(describe(name, programs, position, wrong if wrong is not None else len(program) - 1,
                                 "CLIP must run once, over gradients where there are any"
                                 if name != GENERATE else "there is no loss, so CLIP does not belong here"))
    waits = table.update.overlap and name in LEAVES_WAITING
    if (wrong := next((i for i in clips if (program[i].gradients == "wait") != waits), None)) is not None:
        raise PlanError(describe(name, programs, position, wrong, "gradients wait for the next step "
                                 f"{'here' if waits else 'nowhere here'}"))
    keeps = ("all", "input") if trains else ("logits",) if name == GENERATE else ("none",)
    wrong = {form for form in dict.fromkeys(links.forms)
             if form.item.op == Op.FORWARD and form.item.keep not in keeps}
    for index, form in enumerate(links.forms) if wrong else ():
        if form in wrong:
            raise PlanError(describe(name, programs, position, index,
                                     f"keep={form.item.keep} does not belong here"))


_COMPUTING = (Op.FORWARD, *BACKWARDS)


def _each_once(links: Links, table: Table, position: int, trains: bool, m: int) -> bool:
    """Whether every micro-batch has a strand, and each has every unit once. (False says nothing: the
    instructions of a strand are those that use slots.)"""
    microbatches = []
    for strand in links.strands:
        seen = Counter([_turn(form.item) for form in strand.forms if form.item.op in _COMPUTING])
        if seen != _expected(range(1), table, position, trains, seen):
            return False
        microbatches += [links.program[index].microbatch for index in strand.indices[0]]
    return sorted(microbatches) == list(range(m))


_Turn = tuple[Op, int, int]  # op, unit, micro-batch


def _turn(item: Instruction) -> _Turn:
    return item.op, item.unit, item.microbatch


def _expected(microbatches: Iterable[int], table: Table, position: int, trains: bool,
              seen: Collection[_Turn]) -> Counter[_Turn]:
    """How often each must run. A backward that has begun as two halves must run as two."""
    expected = Counter[_Turn]()
    for unit in table.units_of(position):
        for microbatch in microbatches:
            expected[Op.FORWARD, unit, microbatch] = 1
            if trains and (Op.BACKWARD_INPUT, unit, microbatch) in seen:
                expected[Op.BACKWARD_INPUT, unit, microbatch] = 1
                expected[Op.BACKWARD_WEIGHT, unit, microbatch] = 1
            elif trains:
                expected[Op.BACKWARD, unit, microbatch] = 1
    return expected


def _places(links: Links, op: Op) -> list[int]:
    """The indices of the instructions of an op."""
    forms = {form for form in dict.fromkeys(links.forms) if form.item.op == op}
    return [index for index, form in enumerate(links.forms) if form in forms] if forms else []


def _check_steps(name: str, programs: Sequence[Program], position: int, table: Table, links: Links) -> None:
    """STEP runs once for each gradient that this program applies, of this step or of the one before; in its
    three parts where matrices are turned."""
    waiting = {slot.unit for slot in table.waiting(position)}
    asked = [(unit, "prev", "") for unit in waiting if name in APPLIES_WAITING]
    if name not in (VERIFY, SETTLE):
        asked += [(unit, "", part) for unit in table.stepped(position)
                  if unit not in waiting or name not in LEAVES_WAITING
                  for part in (WORDS["part"][1:] if table.parameters[unit].turning else ("",))]
    steps = [(item.unit, item.age, item.part)
             for item in map(programs[position].__getitem__, _places(links, Op.STEP))]
    if sorted(steps) != sorted(asked):
        raise PlanError(describe(name, programs, position, len(programs[position]) - 1,
                                 f"STEP runs for {_named(steps)}, but must run for {_named(asked)}"))


def _check_snapshot(name: str, programs: Sequence[Program], position: int, table: Table) -> None:
    """Each unit that the position writes into checkpoints is copied once, and the program does nothing
    else."""
    copied = [item.unit for item in programs[position] if item.op == Op.OFFLOAD]
    asked = table.copied(position)
    if sorted(copied) != asked or len(copied) < len(programs[position]):
        raise PlanError(describe(name, programs, position, 0,
                                 f"copies units {copied}, but must copy {asked}"))


def _named(steps: Sequence[tuple[int, str, str]]) -> str:
    return ", ".join(" ".join(filter(None, (f"p{unit}", *words))) for unit, *words in steps) or "nothing"


def _check_copies(name: str, programs: Sequence[Program], position: int, table: Table, links: Links) -> None:
    """STEP changes the shard that GATHER reads, so no gathered copy may be alive then. And no instruction of
    the step may read a shard after its STEP: all micro-batches see the same weights."""
    whole: set[int] = set()
    changed: set[int] = set()
    before = {slot.unit for slot in table.waiting(position)} if name in APPLIES_WAITING else set[int]()
    _check_waiting(name, programs, position, table, links, before)
    used = {form: _copies(form.effect) for form in dict.fromkeys(links.forms)}
    acting = {form for form, (updates, _, *moved) in used.items() if updates or any(moved)}
    for index, form in enumerate(links.forms):
        if form not in acting and not changed:  # most instructions
            continue
        updates, reads, gathered, released = used[form]
        for slot in updates:
            if slot.name == SlotKind.PARAM_SHARD and slot.unit in whole:
                raise PlanError(describe(name, programs, position, index,
                                         f"updates '{slot}' while 'param p{slot.unit}', which is gathered "
                                         "from it, is alive"))
            if slot.unit not in before:
                changed.add(slot.unit)
        for slot in reads:
            if slot.unit in changed:
                raise PlanError(describe(name, programs, position, index,
                                         f"reads '{slot}', which this step has already updated"))
        whole.update(gathered)
        whole.difference_update(released)


def _check_waiting(name: str, programs: Sequence[Program], position: int, table: Table, links: Links,
                   units: Collection[int]) -> None:
    """The update of a step before comes before all that read the unit's weights."""
    weights = {table.shards.weight(unit) for unit in units}
    about = {form for form in dict.fromkeys(links.forms) if weights.intersection(form.effect.reads)
             or weights.intersection(form.effect.updates)} if weights else set[Form]()
    read: set[Slot] = set()
    for index, form in enumerate(links.forms) if about else ():
        if form in about:
            if late := read.intersection(form.effect.updates):
                raise PlanError(describe(name, programs, position, index,
                                         f"updates '{min(late)}' with the gradient of the step before, after "
                                         "an instruction of this step has read it"))
            read.update(weights.intersection(form.effect.reads))


def _copies(effect: Effects) -> tuple[list[Slot], list[Slot], list[int], list[int]]:
    """Parameters and shards of them that are updated, and that are read; the units of which a whole copy is
    made, and of which it is freed."""
    updates, reads = ([slot for slot in slots if slot.name in (SlotKind.PARAM, SlotKind.PARAM_SHARD)]
                      for slots in (effect.updates, effect.reads))
    made, freed = ([slot.unit for slot in slots if slot.name == SlotKind.PARAM]
                   for slots in (effect.writes, effect.frees))
    return updates, reads, made, freed


def _check_channels(name: str, programs: Sequence[Program]) -> None:
    ends = channels(programs)
    for (sender, receiver, _), (sends, receives) in ends.items():
        if not (0 <= sender < len(programs) and 0 <= receiver < len(programs)) or sender == receiver:
            position, index = (sender, sends[0]) if sends else (receiver, receives[0])
            raise PlanError(describe(name, programs, position, index, "there is no such peer"))
    for (sender, receiver, kind), (sends, receives) in ends.items():
        sent, wanted = ([_SLOT(programs[position][index]) for index in indices]
                        for position, indices in ((sender, sends), (receiver, receives)))
        for k, (one, other) in enumerate(zip_longest(sent, wanted)) if sent != wanted else ():
            if one is None or other is None:
                position, index = (sender, sends[k]) if other is None else (receiver, receives[k])
                missing = f"pp{receiver} never receives it" if other is None else f"pp{sender} never sends it"
                raise PlanError(describe(name, programs, position, index, missing))
            if one != other:
                raise PlanError(describe(name, programs, receiver, receives[k], f"message {k} of {kind} from "
                                         f"pp{sender} is '{programs[sender][sends[k]]}'"))


_SLOT = itemgetter(*(Instruction._fields.index(name) for name in Slot._fields))  # without making it


def _check_collectives(name: str, programs: Sequence[Program], table: Table, links: Sequence[Links]) -> None:
    """A REDUCE over a group with members at several positions is one collective of all of them, on the same
    unit: for a tied embedding, of the two ends of the pipeline. (CLIP is a collective of all positions;
    `_check_complete` has counted it.)"""
    reduces = [[program[index] for index in _places(linked, Op.REDUCE)]
               for program, linked in zip(programs, links, strict=True)]
    for group in (group for group, row in GROUPS.items() if row.across_positions):
        calls = [[item.unit for item in program if item.group == group and not item.of_slot]
                 for program in reduces]
        members = {position for unit in table.parameters.values() for position in unit.positions
                   if any(step.group == group for step in unit.reductions)}
        first, last = min(members, default=0), max(members, default=len(programs) - 1)
        expected = [calls[first] if position in members else [] for position in range(len(programs))]
        if calls != expected:
            raise PlanError(f"program '{name}': REDUCE ({group}) must run for the same units on the first "
                            f"position ({calls[first]}) and on the last ({calls[last]}), and nowhere else")

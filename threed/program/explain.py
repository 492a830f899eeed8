"""Explain one instruction of a plan: the pass that put it in, the slots that it reads and writes, the ranks
that take part, the bytes that it sends and moves, and the instructions that wait for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from threed.base.quantity import add_up, many, show_bytes
from threed.program.analysis import Analysis
from threed.program.effects import effects
from threed.program.in_words import slot_words, unit_words
from threed.program.instruction import COMPUTE, PARAMETER_KINDS, Instruction, Op, Slot, SlotKind
from threed.program.table import Table
from threed.program.traffic import moved_by, sent_by

SHOWN = 5  # instructions that wait, and ranks that take part


def origin(stages: Sequence[tuple[str, Sequence[Instruction]]], program: Sequence[Instruction],
           index: int) -> str | None:
    """The name of the pass that put in instruction `index` of a program. `stages`: each pass, with the
    program of that position after it. Among equal instructions, the n-th of one program is taken to be the
    n-th of the next. None where the plan was changed after its passes."""
    item, turn = program[index], Counter(program[:index])[program[index]]
    return next((name for name, stage in stages if Counter(stage)[item] > turn), None)


@dataclass(frozen=True)
class Explanation:
    """All that the plan says about one instruction."""

    table: Table
    program: str
    position: int
    index: int
    instruction: str
    of: str  # the unit
    lane: str
    when: str | None
    slots: dict[str, Sequence[Slot]]  # reads, writes, adds to, updates, frees
    after: list[str]  # instructions whose results it uses, or whose memory it writes
    waits: list[str]  # those that wait for it
    groups: list[str]
    sends: dict[str, int]  # bytes by axis
    moves: dict[str, int]  # bytes by lane
    rank: int = 0
    ranks: Sequence[int] = ()  # others that take part
    origin: str | None = None  # the pass that put it in
    exchanges: Mapping[str, int] = field(default_factory=dict)  # all-to-alls inside it, by axis
    owns: Sequence[str] = ()  # the matrices that the rank turns in it

    def document(self) -> dict[str, Any]:
        uses = {what: [{"slot": str(slot), "holds": slot_words(slot.kind, self.table), "tier": str(slot.tier),
                        "bytes": self.table.size(slot)} for slot in slots]
                for what, slots in self.slots.items()}
        return {"rank": self.rank, "program": self.program, "position": self.position, "index": self.index,
                "instruction": self.instruction, "of": self.of, "lane": self.lane, "when": self.when, **uses,
                "after": self.after, "waits for it": self.waits, "groups": self.groups, "sends": self.sends,
                "moves": self.moves, "with ranks": self.ranks, "pass": self.origin,
                **({"exchanges": self.exchanges} if self.exchanges else {}),
                **({"turns": self.owns} if self.owns else {})}


def explain(analysis: Analysis, name: str, position: int, index: int) -> Explanation:
    """What the plan alone says: without ranks and pass."""
    program, table = analysis.plan.programs[name][position], analysis.table
    item = program[index]
    effect = effects(item, table, position)
    links, waited = analysis.links_at(name, position), analysis.run_links(name, position)
    # Those whose results it uses, and those that use the memory into which it writes.
    before = [sorted({*used, *others})
              for used, others in zip(links.producers, waited.producers, strict=True)]
    uses = {"reads": effect.reads, "writes": effect.writes, "adds to": effect.adds, "updates": effect.updates,
            "frees": effect.frees}
    return Explanation(
        table, name, position, index, str(item), _name(item, table), effect.lane, _when(item),
        {what: slots for what, slots in uses.items() if slots},
        [f"{at}  {program[at]}" for at in before[index]],
        [f"{at}  {program[at]}" for at, earlier in enumerate(before) if index in earlier],
        list(effect.groups), {axis: size for axis, size in sent_by(table, item).items() if size},
        {effect.lane: size} if (size := moved_by(table, item)) else {}, exchanges=_exchanges(item, table))


def _exchanges(item: Instruction, table: Table) -> Mapping[str, int]:
    """How many all-to-alls are inside an instruction, by axis."""
    if item.op not in COMPUTE:
        return {}
    inside = [table.units[item.unit].exchanged.get(phase, {}) for phase in item.phases]
    return add_up({axis: count for axis, (_, count) in axes.items()} for axes in inside)


def _name(item: Instruction, table: Table) -> str:
    """The unit that an instruction works on, in words."""
    if item.unit < 0:
        return "the whole model"
    of_parameters = item.op in (Op.GATHER, Op.RELEASE, Op.REDUCE, Op.STEP) and not item.of_slot
    if of_parameters or item.kind in PARAMETER_KINDS:
        return f"p{item.unit} ({unit_words(table.parameters[item.unit])})"
    return f"u{item.unit} ({table.units[item.unit].name})"


def _when(item: Instruction) -> str | None:
    """Of what belongs to another step than the program's: which, and when that comes."""
    if item.op == Op.CLIP and item.gradients == "wait":
        return "gradients whose state is on the host wait for the head of the next step, or for settle"
    if item.age == "prev" or item.kind == SlotKind.PREVIOUS_GRAD:
        return "it is part of the update of the step before, which comes at the head of this program"
    return None


def show(explained: Explanation) -> str:
    lines = [f"program '{explained.program}', position pp{explained.position}, instruction "
             f"{explained.index}: {explained.instruction}",
             _line("of", explained.of),
             _line("put in by", f"the pass '{explained.origin}'" if explained.origin else "no pass"),
             _line("lane", explained.lane)]
    lines += [_line("when", explained.when)] if explained.when else []
    for what, slots in explained.slots.items():
        for slot in slots:
            size = f", {show_bytes(held)}" if (held := explained.table.size(slot)) else ""
            lines.append(_line(what, f"{slot} (on the {slot.tier}{size}): "
                                     f"{slot_words(slot.kind, explained.table)}"))
    sizes = [f"{show_bytes(size)} over {axis}" + (
        f" ({many(explained.exchanges[axis], 'all-to-all')})" if axis in explained.exchanges else "")
             for axis, size in explained.sends.items()]
    moved = [f"{show_bytes(size)} by {lane}" for lane, size in explained.moves.items()]
    lines += [_line("sends", "; ".join(sizes))] if sizes else []
    lines += [_line("moves", "; ".join(moved))] if moved else []
    lines += [_line("with ranks", _some(explained.ranks))] if explained.ranks else []
    lines += [_line("turns" if at == 0 else "", row) for at, row in enumerate(explained.owns)]
    for what, rows in (("after", explained.after), ("waits for it", explained.waits)):
        lines += [_line(what if at == 0 else "", row) for at, row in enumerate(rows[:SHOWN])]
        lines += [_line("", f"and {len(rows) - SHOWN} more")] if len(rows) > SHOWN else []
    if not explained.waits:
        lines.append(_line("waits for it", "nothing in this program"))
    return "\n".join(lines)


def _line(what: str, text: str) -> str:
    return f"  {what.ljust(14)}{text}"


def _some(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return ", ".join(map(str, ranks[:SHOWN])) + more

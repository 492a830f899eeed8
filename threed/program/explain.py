"""Explain: what one instruction of a plan is for: which pass put it there, what it reads and makes, who takes
part, what it sends and moves, and what waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from threed.program.effects import effects
from threed.program.instruction import PARAMETER_KINDS, Instruction, Op, Slot
from threed.program.table import Plan, Table
from threed.program.walk import link
from threed.quantity import show_bytes

SHOWN = 5  # instructions that wait, and ranks that take part


def origin(stages: Sequence[tuple[str, Sequence[Instruction]]], index: int) -> str:
    """The pass that put in instruction `index` of the last stage. `stages`: of one position, each pass with
    the program after it. Of equal instructions the n-th is taken for the n-th."""
    item = stages[-1][1][index]
    turn = Counter(stages[-1][1][:index])[item]
    return next(name for name, program in stages if Counter(program)[item] > turn)


def explain(plan: Plan, name: str, position: int, index: int) -> dict[str, Any]:
    """One instruction as values: all that the plan says of it by itself."""
    program, table = plan.programs[name][position], plan.table
    item = program[index]
    effect = effects(item, table, position)
    producers = link(program, table, position, table.seam(position, name)).producers
    uses = {"reads": effect.reads, "writes": effect.writes, "adds to": effect.adds, "updates": effect.updates,
            "frees": effect.frees}
    return {
        "program": name, "position": position, "index": index, "instruction": str(item),
        "of": _name(item, table), "lane": effect.lane,
        **{what: [_slot(slot, table) for slot in slots] for what, slots in uses.items() if slots},
        "after": [f"{at}  {program[at]}" for at in sorted(set(producers[index]))],
        "waits for it": [f"{at}  {program[at]}" for at, made in enumerate(producers) if index in made],
        "groups": list(effect.groups),
        "sends": {axis: size for axis, size in table.sent(item).items() if size},
        "moves": table.moved(item),
    }


def _name(item: Instruction, table: Table) -> str:
    """The unit that an instruction is of, in words."""
    if item.unit < 0:
        return "the whole model"
    if item.op in (Op.GATHER, Op.RELEASE, Op.REDUCE, Op.STEP) or item.kind in PARAMETER_KINDS:
        return f"p{item.unit} ({table.parameters[item.unit].name})"
    return f"u{item.unit} ({table.units[item.unit].name})"


def _slot(slot: Slot, table: Table) -> dict[str, Any]:
    return {"slot": str(slot), "tier": str(slot.tier), "bytes": table.size(slot)}


def show(found: dict[str, Any]) -> str:
    """What `explain` has returned, with its `pass` and `with ranks`, as text."""
    lines = [f"program '{found['program']}', position pp{found['position']}, instruction {found['index']}: "
             f"{found['instruction']}",
             _line("of", found["of"]), _line("put in by", f"the pass '{found['pass']}'"),
             _line("lane", found["lane"])]
    for what in ("reads", "writes", "adds to", "updates", "frees"):
        for each in found.get(what, ()):
            size = f", {show_bytes(each['bytes'])}" if each["bytes"] else ""
            lines.append(_line(what, f"{each['slot']} (on the {each['tier']}{size})"))
    sizes = [f"{show_bytes(size)} over {axis}" for axis, size in found["sends"].items()]
    moved = [f"{show_bytes(size)} by {lane}" for lane, size in found["moves"].items() if size]
    lines += [_line("sends", "; ".join(sizes))] if sizes else []
    lines += [_line("moves", "; ".join(moved))] if moved else []
    if found["with ranks"]:
        lines.append(_line("with ranks", _some(found["with ranks"])))
    for what in ("after", "waits for it"):
        rows = found[what]
        lines += [_line(what if at == 0 else "", row) for at, row in enumerate(rows[:SHOWN])]
        lines += [_line("", f"and {len(rows) - SHOWN} more")] if len(rows) > SHOWN else []
    if not found["waits for it"]:
        lines.append(_line("waits for it", "nothing in this program"))
    return "\n".join(lines)


def _line(what: str, text: str) -> str:
    return f"  {what.ljust(14)}{text}"


def _some(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return ", ".join(map(str, ranks[:SHOWN])) + more

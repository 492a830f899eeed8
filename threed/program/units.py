"""Units: the compute units and the parameter units of a plan, as rows and as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from threed.base.quantity import show_bytes
from threed.program.entries import ComputeUnit
from threed.program.instruction import Slot, SlotKind, Tier
from threed.program.plan import Plan
from threed.program.table import Table

_BLOCK = re.compile(r"(.*?\.\d+)(.*)")  # blocks.3, and .experts: the part of it
# Parameter unit -> names and shapes of its parameters on one rank.
Contents = Mapping[int, Sequence[tuple[str, tuple[int, ...]]]]


def compute_units(plan: Plan) -> list[dict[str, Any]]:
    """The document of the compute units, a row each."""
    table = plan.table
    return [{"unit": f"u{index}", "name": unit.name, "position": table.position(index), "stage": unit.stage,
             "uses": [f"p{p}" for p in unit.parameters]} for index, unit in enumerate(table.units)]


def parameter_units(plan: Plan, contents: Contents) -> list[dict[str, Any]]:
    """The document of the parameter units, a row each. Bytes are of one rank: of the whole unit as compute
    reads it, of the shard that the rank updates, and of that shard's optimizer state and gradient. `ranks`
    ranks of `group` share one copy of the sharded values."""
    table = plan.table
    rows = []
    for index, unit in table.parameters.items():
        whole, shard, optimizer = _sizes(table, index)
        rows.append({
            "unit": f"p{index}", "name": unit.name, "kind": unit.kind,
            "positions": list(unit.positions), "used_by": _used_by(table, index),
            "group": unit.shard_group if table.shards.is_cut(index) else None,
            "ranks": unit.shards if table.shards.is_cut(index) else 1,
            "kept_whole": unit.whole, "reductions": [step.group for step in unit.reductions],
            "elements": unit.numel - unit.padding, "padding": unit.padding,
            "weights": unit.weight_home, "optimizer": unit.state_home,
            "whole_bytes": whole, "shard_bytes": shard, "trains": unit.trains, "optimizer_bytes": optimizer,
            "gradient_bytes": table.shards.numel(index) * table.elements.grad * unit.trains,
            "parameters": [{"name": name, "shape": list(shape)} for name, shape in contents[index]],
        })
    return rows


def _used_by(table: Table, index: int) -> list[str]:
    return [f"u{u}" for u, compute in enumerate(table.units) if index in compute.parameters]


def _sizes(table: Table, index: int) -> tuple[int, int, int]:
    """Bytes of a parameter unit: whole, of the shard, and of the shard's optimizer state."""
    return (table.size(Slot(SlotKind.PARAM, index)),
            table.shards.numel(index) * table.shards.param_bytes(index),
            table.size(table.shards.state(index)) * table.parameters[index].trains)


def show_compute_units(plan: Plan, most: int | None = None) -> str:
    """A line a compute unit. Where there are more than `most`, units of a stage that are alike in all blocks
    are one line, if no other unit uses their parameters."""
    table, units = plan.table, plan.table.units
    groups = ([[index] for index in range(len(units))] if most is None or len(units) <= most else
              min(_runs(units, by_part=False), _runs(units, by_part=True), key=len))
    cells = [(_span("u", group), f"pp{table.position(group[0])}", _ends([units[u].name for u in group]),
              _uses([units[u].parameters for u in group])) for group in groups]
    first, _, name, _ = (max(map(len, column)) + 2 for column in zip(*cells))
    return "\n".join(unit.ljust(max(5, first)) + at.ljust(6) + text.ljust(max(20, name))
                     + f"uses {uses or 'no parameters'}" for unit, at, text, uses in cells)


def _runs(units: Sequence[ComputeUnit], by_part: bool) -> list[list[int]]:
    """Runs of units of a stage that are parts of blocks, whose numbers and whose parameters' numbers rise by
    equal steps; `by_part`: of the same part of blocks with the same parts. What shares a parameter with
    another unit stands alone."""
    users = Counter(used for unit in units for used in unit.parameters)
    split = [_BLOCK.fullmatch(unit.name) for unit in units]  # the block, the part
    parts: dict[str, list[str]] = {}
    for match in filter(None, split):
        parts.setdefault(match[1], []).append(match[2])
    runs: list[list[int]] = []
    last: dict[Any, list[int]] = {}  # kind of unit -> its latest run
    for index, (unit, match) in enumerate(zip(units, split, strict=True)):
        kind: Any = index
        if not any(users[used] > 1 for used in unit.parameters):
            part = (match[2], *parts[match[1]]) if match and by_part else "block"
            kind = part if match else re.sub(r"\d+", "#", unit.name)
        key = unit.stage, kind, len(unit.parameters)
        run = last.get(key)
        if run is None or (len(run) > 1 and _steps(units, *run[-2:]) != _steps(units, run[-1], index)):
            run = last[key] = []
            runs.append(run)
        run.append(index)
    return runs


def _steps(units: Sequence[ComputeUnit], before: int, after: int) -> list[int]:
    """From one unit to the next: of its number, and of those of its parameters."""
    pairs = zip((before, *units[before].parameters), (after, *units[after].parameters), strict=True)
    return [b - a for a, b in pairs]


def _uses(rows: Sequence[Sequence[int]]) -> str:
    return (" ".join(f"p{p}" for p in rows[0]) if len(rows) == 1 else
            "; ".join(_span("p", column) for column in zip(*rows, strict=True)))


def _span(kind: str, numbers: Sequence[int]) -> str:
    """u1 to u9; where they rise by more than 1: u1, u4, ... u31."""
    names = [f"{kind}{number}" for number in numbers]
    if len(names) < 2 or numbers[1] - numbers[0] == 1:
        return _ends(names)
    return ", ".join(names) if len(names) == 2 else f"{names[0]}, {names[1]}, ... {names[-1]}"


def _ends(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


def show_parameter_units(plan: Plan, contents: Contents) -> str:
    """The parameter units as a table, with the parameters of each below it."""
    units = plan.table.parameters
    heads = ("", "kind", "at", "used by", "shared by", "whole", "shard", "optimizer", "")
    table = [heads, *(_cells(plan.table, index) for index in units)]
    widths = [max(len(row[column]) for row in table) + 2 for column in range(len(heads))]
    names = max(len(unit.name) for unit in units.values()) + 2

    def line(cells: Sequence[str], name: str) -> str:
        rest = "".join(cell.ljust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return (cells[0].ljust(widths[0]) + name.ljust(names) + rest).rstrip()

    lines = [line(heads, "")]
    for (index, unit), cells in zip(units.items(), table[1:], strict=True):
        lines.append(line(cells, unit.name))
        lines += [f"{'':{widths[0]}}  {name} [{', '.join(map(str, shape))}]"
                  for name, shape in contents[index]]
    return "\n".join([
        *lines, "", "whole: bytes of the unit as compute reads it; shard: of the part that a rank updates;",
        "optimizer: of its optimizer state. Shapes and bytes are of one rank. A missing number belongs to a",
        "compute unit without parameters of its own (threed show --units u says which units it uses)."])


def _cells(table: Table, index: int) -> tuple[str, ...]:
    unit = table.parameters[index]
    homes = [f"{what} on {home}" for what, home in (("weights", unit.weight_home),
                                                    ("optimizer", unit.state_home)) if home != Tier.DEVICE]
    shared = table.shards.is_cut(index) and unit.shards > 1
    notes = [*([] if unit.trains else ["frozen"]), *([] if unit.whole else ["gathered for each use"]), *homes]
    return (f"p{index}", unit.kind, " ".join(f"pp{p}" for p in unit.positions),
            " ".join(_used_by(table, index)),
            f"{unit.shards} over {unit.shard_group}" if shared else "nobody",
            *map(show_bytes, _sizes(table, index)), ", ".join(notes))

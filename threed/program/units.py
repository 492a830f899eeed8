"""Units: the compute units and the parameter units of a plan, as rows and as text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from threed.base.quantity import show_bytes
from threed.program.instruction import Slot, SlotKind
from threed.program.plan import Plan

_BLOCK = re.compile(r"(.*?\.\d+)(.*)")  # blocks.3, and .experts: the part of it
# Parameter unit -> names and shapes of its parameters on one rank.
Contents = Mapping[int, Sequence[tuple[str, tuple[int, ...]]]]


def compute_units(plan: Plan) -> list[dict[str, Any]]:
    """A row a compute unit."""
    table = plan.table
    return [{"unit": f"u{index}", "name": unit.name, "position": table.position(index), "stage": unit.stage,
             "uses": [f"p{p}" for p in unit.parameters]} for index, unit in enumerate(table.units)]


def parameter_units(plan: Plan, contents: Contents) -> list[dict[str, Any]]:
    """A row a parameter unit. Bytes are of one rank: of the whole unit as compute reads it, of the shard that
    the rank updates, and of that shard's optimizer state and gradient. `ranks` ranks of `group` share one
    copy of the sharded values."""
    table = plan.table
    rows = []
    for index, unit in table.parameters.items():
        rows.append({
            "unit": f"p{index}", "name": unit.name, "kind": unit.kind,
            "positions": list(unit.positions),
            "used_by": [f"u{u}" for u, compute in enumerate(table.units) if index in compute.parameters],
            "group": unit.shard_group if table.shards.is_cut(index) else None,
            "ranks": unit.shards if table.shards.is_cut(index) else 1,
            "kept_whole": unit.whole, "reductions": [step.group for step in unit.reductions],
            "elements": unit.numel - unit.padding, "padding": unit.padding,
            "weights": unit.weight_home, "optimizer": unit.state_home,
            "whole_bytes": table.size(Slot(SlotKind.PARAM, index)),
            "shard_bytes": table.shards.numel(index) * table.shards.param_bytes(index),
            "trains": unit.trains,
            "optimizer_bytes": table.size(table.shards.state(index)) * unit.trains,
            "gradient_bytes": table.shards.numel(index) * table.elements.grad * unit.trains,
            "parameters": [{"name": name, "shape": list(shape)} for name, shape in contents[index]],
        })
    return rows


def show_compute_units(plan: Plan, most: int | None = None) -> str:
    """The rows of `compute_units` as text. Where there are more than `most`, units of a stage that are alike
    in all blocks are one row, if no other unit uses their parameters."""
    rows = compute_units(plan)
    groups = ([[row] for row in rows] if most is None or len(rows) <= most else
              min(_runs(rows, by_part=False), _runs(rows, by_part=True), key=len))
    cells = [(_span([row["unit"] for row in group]), f"pp{group[0]['position']}",
              _ends([row["name"] for row in group]), _uses([row["uses"] for row in group]))
             for group in groups]
    first, _, name, _ = (max(map(len, column)) + 2 for column in zip(*cells))
    return "\n".join(unit.ljust(max(5, first)) + at.ljust(6) + text.ljust(max(20, name))
                     + f"uses {uses or 'no parameters'}" for unit, at, text, uses in cells)


def _runs(rows: Sequence[dict[str, Any]], by_part: bool) -> list[list[dict[str, Any]]]:
    """Runs of units of a stage that are parts of blocks, whose numbers and whose parameters' numbers rise by
    equal steps; `by_part`: of the same part of blocks with the same parts. What shares a parameter with
    another unit stands alone."""
    users = Counter(used for row in rows for used in row["uses"])
    split = [_BLOCK.fullmatch(row["name"]) for row in rows]  # the block, the part
    parts: dict[str, list[str]] = {}
    for match in filter(None, split):
        parts.setdefault(match[1], []).append(match[2])
    runs: list[list[dict[str, Any]]] = []
    last: dict[Any, list[dict[str, Any]]] = {}  # kind of unit -> its latest run
    for row, match in zip(rows, split, strict=True):
        kind: Any = row["unit"]
        if not any(users[used] > 1 for used in row["uses"]):
            part = (match[2], *parts[match[1]]) if match and by_part else "block"
            kind = part if match else re.sub(r"\d+", "#", row["name"])
        key = row["stage"], kind, len(row["uses"])
        run = last.get(key)
        if run is None or (len(run) > 1 and _steps(run[-2:]) != _steps([run[-1], row])):
            run = last[key] = []
            runs.append(run)
        run.append(row)
    return runs


def _steps(rows: Sequence[dict[str, Any]]) -> list[int]:
    """From one unit to the next: of its number, and of those of its parameters."""
    before, after = ([int(name[1:]) for name in (row["unit"], *row["uses"])] for row in rows)
    return [b - a for a, b in zip(before, after, strict=True)]


def _uses(rows: Sequence[Sequence[str]]) -> str:
    return " ".join(rows[0]) if len(rows) == 1 else "; ".join(map(_span, zip(*rows, strict=True)))


def _span(names: Sequence[str]) -> str:
    """u1 to u9; where they rise by more than 1: u1, u4, ... u31."""
    if len(names) < 2 or int(names[1][1:]) - int(names[0][1:]) == 1:
        return _ends(names)
    return ", ".join(names) if len(names) == 2 else f"{names[0]}, {names[1]}, ... {names[-1]}"


def _ends(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


def show_parameter_units(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `parameter_units` as a table, with the parameters of each unit below it."""
    heads = ("", "kind", "at", "used by", "shared by", "whole", "shard", "optimizer", "")
    table = [heads, *(_cells(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) + 2 for column in range(len(heads))]
    names = max(len(row["name"]) for row in rows) + 2

    def line(cells: Sequence[str], name: str) -> str:
        rest = "".join(cell.ljust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        return (cells[0].ljust(widths[0]) + name.ljust(names) + rest).rstrip()

    lines = [line(heads, "")]
    for row, cells in zip(rows, table[1:], strict=True):
        lines.append(line(cells, row["name"]))
        lines += [f"{'':{widths[0]}}  {each['name']} [{', '.join(map(str, each['shape']))}]"
                  for each in row["parameters"]]
    return "\n".join([
        *lines, "", "whole: bytes of the unit as compute reads it; shard: of the part that a rank updates;",
        "optimizer: of its optimizer state. Shapes and bytes are of one rank. A missing number belongs to a",
        "compute unit without parameters of its own (threed show --units u says which units it uses)."])


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    homes = [f"{what} on {row[key]}" for what, key in (("weights", "weights"), ("optimizer", "optimizer"))
             if row[key] != "device"]
    shared = f"{row['ranks']} over {row['group']}" if row["ranks"] > 1 else "nobody"
    notes = [*([] if row["trains"] else ["frozen"]),
             *([] if row["kept_whole"] else ["gathered for each use"]), *homes]
    sizes = (show_bytes(row[key]) for key in ("whole_bytes", "shard_bytes", "optimizer_bytes"))
    return (row["unit"], row["kind"], " ".join(f"pp{p}" for p in row["positions"]), " ".join(row["used_by"]),
            shared, *sizes, ", ".join(notes))

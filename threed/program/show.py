"""Show: a plan as text, and when its instructions run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from threed.base.quantity import many
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.plan import Plan
from threed.program.table import Table
from threed.program.trips import trip_of
from threed.program.walk import Cost, Mode, Walk, walk

_LETTERS = {Op.FORWARD: "F", Op.RECOMPUTE: "R", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "B",
            Op.BACKWARD_WEIGHT: "W"}
_NAME = 6  # characters of a position's name


def unit_cost(table: Table) -> Cost:
    """Costs for pictures: FORWARD of a stage takes 1 and BACKWARD takes 2 (each half 1), split over the units
    of the stage; all exchanges of rows in one of them take 1."""
    counts, exchanges = [0] * len(table.stage_positions), [0] * len(table.stage_positions)
    for unit in table.units:
        counts[unit.stage] += 1
        exchanges[unit.stage] += sum(1 for made in unit.makes if made.leaves)

    def cost(_: int, instruction: Instruction) -> float:
        if instruction.op in COMPUTE:
            whole = 2.0 if instruction.op == Op.BACKWARD else 1.0
            return whole / counts[table.units[instruction.unit].stage]
        if instruction.op == Op.EXCHANGE and instruction.of_slot and (
                made := trip_of(instruction, table).tensor).leaves:
            return 0.0 if made.ranks == 1 else 1.0 / exchanges[table.units[instruction.unit].stage]
        return 0.0

    return cost


def timeline(analysis: Analysis, name: str = "train", cost: Cost | None = None) -> Walk:
    """When each instruction runs, where every lane runs by itself."""
    return walk(analysis.plan.programs[name], analysis.simulated(name), Mode.BUFFERED,
                cost or unit_cost(analysis.table))


def grid(analysis: Analysis, name: str = "train", most: int = 160, columns: int | None = None) -> str:
    """One row a position, one cell a unit of time: what the position computes then (F3 is FORWARD of
    micro-batch 3, F3B1 both by turns). Below it a row for each group over which rows are exchanged: those of
    a forward (F3), or gradients of them (B3). Of `most` cells at most; `columns`: of a terminal, below whose
    edge rows go on."""
    when, rows = timeline(analysis, name), list[tuple[str, dict[int, str]]]()
    for position, program in enumerate(analysis.plan.programs[name]):
        lanes: dict[str, list[tuple[str, float, float]]] = {f"pp{position}": []}
        for item, start, end in zip(program, when.start[position], when.end[position], strict=True):
            if item.op in COMPUTE:
                lanes[f"pp{position}"].append((f"{_LETTERS[item.op]}{item.microbatch}", start, end))
            elif item.op == Op.EXCHANGE and item.of_slot and end > start:
                letter = "B" if trip_of(item, analysis.table).back else "F"
                lanes.setdefault(f"  {item.group}", []).append((f"{letter}{item.microbatch}", start, end))
        rows += [(lane, _cells(drawn, analysis.table.pair is not None)) for lane, drawn in lanes.items()]
    longest = max(max(cells, default=0) + 1 for _, cells in rows)
    texts = (text for _, cells in rows for text in cells.values())
    width = max(len(str(analysis.table.num_microbatches - 1)) + 2, 1 + max(map(len, texts), default=0))
    fit = most if columns is None else max(1, (columns - _NAME) // width)

    def row(cells: Mapping[int, str], first: int) -> str:
        stop = min(first + fit, most, max(cells, default=0) + 1)
        return "".join(cells.get(cell, ".").ljust(width) for cell in range(first, stop)).rstrip()

    parts = ["\n".join(lane.ljust(_NAME) + row(cells, first) for lane, cells in rows)
             for first in range(0, min(most, longest), fit)]
    cut = f"\n(the first {most} of {longest} cells; --svg draws all)" if longest > most else ""
    return "\n\n".join(parts) + cut


def _cells(drawn: Sequence[tuple[str, float, float]], pairs: bool) -> dict[int, str]:
    """Cell -> the last that takes a part of it; with `pairs` the one that takes most of it, and where that is
    of a forward or a backward, and the other is in it too, both."""
    shares: dict[int, dict[str, float]] = {}
    for text, start, end in drawn:
        # A stage's units share its cells; sums of fractions such as 1/3 are not exactly whole.
        first = math.floor(start + 1e-6)
        for cell in range(first, max(first + 1, math.ceil(end - 1e-6))):
            share = shares.setdefault(cell, {})
            share[text] = share.pop(text, 0.0) + min(end, cell + 1) - max(start, cell)
    return {cell: _both(share) if pairs else [*share][-1] for cell, share in shares.items()}


def _both(share: Mapping[str, float]) -> str:
    most = max(share, key=lambda text: round(share[text], 6))
    others = [text for text in share if (text[0] == "F") != (most[0] == "F") and text[1:] != most[1:]]
    other = max(others, key=lambda text: round(share[text], 6), default="")
    return most + other if most[0] == "F" else other + most


def legend(plan: Plan, name: str = "train") -> str:
    """How many cells of `grid` an item of a program takes, and the letters that are not plain."""
    ops = {instruction.op for program in plan.programs[name] for instruction in program}
    texts = {Op.FORWARD: "a forward of a stage drawn as 1", Op.BACKWARD: "a backward as 2",
             Op.BACKWARD_INPUT: "each half of a split backward as 1: B the input's gradient, W the weights'",
             Op.EXCHANGE: "all exchanges of a forward or a backward as 1, below the positions"}
    far = any(each.ranks > 1 for unit in plan.table.units for each in unit.makes)
    return ", ".join(text for op, text in texts.items() if op in ops and (far or op != Op.EXCHANGE))


def beside(plan: Plan, name: str = "train") -> str | None:
    """What `grid` does not draw of a program: the updates that the host makes, and a program that computes
    nothing. None where it draws all that takes long."""
    items = [item for program in plan.programs[name] for item in program]
    head = len({item.unit for item in items if item.op == Op.STEP and item.age == "prev"})
    if not any(item.op in COMPUTE for item in items):
        what = f": the host updates {many(head, 'parameter unit')}" if head else ""
        return f"nothing is computed on a device here{what}; --rank R lists the instructions"
    return (f"not drawn: at the head of the step the host updates {many(head, 'parameter unit')} with the "
            "gradients of the step before; --rank R lists that as STEP (prev)") if head else None


def listing(plan: Plan, position: int, name: str = "train") -> str:
    """The program of a position, one instruction a line."""
    program = plan.programs[name][position]
    return "\n".join(f"{index:5d}  {instruction}" for index, instruction in enumerate(program))

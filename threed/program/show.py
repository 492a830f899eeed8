"""Show: a plan as text, and when its instructions run."""

from __future__ import annotations

import math

from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.plan import Plan
from threed.program.table import Table
from threed.program.walk import Cost, Mode, Walk, walk

_LETTERS = {Op.FORWARD: "F", Op.RECOMPUTE: "R", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "B",
            Op.BACKWARD_WEIGHT: "W"}
_NAME = 6  # characters of a position's name


def unit_cost(table: Table) -> Cost:
    """Costs for pictures: FORWARD of a stage takes 1 and BACKWARD takes 2 (each half 1), split over the units
    of the stage."""
    counts = [0] * len(table.stage_positions)
    for unit in table.units:
        counts[unit.stage] += 1

    def cost(_: int, instruction: Instruction) -> float:
        if instruction.op not in COMPUTE:
            return 0.0
        return (2.0 if instruction.op == Op.BACKWARD else 1.0) / counts[table.units[instruction.unit].stage]

    return cost


def timeline(analysis: Analysis, name: str = "train", cost: Cost | None = None) -> Walk:
    """When each instruction runs, where every lane runs by itself."""
    return walk(analysis.plan.programs[name], analysis.simulated(name), Mode.BUFFERED,
                cost or unit_cost(analysis.table))


def grid(analysis: Analysis, name: str = "train", most: int = 160, columns: int | None = None) -> str:
    """One row a position, one cell a unit of time: what the position computes then (F3 is FORWARD of
    micro-batch 3). Of `most` cells at most; `columns`: of a terminal, below whose edge rows go on."""
    table, when = analysis.table, timeline(analysis, name)
    width = len(str(table.num_microbatches - 1)) + 2
    rows, longest = [], 0
    for position, program in enumerate(analysis.plan.programs[name]):
        drawn: dict[int, str] = {}
        for index, instruction in enumerate(program):
            if instruction.op in COMPUTE:
                # A stage's units share its cells; sums of fractions such as 1/3 are not exactly whole.
                first = math.floor(when.start[position][index] + 1e-6)
                for cell in range(first, max(first + 1, math.ceil(when.end[position][index] - 1e-6))):
                    drawn[cell] = f"{_LETTERS[instruction.op]}{instruction.microbatch}"
        length = max(drawn, default=0) + 1
        longest = max(longest, length)
        rows.append([drawn.get(cell, ".").ljust(width) for cell in range(min(most, length))])
    fit = most if columns is None else max(1, (columns - _NAME) // width)
    parts = ["\n".join(f"pp{position}".ljust(_NAME) + "".join(row[first:first + fit]).rstrip()
                       for position, row in enumerate(rows))
             for first in range(0, min(most, longest), fit)]
    cut = f"\n(the first {most} of {longest} cells; --svg draws all)" if longest > most else ""
    return "\n\n".join(parts) + cut


def legend(plan: Plan, name: str = "train") -> str:
    """How many cells of `grid` an item of a program takes, and the letters that are not plain."""
    ops = {instruction.op for program in plan.programs[name] for instruction in program}
    texts = {Op.FORWARD: "a forward of a stage drawn as 1", Op.BACKWARD: "a backward as 2",
             Op.BACKWARD_INPUT: "each half of a split backward as 1: B the input's gradient, W the weights'"}
    return ", ".join(text for op, text in texts.items() if op in ops)


def listing(plan: Plan, position: int, name: str = "train") -> str:
    """The program of a position, one instruction a line."""
    program = plan.programs[name][position]
    return "\n".join(f"{index:5d}  {instruction}" for index, instruction in enumerate(program))

"""Show: a plan as text, and when its instructions run."""

from __future__ import annotations

import math

from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.order import plan_links
from threed.program.table import Plan, Table
from threed.program.walk import Mode, Walk, walk

_LETTERS = {Op.FORWARD: "F", Op.RECOMPUTE: "R", Op.BACKWARD: "B", Op.BACKWARD_INPUT: "B",
            Op.BACKWARD_WEIGHT: "W"}


def unit_cost(table: Table):
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


def timeline(plan: Plan, name: str = "train", cost=None) -> Walk:
    """When each instruction runs, where every lane runs by itself."""
    return walk(plan.programs[name], plan_links(plan, name), Mode.BUFFERED, cost or unit_cost(plan.table))


def grid(plan: Plan, name: str = "train", most: int = 160) -> str:
    """One row a position, one column a unit of time: what the position computes then (F3 is FORWARD of
    micro-batch 3)."""
    table, when = plan.table, timeline(plan, name)
    width = len(str(table.num_microbatches - 1)) + 2
    lines = []
    for position, program in enumerate(plan.programs[name]):
        columns: dict[int, str] = {}
        for index, instruction in enumerate(program):
            if instruction.op in COMPUTE:
                # A stage's units share its columns; sums of fractions such as 1/3 are not exactly whole.
                first = math.floor(when.start[position][index] + 1e-6)
                for column in range(first, max(first + 1, math.ceil(when.end[position][index] - 1e-6))):
                    columns[column] = f"{_LETTERS[instruction.op]}{instruction.microbatch}"
        length = min(most, max(columns, default=0) + 1)
        cells = "".join(columns.get(column, ".").ljust(width) for column in range(length))
        lines.append(f"pp{position}".ljust(6) + cells.rstrip())
    return "\n".join(lines)


def legend(plan: Plan, name: str = "train") -> str:
    """How many columns of `grid` an item of a program takes, and the letters that are not plain."""
    ops = {instruction.op for program in plan.programs[name] for instruction in program}
    texts = {Op.FORWARD: "a forward of a stage drawn as 1", Op.BACKWARD: "a backward as 2",
             Op.BACKWARD_INPUT: "each half of a split backward as 1: B the input's gradient, W the weights'"}
    return ", ".join(text for op, text in texts.items() if op in ops)


def listing(plan: Plan, position: int, name: str = "train") -> str:
    """The program of a position, one instruction a line."""
    program = plan.programs[name][position]
    return "\n".join(f"{index:5d}  {instruction}" for index, instruction in enumerate(program))

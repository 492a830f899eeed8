"""Show: a plan as text, and as an SVG timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.order import plan_links
from threed.program.table import Plan, Table
from threed.program.walk import Mode, Walk, walk

_COLORS = {Op.FORWARD: "#4c78a8", Op.RECOMPUTE: "#9ecae9", Op.BACKWARD: "#f58518",
           Op.BACKWARD_INPUT: "#f58518", Op.BACKWARD_WEIGHT: "#54a24b", Op.CLIP: "#bab0ac",
           Op.STEP: "#b279a2"}
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


def picture(plan: Plan, name: str = "train") -> str:
    """The timeline of a program, with the costs of `unit_cost`, as SVG."""
    schedule = plan.config.parallel.schedule + ", " if plan.config else ""
    table = plan.table
    title = f"{schedule}{table.num_positions} positions, {table.num_microbatches} micro-batches, {name}"
    return svg(plan.programs[name], timeline(plan, name), title)


def svg(programs: Sequence[Sequence[Instruction]], when: Walk, title: str) -> str:
    """A timeline: one row a position; the op chooses the colour, the micro-batch the shade and the number.
    Units that run one after the other for one micro-batch are drawn as one block."""
    scale, row = 1000 / (when.total_s or 1.0), 26
    height = row * len(programs) + 40
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="1080" height="{height}" '
             'font-family="sans-serif" font-size="10">',
             f'<text x="8" y="16" font-size="12">{escape(title, quote=False)}</text>']
    for position, program in enumerate(programs):
        y = 26 + row * position
        parts.append(f'<text x="8" y="{y + 15}">pp{position}</text>')
        for op, microbatch, first, last, name in _blocks(program, when.start[position], when.end[position]):
            x, width, title = 50 + first * scale, (last - first) * scale, escape(name, quote=False)
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{row - 4}" '
                         f'fill="{_COLORS[op]}" fill-opacity="{0.6 + 0.4 * (microbatch % 2):.1f}" '
                         f'stroke="#fff" stroke-width="0.6"><title>{title}</title></rect>')
            if microbatch >= 0 and width > 9:
                parts.append(f'<text x="{x + width / 2:.1f}" y="{y + 15}" fill="#fff" '
                             f'text-anchor="middle">{microbatch}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _blocks(program: Sequence[Instruction], start: Sequence[float],
            end: Sequence[float]) -> list[tuple[Op, int, float, float, str]]:
    """(op, micro-batch, start, end, name) of each block to draw: consecutive instructions of one op, one
    micro-batch and neighbouring units are joined."""
    blocks: list[tuple[Op, int, float, float, str]] = []
    previous = Instruction(Op.CLIP)
    for instruction, first, last in zip(program, start, end, strict=True):
        if instruction.op not in _COLORS or last <= first:
            continue
        alike = (previous.op, previous.microbatch) == (instruction.op, instruction.microbatch)
        neighbours = abs(previous.unit - instruction.unit) == 1
        if alike and neighbours and first - blocks[-1][3] < 0.1 * (last - first):
            op, microbatch, begin, _, name = blocks[-1]
            blocks[-1] = (op, microbatch, begin, last, f"{name.split(' to ')[0]} to u{instruction.unit}")
        else:
            blocks.append((instruction.op, instruction.microbatch, first, last, str(instruction)))
        previous = instruction
    return blocks

"""Timeline as SVG, and the colours and blocks of all timelines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from threed.base.quantity import show_seconds
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.show import timeline
from threed.program.walk import Walk

COLORS = {Op.FORWARD: "#4c78a8", Op.RECOMPUTE: "#9ecae9", Op.BACKWARD: "#f58518",
          Op.BACKWARD_INPUT: "#c4570a", Op.BACKWARD_WEIGHT: "#54a24b", Op.CLIP: "#bab0ac",
          Op.STEP: "#b279a2", Op.SEND: "#439894", Op.RECV: "#83bcb6", Op.GATHER: "#eeca3b",
          Op.REDUCE: "#e45756", Op.OFFLOAD: "#9d755d", Op.FETCH: "#d9a066",
          Op.RELEASE: "#d8d8d8", Op.EXCHANGE: "#6f4aa0"}
assert set(COLORS) == set(Op)
_DRAWN = (*COMPUTE, Op.CLIP, Op.STEP)
_LEFT, _TOP, _ROW = 50, 48, 26  # pixels
_WIDTHS = 1000, 4000  # least and most of the rows
_DIGIT = 6  # width of a digit


class DrawnOp(NamedTuple):
    """Something that a timeline draws as one box; times in seconds."""

    op: Op
    microbatch: int
    begin: float
    end: float
    name: str


def blocks(program: Sequence[Instruction], start: Sequence[float], end: Sequence[float]) -> list[DrawnOp]:
    """The blocks of a lane. Neighbouring units that are computed one after the other for one micro-batch are
    one block; what takes no time is none."""
    drawn: list[DrawnOp] = []
    previous = Instruction(Op.CLIP)
    for instruction, first, last in zip(program, start, end, strict=True):
        if last <= first:
            continue
        alike = (previous.op, previous.microbatch) == (instruction.op, instruction.microbatch)
        neighbours = abs(previous.unit - instruction.unit) == 1 and instruction.op in COMPUTE
        if alike and neighbours and first - drawn[-1].end < 0.1 * (last - first):
            name = f"{drawn[-1].name.split(' to ')[0]} to u{instruction.unit}"
            drawn[-1] = drawn[-1]._replace(end=last, name=name)
        else:
            drawn.append(DrawnOp(instruction.op, instruction.microbatch, first, last, str(instruction)))
        previous = instruction
    return drawn


def picture(analysis: Analysis, name: str = "train") -> str:
    """The timeline of a program, with the costs of `unit_cost`, as SVG."""
    plan = analysis.plan
    schedule = plan.config.parallel.schedule + ", " if plan.config else ""
    table = plan.table
    title = f"{schedule}{table.num_positions} positions, {table.num_microbatches} micro-batches, {name}"
    return svg(plan.programs[name], timeline(analysis, name), title, lambda time: f"{time:g}",
               "forwards of a stage")


def svg(programs: Sequence[Sequence[Instruction]], when: Walk, title: str,
        mark: Callable[[float], str] = show_seconds, unit: str = "") -> str:
    """A timeline: one row a position; the op chooses the colour, the micro-batch the shade and the number,
    which is left out where a block is too narrow for it. The picture is as wide as numbers need, within
    limits. `mark`: the text of a time on the axis; `unit`: what the texts count."""
    rows = [_computed(*row) for row in zip(programs, when.start, when.end, strict=True)]
    total = when.total_s or 1.0
    scale = _scale(rows, total)
    width, bottom = _LEFT + math.ceil(total * scale) + 30, _TOP + _ROW * len(rows)
    height = bottom + 24
    # A ground, since the page around it may be dark; a viewBox, so that the picture shrinks to a narrow page.
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
             f'viewBox="0 0 {width} {height}" style="max-width: 100%; height: auto" font-family="sans-serif" '
             f'font-size="10">', f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>',
             f'<text x="8" y="16" font-size="12">{escape(f"{title}, bubble {_bubble(rows, total):.1%}")}'
             '</text>', *_legend(rows)]
    for position, row in enumerate(rows):
        y = _TOP + _ROW * position
        parts.append(f'<text x="8" y="{y + 15}">pp{position}</text>')
        for op, microbatch, first, last, name in row:
            x, wide = _LEFT + first * scale, (last - first) * scale
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{_ROW - 4}" '
                         f'fill="{COLORS[op]}" fill-opacity="{0.6 + 0.4 * (microbatch % 2):.1f}" '
                         f'stroke="#fff" stroke-width="0.6"><title>{escape(name)}</title></rect>')
            if microbatch >= 0 and wide >= _DIGIT * len(str(microbatch)) + 2:
                parts.append(f'<text x="{x + wide / 2:.1f}" y="{y + 15}" fill="#fff" '
                             f'text-anchor="middle">{microbatch}</text>')
    return "\n".join([*parts, *_axis(total, scale, bottom, mark, unit), "</svg>", ""])


def _computed(program: Sequence[Instruction], start: Sequence[float], end: Sequence[float]) -> list[DrawnOp]:
    """The blocks of the compute lane."""
    chosen = [index for index, item in enumerate(program) if item.op in _DRAWN]
    return blocks([program[i] for i in chosen], [start[i] for i in chosen], [end[i] for i in chosen])


def _bubble(rows: Sequence[Sequence[DrawnOp]], total: float) -> float:
    busy = sum(block.end - block.begin for row in rows for block in row if block.op != Op.CLIP)
    return max(0.0, 1.0 - busy / (total * len(rows)))


def _scale(rows: Sequence[Sequence[DrawnOp]], total: float) -> float:
    """Pixels a second: so that most numbers fit into their blocks."""
    least, most = (width / total for width in _WIDTHS)
    needs = sorted((_DIGIT * len(str(block.microbatch)) + 2) / (block.end - block.begin)
                   for row in rows for block in row if block.microbatch >= 0)
    return min(most, max([least, *needs[int(0.9 * len(needs)):][:1]]))


def _legend(rows: Sequence[Sequence[DrawnOp]]) -> list[str]:
    parts, x = [], _LEFT
    for op in dict.fromkeys(block.op for op in COLORS for row in rows for block in row if block.op == op):
        parts += [f'<rect x="{x}" y="26" width="12" height="12" fill="{COLORS[op]}"/>',
                  f'<text x="{x + 16}" y="36">{op}</text>']
        x += 30 + 7 * len(op)
    return [*parts, f'<text x="{x}" y="36" fill="#666">numbers and shades: micro-batches</text>']


def _axis(total: float, scale: float, y: int, mark: Callable[[float], str], unit: str) -> list[str]:
    step = nice_step(total, 80 / scale)
    parts = [f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + total * scale:.1f}" y2="{y}" stroke="#888"/>']
    for index in range(int(total / step) + 1):
        x = _LEFT + index * step * scale
        text = mark(index * step) + (f" {unit}" if unit and not index else "")
        parts += [f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 4}" stroke="#888"/>',
                  f'<text x="{x:.1f}" y="{y + 15}" fill="#666" '
                  f'text-anchor="{"middle" if index else "start"}">{escape(text)}</text>']
    return parts


def nice_step(total: float, least: float) -> float:
    """The distance of marks on an axis: 1, 2 or 5 times a power of ten, and at least `least`."""
    power = 10.0 ** math.floor(math.log10(max(least, total * 1e-6)))
    return next(power * times for times in (1, 2, 5, 10) if power * times >= least)

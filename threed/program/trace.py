"""Trace: when each instruction of a program ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from threed.program.instruction import COMPUTE, Instruction, Op


@dataclass
class Trace:
    """Times of one run of a program, in seconds from its start: issue, inputs there, end; one entry an instruction."""

    name: str
    issued: list[float] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    total_s: float = 0.0


def compute_s(trace: Trace, program: Sequence[Instruction]) -> float:
    """Seconds in compute instructions, waiting for their inputs not counted. STEP is work too; CLIP is a barrier."""
    return sum(trace.ended[i] - trace.started[i] for i, instruction in enumerate(program)
               if instruction.op in COMPUTE or instruction.op == Op.STEP)

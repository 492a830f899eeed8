"""Trace: when each instruction of a program ran, and what it waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from threed.program.effects import Effects
from threed.program.instruction import COMPUTE, Instruction, Op, Slot


class Wait(NamedTuple):
    """An instruction waited for a slot that was still on its way."""

    index: int  # of the instruction that waited
    source: int  # of the instruction that makes the slot
    wait_s: float


@dataclass
class Trace:
    """Times of one run of a program, in seconds from its start: issue, inputs there, end; one entry an
    instruction.

    Between issue and `started` an instruction waits, and `waits` say for what. After the last one ends the
    rank waits until everything it sent has left: that is the rest up to `total_s`.
    """

    name: str
    begin: float = 0.0  # seconds since 1970, by this host's clock
    issued: list[float] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    total_s: float = 0.0


def sources(effects: Sequence[Effects]) -> list[dict[Slot, int]]:
    """For each instruction of a program: slot that it reads or updates -> the latest instruction that made
    it."""
    made: dict[Slot, int] = {}
    found = []
    for index, effect in enumerate(effects):
        found.append({slot: made[slot] for slot in (*effect.reads, *effect.updates) if slot in made})
        made |= dict.fromkeys((*effect.writes, *effect.adds, *effect.updates), index)
    return found


def compute_s(trace: Trace, program: Sequence[Instruction]) -> float:
    """Seconds in compute instructions, waiting for their inputs not counted. STEP is work too; CLIP is a
    barrier."""
    return sum(trace.ended[i] - trace.started[i] for i, instruction in enumerate(program)
               if instruction.op in COMPUTE or instruction.op == Op.STEP)

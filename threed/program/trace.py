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
    source: int  # index of the instruction that makes the slot
    wait_s: float


@dataclass
class Trace:
    """Times of one run of a program, in seconds from its start, one entry an instruction: when it was issued,
    when its inputs were ready and it started, and when it ended.

    Between issue and start an instruction waits for the slots that `waits` names. After the last instruction
    the rank waits until everything that it sent has left: this fills the rest up to `total_s`.
    """

    name: str
    begin: float = 0.0  # seconds since 1970, by this host's clock
    issued: list[float] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    total_s: float = 0.0


def sources(effects: Sequence[Effects]) -> list[dict[Slot, int]]:
    """For each instruction of a program: slot that it reads or updates -> the latest instruction that changed
    the slot."""
    latest: dict[Slot, int] = {}
    rows = []
    for index, effect in enumerate(effects):
        rows.append({slot: latest[slot] for slot in (*effect.reads, *effect.updates) if slot in latest})
        latest |= dict.fromkeys((*effect.writes, *effect.adds, *effect.updates), index)
    return rows


def compute_s(trace: Trace, program: Sequence[Instruction]) -> float:
    """Seconds in compute instructions and STEP, without the time that they wait for inputs. CLIP does not
    count: it is a barrier."""
    return sum(trace.ended[i] - trace.started[i] for i, instruction in enumerate(program)
               if instruction.op in COMPUTE or instruction.op == Op.STEP)

"""Trace: when each instruction of a program ran, and what it waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from threed.program.instruction import COMPUTE, Instruction, Op


class Wait(NamedTuple):
    """An instruction waited for an earlier one of another lane."""

    index: int  # of the instruction that waited; the program's length: the end of the program
    source: int  # index of the instruction that it waited for; -1: of an earlier program
    wait_s: float


class Ran(NamedTuple):
    """What a lane beside the computation did for an instruction: a copy between tiers, a step on the host."""

    index: int
    start_s: float  # since the program's start
    ran_s: float


@dataclass
class Trace:
    """Times of one run of a program, in seconds from its start, one entry an instruction: when it was issued,
    when its inputs were ready and it started, and when it ended.

    Between issue and start an instruction waits for those that `waits` names. After the last instruction the
    rank waits until everything that it sent has left, and for the last job of each lane: this fills the rest
    up to `total_s`. A job of a lane beside the computation is only issued at its place in the program; `ran`
    says when the lanes between tiers, and the host's, did it.
    """

    name: str
    begin: float = 0.0  # seconds since 1970, by this host's clock
    issued: list[float] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    total_s: float = field(default_factory=float)  # no attribute of the class: __getattr__ is asked
    ran: list[Ran] = field(default_factory=list)

    @classmethod
    def late(cls, name: str, begin: float, read: Callable[[], dict[str, Any]]) -> Trace:
        """A trace whose other fields are read when one of them is asked for: until then nobody waits for the
        device."""
        trace = object.__new__(cls)
        vars(trace).update(name=name, begin=begin, _read=read)
        return trace

    @property
    def is_late(self) -> bool:
        """Whether somebody would wait for the device who asks for the other fields."""
        return "_read" in vars(self)

    def times(self) -> tuple[list[float], list[float]]:
        """When each instruction began and ended, where it was done."""
        started, ended = list(self.started), list(self.ended)
        for index, start_s, ran_s in self.ran:
            started[index], ended[index] = start_s, start_s + ran_s
        return started, ended

    def took(self) -> list[float]:
        """Seconds of each instruction, where it was done."""
        return [end - start for start, end in zip(*self.times(), strict=True)]

    def __getattr__(self, name: str) -> Any:
        """Python asks here for fields that are not there yet."""
        if name not in _LATE or not self.is_late:
            raise AttributeError(name)
        vars(self).update(vars(self).pop("_read")())
        return vars(self)[name]

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("name", "begin", *_LATE)}


_LATE = ("issued", "started", "ended", "waits", "total_s", "ran")


def compute_s(trace: Trace, program: Sequence[Instruction]) -> float:
    """Seconds in compute instructions and STEP, without the time that they wait for inputs. CLIP does not
    count: it is a barrier."""
    return sum(trace.ended[i] - trace.started[i] for i, instruction in enumerate(program)
               if instruction.op in COMPUTE or instruction.op == Op.STEP)

"""Goodput: the share of the time since a run began that went into steps that count, and what the rest went
into, over all of its starts. All of it follows from files that survive whatever kills a run:

    time.jsonl               what the run does, and since when; a line is added at each change:
                             {"time": 1700000000.0, "doing": "load", "first": false}     first: of a process
    metrics.jsonl            when each step that counts ended, and how long it stood still for other things
    metrics.undone.jsonl     the same for steps that were repeated

So the parts add up to the time from the first mark to the last sign. Between the last sign of a process that
was killed and the next start the run was down; an unfinished step is in there, unless the launcher lived and
noted when the process ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from threed.base import marks
from threed.base.quantity import show_seconds

FILE = "time.jsonl"
STEPS, REPEATED, DOWN, OVER = "steps", "repeated", "down", "over"
PARTS = (STEPS, REPEATED, "start", "data", "waiting", "load", "save", "evaluation", "end", DOWN)
_NUMBERS = {name: re.compile(rb'"' + name.encode() + rb'": ([0-9.e+-]+)')
            for name in ("run/time", "checkpoint/blocked_s", "perf/apart_s")}


class Mark(NamedTuple):
    """From `at_s` on the run did this. `first`: it is the first mark of a process."""

    at_s: float
    doing: str
    first: bool = False


class Stepped(NamedTuple):
    """A step ended at `at_s`. Before that the run stood still for a checkpoint, and after it did something
    else than steps (an evaluation), for so many seconds."""

    at_s: float
    blocked_s: float = 0.0
    apart_s: float = 0.0
    counts: bool = True


@dataclass
class Spent:
    """Seconds since a run began, by what they went into."""

    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @property
    def wall_s(self) -> float:
        return sum(self.parts.values())

    @property
    def goodput(self) -> float | None:
        """None where no time has passed."""
        return self.parts[STEPS] / self.wall_s if self.wall_s else None

    def text(self) -> str:
        wall_s, share = self.wall_s, self.goodput
        if share is None:
            return "-"
        rest = sorted(((taken_s, part) for part, taken_s in self.parts.items() if part != STEPS),
                      reverse=True)
        shown = [f"{part} {taken_s / wall_s:.1%}" for taken_s, part in rest if taken_s >= 5e-4 * wall_s]
        return (f"{share:.1%} of {show_seconds(wall_s)} since the run began"
                + (f"; the rest: {', '.join(shown)}" if shown else ""))

    def document(self) -> dict[str, Any]:
        return {"share": self.goodput, "wall_s": self.wall_s,
                **{f"{part}_s": taken_s for part, taken_s in self.parts.items()}}


class Account:
    """Adds up what the time of a run went into, from its records in the order of their times."""

    def __init__(self) -> None:
        self.spent = Spent()
        self._since: float | None = None  # the last record
        self._doing = ""
        self._counts = True  # whether the last step does
        self._pending = {"save": 0.0, "evaluation": 0.0}  # in intervals of steps, not yet taken from them

    def add(self, record: Mark | Stepped) -> None:
        if isinstance(record, Mark):
            self._mark(record)
        elif self._since is not None:  # a step before the first mark is one of an older version
            self._pending["save"] += record.blocked_s
            part = {STEPS: STEPS if record.counts else REPEATED, OVER: DOWN}.get(self._doing, self._doing)
            self._pass(record.at_s, part)
            self._pending["evaluation"] += record.apart_s
            self._counts = record.counts

    def _mark(self, mark: Mark) -> None:
        doing = self._doing
        if doing == OVER or (mark.first and mark.doing != DOWN):
            doing = DOWN  # nobody knows when the process before this one ended
        elif doing == STEPS and (mark.first or mark.doing == OVER or not self._counts):
            doing = REPEATED  # an unfinished step was lost: after its last step a run saves and ends
        self._pass(mark.at_s, doing)
        if mark.first:
            self._pending = dict.fromkeys(self._pending, 0.0)
        self._doing, self._counts = mark.doing, True

    def _pass(self, at_s: float, part: str) -> None:
        """The time until `at_s` went into this part; of steps' time, what is pending is taken off."""
        if self._since is None:
            self._since = at_s
            return
        left_s = max(0.0, at_s - self._since)
        self._since = max(at_s, self._since)
        if part in (STEPS, REPEATED):
            for other, pending_s in self._pending.items():
                taken_s = min(pending_s, left_s)
                self.spent.parts[other] += taken_s
                self._pending[other] -= taken_s
                left_s -= taken_s
        self.spent.parts[part] += left_s


def account(records: Iterable[Mark | Stepped]) -> Account:
    """The account of a run whose records are given in any order."""
    result = Account()
    for record in sorted(records, key=lambda record: record.at_s):
        result.add(record)
    return result


def read(folder: Path) -> list[Mark | Stepped]:
    """The records of a run's folder. Lines that are damaged are left out."""
    records: list[Mark | Stepped] = [*_marks(folder / FILE)]
    for name, counts in (("metrics.jsonl", True), ("metrics.undone.jsonl", False)):
        with contextlib.suppress(OSError), (folder / name).open("rb") as file:
            for line in file:
                at_s, blocked_s, apart_s = (_number(line, what) for what in _NUMBERS)
                if at_s and line.endswith(b"\n"):
                    records.append(Stepped(at_s, blocked_s, apart_s, counts))
    return records


def spent(folder: Path) -> Spent | None:
    """What the time of a run went into, until its last sign; None for a run that has left no marks."""
    result = account(read(folder)).spent
    return result if result.wall_s else None


def _number(line: bytes, what: str) -> float:
    match = _NUMBERS[what].search(line)
    try:
        return float(match[1]) if match else 0.0
    except ValueError:
        return 0.0


def _marks(file: Path) -> Iterable[Mark]:
    with contextlib.suppress(OSError), file.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                if row["doing"] in (*PARTS, OVER):
                    yield Mark(float(row["time"]), row["doing"], bool(row["first"]))


class Ledger:
    """A run's account while it goes on: adds marks to its file, and gives the metrics of each step."""

    def __init__(self) -> None:
        """Of a run that has no folder yet: nothing is written."""
        self._account, self._file = Account(), None

    @classmethod
    def of(cls, folder: Path) -> Ledger:
        """With all that the folder has; marks that the environment has (`threed.base.marks`) are added."""
        ledger = cls()
        ledger._file, ledger._account = folder / FILE, account(read(folder))
        for index, (doing, at_s) in enumerate(marks.take()):
            ledger._add(Mark(at_s, doing, index == 0))
        return ledger

    def mark(self, doing: str) -> None:
        if self._file is not None:
            self._add(Mark(time.time(), doing))

    def step(self, metrics: Mapping[str, float | None]) -> dict[str, float | None]:
        """Count a step, and return the share and the parts so far."""
        at_s, blocked_s, apart_s = (metrics.get(name) or 0.0 for name in _NUMBERS)
        self._account.add(Stepped(at_s, blocked_s, apart_s))
        spent = self._account.spent
        return {"run/goodput": spent.goodput, **{f"spent/{part}": spent.parts[part] for part in PARTS}}

    def spent(self) -> Spent:
        return self._account.spent

    def _add(self, mark: Mark) -> None:
        """A disk that is full must not end a run: it then lacks the mark."""
        self._account.add(mark)
        assert self._file is not None
        line = json.dumps({"time": mark.at_s, "doing": mark.doing, "first": mark.first}) + "\n"
        with contextlib.suppress(OSError):
            file = os.open(self._file, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o644)
            try:
                size = os.fstat(file).st_size
                whole = not size or os.pread(file, 1, size - 1) == b"\n"  # a full disk may leave half a line
                os.write(file, ("" if whole else "\n").encode() + line.encode())
            finally:
                os.close(file)



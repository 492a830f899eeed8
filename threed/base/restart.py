"""Restart: whether the ranks of a run are started again after a failure, and how long to wait before.

A failure of a machine (a rank that was killed, a hang, a disk that is gone) passes, and the run goes on from
its newest checkpoint. A failure of the run (a loss that is not finite) comes again, at the same step and for
the same reason, whichever rank is the first to see it; then the run ends. It ends at once after a mistake in
the config or in a callback, and where it has made its steps and cannot save them.
"""

from __future__ import annotations

import mmap
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from threed.base.errors import InputError, WrongResult
from threed.base.quantity import show_seconds

LONGEST_WAIT_S = 300.0
# What a repetition of a failure has otherwise: hosts, paths, and words with digits, which are numbers (of
# ranks, processes, bytes, seconds), addresses and random names.
_VARIES = re.compile(r"""(?<=\brank )\d+ on \S+|'[^']*/[^']*'|"[^"]*/[^"]*"|\S*/\S*|[\w.-]*\d[\w.-]*""")


class RankSteps:
    """The step that each rank is at, in memory that outlives the rank."""

    def __init__(self, world_size: int):
        # of a rank: its step (0: none yet), since when [s], and how long a step takes [s] (0: not known);
        # the clock is that of the machine, for all of its processes
        self._numbers: Any = memoryview(mmap.mmap(-1, 3 * 8 * world_size)).cast("d")

    def of(self, rank: int) -> Pace:
        return Pace(self._numbers[3 * rank:3 * rank + 3])

    def at(self, rank: int) -> int:
        return self.of(rank).step


class Pace:
    """The step that one rank is at, and how long steps take."""

    def __init__(self, numbers: Any):
        """`numbers`: three floats of `RankSteps`, the rank's own."""
        self._numbers = numbers

    @property
    def step(self) -> int:
        """0: none yet."""
        return int(self._numbers[0])

    @property
    def since_s(self) -> float | None:
        """How long the step has run; None where none is under way."""
        return time.monotonic() - self._numbers[1] if self._numbers[1] else None

    @property
    def step_s(self) -> float:
        """Of the last step, or as predicted before the first has ended; 0: not known."""
        return self._numbers[2]

    def expect(self, step_s: float) -> None:
        """Say what the prediction is."""
        self._numbers[2] = step_s

    def begin(self, step: int) -> None:
        since_s = self.since_s
        if since_s is not None:
            self._numbers[2] = since_s
        self._numbers[0], self._numbers[1] = step, time.monotonic()

    def end(self) -> None:
        """The last step is done."""
        self._numbers[1] = 0.0

    def answer(self) -> str:
        """To a request to stop."""
        if self.since_s is None and self.step:
            return (f"the run ends after step {self.step}, and saves its last checkpoint; once more to stop "
                    "now, without it")
        if self.since_s is None:
            return ("stopping after the first step, which has not begun; once more to stop now, without a "
                    "checkpoint")
        takes = f"; a step takes about {show_seconds(self.step_s)}" if self.step_s else ""
        since = show_seconds(time.monotonic() - self._numbers[1])
        return (f"stopping after step {self.step} (started {since} ago{takes}); once more to stop now, "
                "without a checkpoint")


@dataclass(frozen=True)
class FailureNote:
    """Why the ranks of a run end: what the first that fails writes to their store, for all others, their
    launchers and run.dir/failures.jsonl. `cause`: two failures at the same step whose causes differ in
    nothing but what `_VARIES` are the run's own; None: the failure came from outside, and says nothing about
    the run."""

    message: str
    status: int  # exit status of the run
    cause: str | None = None
    step: int | None = None  # under way; 0: before the first; None: not known
    rank: int | None = None  # that wrote it; None: another process did, or another rank
    hang: bool = False
    final: bool = False  # whether a new start would surely fail as well
    host: str = ""  # where it was written; "": nowhere yet
    launcher: int = 0  # process there that has started the writer

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> FailureNote:
        """Of what `asdict` returns, with other keys between them."""
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values})

    @property
    def text(self) -> str:
        """The first line of the message."""
        return self.message.partition("\n")[0]


class Restarts:
    """Counts the starts since the newest checkpoint, and decides about the next one."""

    def __init__(self, most: int, wait_s: float):
        self.total = 0
        self._most, self._wait_s = most, wait_s
        self._count = 0  # since the newest checkpoint
        self.newest = ""
        self._seen: set[tuple[int | None, str]] = set()

    def after(self, failure: FailureNote, newest: str) -> tuple[float | None, str]:
        """Seconds to wait before the ranks are started again, or None, and what to say. `newest`: the newest
        checkpoint."""
        if failure.status == InputError.status or not self._most:
            return None, ""
        if failure.status == WrongResult.status:
            return None, "not started again: the newest checkpoint may hold wrong results of a machine"
        if failure.final:
            return None, "not started again: a new start would fail in the same way"
        if newest != self.newest:
            self.newest, self._count = newest, 0
            # The run has made progress: forget failures before the first step, or at an unknown step.
            self._seen = {key for key in self._seen if key[0]}
        where = f" at step {failure.step}" if failure.step else " before the first step"
        where = where if failure.step is not None else ""
        key = failure.step, _VARIES.sub("", failure.cause or "")
        if failure.cause is not None and key in self._seen:
            return None, (f"not started again: it failed twice with the same error{where}, so the machine "
                          "is not the cause")
        self._seen.add(key)
        if self._count == self._most:
            return None, (f"not started again: run.restarts={self._most} starts from the newest checkpoint "
                          f"have failed, the last{where}")
        wait_s = min(self._wait_s * 2**self._count, max(LONGEST_WAIT_S, self._wait_s))
        self._count += 1
        self.total += 1
        return wait_s, (f"restart {self._count} of {self._most} since the newest checkpoint, in {wait_s:g} "
                        f"s: {failure.text}{where}")

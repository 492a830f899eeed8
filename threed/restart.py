"""Restart: whether the ranks of a run are started again after a failure, and how long to wait before.

A failure of a machine (a rank that was killed, a hang, a disk that is gone) passes, and the run goes on from
its newest checkpoint. A failure of the run (a loss that is not finite) comes again, at the same step and for
the same reason; then the run ends. After a mistake in the config or in a callback it ends at once.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from threed.errors import InputError, WrongResult

LONGEST_WAIT_S = 300.0


class Steps:
    """The step that each rank is at, in memory that outlives the rank. 0: none yet."""

    def __init__(self, world_size: int):
        self._steps = memoryview(mmap.mmap(-1, 8 * world_size)).cast("q")

    def note(self, rank: int, step: int) -> None:
        self._steps[rank] = step

    def at(self, rank: int) -> int:
        return self._steps[rank]


@dataclass(frozen=True)
class Failure:
    """Why a run has ended. `cause`: two failures at the same step with the same cause are the run's own;
    None: the failure came from outside, and says nothing about the run."""

    text: str
    cause: str | None
    step: int | None  # 0: before the first; None: not known
    status: int


class Restarts:
    """Counts the starts since the newest checkpoint, and decides about the next one."""

    def __init__(self, most: int, wait_s: float):
        self.total = 0
        self._most, self._wait_s = most, wait_s
        self._count = 0  # since the newest checkpoint
        self.newest = ""
        self._seen: set[tuple[int | None, str]] = set()

    def after(self, failure: Failure, newest: str) -> tuple[float | None, str]:
        """Seconds to wait before the ranks are started again, or None, and what to say. `newest`: the newest
        checkpoint."""
        if failure.status == InputError.status or not self._most:
            return None, ""
        if failure.status == WrongResult.status:
            return None, "not started again: the newest checkpoint may hold wrong results of a machine"
        if newest != self.newest:
            self.newest, self._count = newest, 0
            # The run has made progress: forget failures before the first step, or at an unknown step.
            self._seen = {key for key in self._seen if key[0]}
        where = f" at step {failure.step}" if failure.step else " before the first step"
        where = where if failure.step is not None else ""
        key = failure.step, failure.cause or ""
        if failure.cause is not None and key in self._seen:
            return None, (f"not started again: the same failed{where} before, so it is the run's and not the "
                          "machine's")
        self._seen.add(key)
        if self._count == self._most:
            return None, (f"not started again: run.restarts={self._most} starts from the newest checkpoint "
                          f"have failed, the last{where}")
        wait_s = min(self._wait_s * 2**self._count, max(LONGEST_WAIT_S, self._wait_s))
        self._count += 1
        self.total += 1
        return wait_s, (f"restart {self._count} of {self._most} since the newest checkpoint, in {wait_s:g} "
                        f"s: {failure.text}{where}")

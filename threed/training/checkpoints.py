"""The checkpoints of a run: begin them, advance them after each step, report how they ended, and copy
them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from threed.base.errors import NotSaved
from threed.base.quantity import show_bytes, show_seconds
from threed.checkpoint.copy import Copied, Copier
from threed.checkpoint.format import folder
from threed.checkpoint.load import Resumed
from threed.checkpoint.save import Outcome, Saver, SaveStage
from threed.engine.engine import Engine
from threed.engine.watch import Watch
from threed.monitor.log import Log
from threed.program.trace import Trace
from threed.schema import Config

TRIES, PAUSE_S = 3, 2.0  # for the last checkpoint of a run: a disk may be full for a moment
SAY_EVERY_S = 30.0  # while a run waits for a disk
POLL_S = 0.2  # while a run waits for its last copy
PATIENCE_S = 10.0  # how long a run waits for a save under way when the next one is due


class Checkpoints:
    """The checkpoints of a run, on one rank. All ranks make the same calls after the same steps."""

    columns: tuple[str, ...] = ("saving",)

    def __init__(self, config: Config, engine: Engine, watch: Watch, log: Log | None, resumed: Resumed,
                 saved: Callable[[Path], None] = lambda _: None):
        """`saved` is called with the path of each complete checkpoint, on all ranks."""
        self.config, self.watch, self.log, self._saved = config, watch, log, saved
        self.newest: Path | None = resumed.path
        place = config.checkpoint.copy_to if log else None  # rank 0 copies
        self._copier = Copier(place, config.checkpoint.copy_keep) if place is not None else None
        self._saver = Saver(engine, resumed.lineage, log.sync if log else lambda: None, resumed.path,
                            lambda: self._copier.being_copied if self._copier else None, self._say)
        self._zero, self._in_background = engine.zero, engine.plan.table.update.snapshots
        self._blocked_s = 0.0  # by the save under way
        self.longest_s = 0.0  # of the saves so far, from the first copy to the last file
        self._metrics: dict[str, float | None] = {}
        if self.newest is not None and self.newest.parent == folder(config):
            self._copy(self.newest)  # the process before this one may have been killed before it was copied

    def row(self) -> tuple[float]:
        """How far this rank is with the save under way, for the meter."""
        return (self._saver.status,)

    def metrics(self) -> dict[str, float | None]:
        """Metrics of the save, and of the copy, that ended since the last call."""
        taken, self._metrics = self._metrics, {}
        return taken

    def after_step(self, statuses: torch.Tensor, trace: Trace) -> None:
        """Go on with the save under way. `statuses`: all ranks'; `trace`: of this rank's step."""
        self._tell_copies()
        if self._saver.stage is SaveStage.IDLE:
            return
        # A wait without a source instruction is for a snapshot, which was under way when the program began.
        self._blocked_s += sum(wait.wait_s for wait in trace.waits if wait.source < 0)
        begin = time.monotonic()
        with self.watch.phase("save a checkpoint", waits=False):
            outcome = self._saver.advance(statuses)
        self._blocked_s += time.monotonic() - begin
        if outcome is not None:
            self._tell(outcome)

    def save(self, counters: dict[str, Any]) -> None:
        """Begin a checkpoint of the run's state after this step; without snapshots the run waits for it."""
        number = self._zero.step_number
        self.finish(PATIENCE_S)
        if self._saver.stage is not SaveStage.IDLE:
            self._say(f"warning: no checkpoint of step {number}: that of step {self._saver.step} is still "
                      "being written; raise checkpoint.every, or write to a faster disk")
            return
        self._begin(counters)
        if not self._in_background:
            self.finish()

    def save_last(self, counters: dict[str, Any]) -> None:
        """Save before the run ends, after any save under way. NotSaved where the checkpoint cannot be
        saved."""
        self.finish()
        number, problem = self._zero.step_number, None
        for attempt in range(TRIES):
            if attempt:
                time.sleep(PAUSE_S)
            self._begin(counters)
            problem = self.finish(warns=False)  # the error says it
            if problem is None:
                return
        on = f"The newest checkpoint is {self.newest}" if self.newest else "There is no checkpoint"
        raise NotSaved(f"the run ends after step {number}, and its last checkpoint could not be saved: "
                       f"{problem}. {on}: make room in run.dir, or mend what is wrong with it, and start "
                       "again")

    def finish_before_failing(self) -> None:
        """Wait for the save under way in a run that ends because its loss is not finite. Its weights may be
        the cause, so it pushes no older checkpoint out."""
        self.finish(PATIENCE_S, prunes=False)
        if self._saver.stage is not SaveStage.IDLE:
            self._say(f"warning: the checkpoint of step {self._saver.step} was not finished")

    def finish(self, most_s: float = math.inf, prunes: bool = True, warns: bool = True) -> str | None:
        """Wait for the save under way, if any. Returns why it failed, which is a warning, too; None if it did
        not."""
        if self._saver.stage is SaveStage.IDLE:
            return None
        begin, outcome = time.monotonic(), None
        with self.watch.phase("save a checkpoint", waits=False):
            outcome = self._saver.drain(min(most_s, SAY_EVERY_S), prunes)
            # All ranks take the same number of turns: the limits are the same, and no clock is read.
            while outcome is None and most_s > SAY_EVERY_S:
                so_far = show_seconds(time.monotonic() - begin)
                ranks = ", ".join(map(str, self._saver.waits_for[:8].tolist()))
                self._say(f"still writing the checkpoint of step {self._saver.step}: {so_far} so far, "
                          f"waiting for rank {ranks}")
                outcome = self._saver.drain(SAY_EVERY_S, prunes)
        self._blocked_s += time.monotonic() - begin
        if outcome is None:
            return None
        if outcome.problem is None or warns:
            self._tell(outcome)
        return outcome.problem

    def _begin(self, counters: dict[str, Any]) -> None:
        begin = time.monotonic()
        with self.watch.phase("save a checkpoint", waits=False):
            self._saver.begin(counters)
        self._blocked_s = time.monotonic() - begin

    def _tell(self, outcome: Outcome) -> None:
        if outcome.problem:
            older = "Older checkpoints stand" if self.newest is not None else "There is none yet"
            self._say(f"warning: no checkpoint of step {self._saver.step} was saved: {outcome.problem}. "
                      f"{older}")
            return
        self.newest = outcome.path
        self.longest_s = max(self.longest_s, outcome.written_s)
        self._metrics |= {"checkpoint/blocked_s": self._blocked_s, "checkpoint/written_s": outcome.written_s}
        self._say(f"saved {outcome.path} in {show_seconds(outcome.written_s)}, of which the run stood still "
                  f"for {show_seconds(self._blocked_s)}")
        self._copy(outcome.path)
        self._saved(outcome.path)

    # ---- copies to checkpoint.copy_to: rank 0 alone makes them

    def _copy(self, path: Path) -> None:
        if self._copier is not None and (dropped := self._copier.offer(path)) is not None:
            self._say(f"note: {dropped.name} is not copied: the copy of an older one still goes on, and "
                      f"{path.name} is next")

    def _tell_copies(self) -> Copied | None:
        """Say which copies ended since the last call. Returns the last one if it failed."""
        last = None
        for copied in self._copier.ended() if self._copier else ():
            (path, size, took_s, problem), place = copied, self.config.checkpoint.copy_to
            last = copied if size is None else None
            if size:
                self._metrics["checkpoint/copied_s"] = took_s
                self._say(f"copied {path.name} to {place}: {show_bytes(size)} in {show_seconds(took_s)}")
            if problem is not None:
                what = f"{path.name} was not copied to {place}"
                if size is not None:
                    what = (f"the copies at {place} could not be put in order after {path.name}, which is "
                            "there whole")
                self._say(f"warning: {what}: {problem}")
        return last

    def close(self, hurried: Callable[[], bool]) -> None:
        """At the end of the run, wait for the last copy, and try again if it fails; once the run is
        `hurried`, no longer than checkpoint.copy_wait_s. The checkpoint in run.dir is not touched."""
        if self._copier is None:
            return
        copier, until = self._copier, math.inf
        with self.watch.phase("copy the last checkpoint", waits=False):
            for attempt in range(TRIES):
                until = self._await_copies(copier, hurried, until)
                late, failed = not copier.wait(0), self._tell_copies()
                if late or failed is None or attempt == TRIES - 1 or time.monotonic() + PAUSE_S > until:
                    break
                time.sleep(PAUSE_S)
                self._copy(failed.path)
        if late:
            self._say("warning: the run was asked to stop, and its copy takes longer than "
                      f"checkpoint.copy_wait_s={self.config.checkpoint.copy_wait_s:g}")
        if late or failed is not None:
            self._say(f"warning: THE LAST CHECKPOINT IS NOT AT {copier.address}. Keep {self.newest}: the run "
                      "copies it when it is started again")

    def _await_copies(self, copier: Copier, hurried: Callable[[], bool], until: float) -> float:
        """Wait for the copies under way until the time `until`. Returns `until`, which becomes finite once
        the run is hurried."""
        said = time.monotonic()
        while not copier.wait(POLL_S) and (now := time.monotonic()) < until:
            if until == math.inf and hurried():
                until = now + self.config.checkpoint.copy_wait_s
            if now - said > SAY_EVERY_S:
                said = now
                self._say(f"still copying to {copier.address}: {show_bytes(copier.moved)} of "
                          f"{show_bytes(copier.size)}")
        return until

    def _say(self, text: str) -> None:
        if self.log:
            self.log.say(text)

"""Log: writes the same metrics to metrics.jsonl, to the loggers (monitor.loggers) and to the console. Rank 0
only. Their names are in monitor/metrics."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from threed.base.console import RECORD, show
from threed.base.errors import InputError, ThreedError, of_folder
from threed.comm.environment import restarted
from threed.monitor import goodput, state
from threed.monitor.lines import StepLines, cut
from threed.monitor.loggers.logger import About, make
from threed.monitor.loggers.threaded import Beside
from threed.monitor.loggers.wandb import is_off
from threed.monitor.stepline import Parts, waiting, width
from threed.schema import Config

CLOSE_S = 60.0  # how long a disk or a server may take at the end of a run
PROBE_S = 0.1  # far longer than `threed runs` holds a lock to see whether it is free
FAILED_S = 4.0  # and at the end of one that has failed: its ranks are killed after launcher.processes.GRACE_S


class Log:
    def __init__(self, config: Config):
        """Lock run.dir for this run, and change nothing else in it: a start that is refused, or has nothing
        to do, leaves the folder as it was (`close`). InputError where another run has it, or where it may not
        be written; RunError where the disk fails."""
        self.config = config
        self.run_id: str | None = None  # wandb's
        self.loggers: list[Beside] = []
        self.ledger = goodput.Ledger()
        self._how = state.FAILED  # how the run ends, unless `over` says otherwise
        self._lines: StepLines | None = None
        self.path = Path(config.run.dir) / "metrics.jsonl"
        folder, self._begun, self._failed = self.path.parent, False, False
        try:
            self._made = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / ".lock").open("a+")
        except OSError as error:
            raise _unusable(config, error) from None
        try:
            # released when this process ends, however it ends
            self._take_lock()
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().strip()
            raise InputError(f"run.dir={config.run.dir} is in use by another run ({holder}): end it first, "
                             "or give this one a folder of its own") from None
        except OSError:
            pass  # a file system without locks
        self._lock.seek(0)
        self._before = self._lock.read()  # "" in a folder that no run has had
        with contextlib.suppress(OSError):  # a full disk
            self._lock.truncate(0)
            self._lock.write(f"on {socket.gethostname()}, process {os.getpid()}, since "
                             f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}\n")
            self._lock.flush()

    def _take_lock(self) -> None:
        """Take the lock, at the second try where somebody only looks at it (`threed runs`), or where the
        start that had made the file has just removed it (`_leave_as_found`)."""
        path = self.path.parent / ".lock"
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(self._lock.fileno())):
                return
            self._lock = path.open("a+")
        except BlockingIOError:
            time.sleep(PROBE_S)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def start(self, step: int, run_id: str | None) -> None:
        """Go on after `step`, and from here on change what is in the folder: lines of later steps, which are
        repeated, move to metrics.undone.jsonl. `run_id`: the wandb run that a checkpoint names. A run that is
        started again before its first checkpoint goes on with the same wandb run, too."""
        self._start_loggers(step, run_id)  # which may refuse the start
        try:
            cut(self.path, step, self.path.with_suffix(".undone.jsonl"))
            self._lines = StepLines(self.path)
        except OSError as error:
            raise _unusable(self.config, error) from None
        RECORD.begin()
        self._begun = True
        state.note(self.path.parent, state.RUNNING, step)
        self.ledger = goodput.Ledger.of(self.path.parent)
        self.doing("steps")

    def _start_loggers(self, step: int, run_id: str | None) -> None:
        again = restarted()
        about = About(self.config, step, step > 0 or again, self.say)
        for name in self.config.monitor.loggers:
            if name == "wandb" and is_off(self.config):
                continue
            logger, note = Beside(name, make(name), self.say), self.path.parent / f"{name}-run"
            known = run_id if name == "wandb" else None
            if known is None and (again if name == "wandb" else about.goes_on):
                with contextlib.suppress(OSError):
                    known = note.read_text().strip() or None
            # Checkpoints name wandb's, and a start after this one goes on with it, though wandb may not have
            # started by then.
            if name == "wandb":
                known = known or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
                self._began(name, note, known)
            self.loggers.append(logger)
            logger.start(about, known, partial(self._began, name, note))

    def _began(self, name: str, note: Path, run_id: str) -> None:
        if name == "wandb":
            self.run_id = run_id
        with contextlib.suppress(OSError):
            note.write_text(f"{run_id}\n")

    def has(self, name: str) -> bool:
        """Whether a logger gets what is sent."""
        return any(logger.name == name and not logger.is_off for logger in self.loggers)

    def doing(self, what: str) -> None:
        """Note what the run does from now on (`monitor.goodput`)."""
        self.ledger.mark(what)

    def step(self, step: int, metrics: dict[str, float | None], left_s: float | None = None) -> None:
        """Log one step's metrics: written at once, so that a killed run loses nothing. `left_s`: seconds
        until the run's last step, where they are known."""
        plain = {name: value if value is None or math.isfinite(value) else str(value)
                 for name, value in metrics.items()}
        assert self._lines is not None, "start() comes first"
        if news := self._lines.add(step, json.dumps({"step": step, **plain}) + "\n"):
            self.say(news, always=True)
        self._tell("metrics", step, dict(metrics))
        steps = self.config.train.steps
        if step % self.config.monitor.console_every == 0 or step == steps or "val/loss" in metrics:
            parts = Parts(step, steps, metrics, left_s, waiting(self.config))
            show(parts.fit(width()), console=not self.config.monitor.quiet, record=parts.fit(None))

    def sync(self) -> None:
        """Wait until the lines of all steps are on the disk, as a checkpoint needs them. OSError where the
        disk is full, so that older checkpoints make room; other failures were reported, or will be at the
        next step."""
        if self._lines is not None:
            try:
                self._lines.sync()
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise

    def picture(self, step: int, svg: str) -> None:
        """Send a measured timeline to the loggers. Call it before `step`: wandb takes nothing more for a step
        after its metrics."""
        self._tell("picture", step, svg)

    def over(self, how: str, step: int) -> None:
        """Say in state.json how the run is over (`monitor.state`). Of one that never began there is nothing
        to say: its folder may hold another start's word."""
        self._how, self._failed = how, how == state.FAILED
        if self._begun:
            state.note(self.path.parent, how, step)

    def texts(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        """Print what the model has added to prompts, and send it to the loggers. Call it before `step`, as
        `picture`."""
        for prompt, text in rows:
            self.say(f"text after step {step}: {(prompt + text)!r}")
        self._tell("texts", step, rows)

    def report(self, file: Path) -> None:
        """Send the page of the run to the loggers, after its last step."""
        self._tell("report", file)

    def places(self) -> list[tuple[str, str]]:
        """Each logger's name, and where its files are."""
        return [(logger.name, "off" if logger.is_off else logger.logger.place or "has not started yet")
                for logger in self.loggers]

    def _tell(self, method: str, *arguments: Any) -> None:
        for logger in self.loggers:
            logger.call(method, *arguments)

    def say(self, text: str, always: bool = False) -> None:
        """Lines on the console; with monitor.quiet, only warnings and what is said `always`."""
        show(text, console=always or not self.config.monitor.quiet or text.startswith("warning"))

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Write what is left. Returns after `limit_s` if a disk or a server does not answer."""
        until, over = time.monotonic() + limit_s, threading.Event()
        for logger in self.loggers:
            logger.finish(self._how)

        def body() -> None:
            try:
                self._close()
            except Exception as error:
                self.say(f"warning: the log was not closed as it should be: {type(error).__name__}: {error}")
            over.set()

        threading.Thread(target=body, daemon=True, name="close the log").start()
        if not over.wait(limit_s):
            self.say(f"warning: the disk of {self.path} does not answer for {limit_s:g} s; what it misses of "
                     "the run's last steps is lost")
        for logger in self.loggers:
            if not logger.wait(max(0.0, until - time.monotonic())):
                self.say(f"warning: {logger.name} has not answered for {limit_s:g} s at the end of the run; "
                         f"it may miss its last steps{logger.logger.kept}")
        self.doing(goodput.OVER)
        if not self._begun:
            self._leave_as_found()

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self.sync()
        if self._lines is not None:
            self._lines.close()

    def _leave_as_found(self) -> None:
        """Undo what taking the lock has changed in the folder."""
        with contextlib.suppress(OSError):
            if self._before:
                self._lock.truncate(0)
                self._lock.write(self._before)
                self._lock.flush()
                return
            (self.path.parent / ".lock").unlink()
            for path in self._made if self._failed else ():  # the innermost first; one that holds
                path.rmdir()  # anything stays


def _unusable(config: Config, error: OSError) -> ThreedError:
    return of_folder(f"run.dir={config.run.dir} cannot be used: {error.strerror or error}; name a folder "
                     "that can be written", error)

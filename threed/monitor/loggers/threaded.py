"""Threaded: a logger's calls, on a thread beside the training. The one place where a logger fails: the first
failure is a line on the console, and the logger is off from then on; the run goes on.

A library that takes long to import, or a server that does not answer, holds up the thread, and not the run:
what a logger misses meanwhile is kept for it. The run waits for one alone without which it must not start.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from threed.base.errors import InputError
from threed.monitor.loggers.logger import About, Logger, Metrics, first_line

START_S = 60.0  # how long the run waits for a logger without which it must not start
LATE_S = 60.0  # after which a line says that a logger does not answer
MOST_WAITING = 10_000  # calls


class Beside:
    def __init__(self, name: str, logger: Logger, say: Callable[[str], None]):
        self.name, self.logger, self._say = name, logger, say
        self.is_off = False
        self._calls: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._new = threading.Condition()
        self._since: float | None = None  # when the call under way began
        self._late = False  # whether a line has said that it does not answer
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"logger {name}")
        self._over = threading.Event()

    def start(self, about: About, run_id: str | None, note: Callable[[str], None]) -> None:
        """Start the logger. `note` gets the id of its run, once that is known. InputError where the run must
        not start without this logger, and it does not."""
        done, refused = threading.Event(), []

        def begin() -> None:
            try:
                if (known := self.logger.start(about, run_id)) is not None:
                    note(known)
            except InputError as error:
                refused.append(error)
                self.is_off = True
            finally:
                done.set()

        self._calls.append(("", (begin,)))
        self._thread.start()
        if not self.logger.required(about):
            return
        if not done.wait(START_S):
            self._fail(f"it has not started within {START_S:g} s")
        if refused:
            raise refused[0]

    def call(self, method: str, *arguments: Any) -> None:
        """Have a method called soon. Returns at once, and raises nothing."""
        if self.is_off:
            return
        with self._new:
            self._calls.append((method, arguments))
            waiting, since = len(self._calls), self._since
            self._new.notify()
        if waiting > MOST_WAITING:
            self._fail(f"it is {waiting:,} steps behind")
        elif since is not None and not self._late and time.monotonic() - since > LATE_S:
            self._late = True
            self._say(f"warning: {self.name} has not answered for {LATE_S:g} s; the run goes on, and keeps "
                      "what it misses until it does")

    def finish(self, state: str) -> None:
        """Have the logger end, after all calls; `wait` waits for it."""
        self.call("finish", state)

    def wait(self, limit_s: float) -> bool:
        """Whether the logger has ended, or failed, within a time."""
        return self.is_off or self._over.wait(limit_s)

    def _work(self) -> None:
        method = ""
        try:
            while not self.is_off and method != "finish":
                method, arguments = self._take()
                getattr(self.logger, method)(*arguments) if method else arguments[0]()
                self._since = None
        except BaseException as error:  # SystemExit too: a library may think that it owns the process
            self._fail(first_line(error))
        self._over.set()

    def _take(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the next call and return its method and arguments. Consecutive calls of `metrics` become
        one call with the rows of all of them."""
        with self._new:
            while not self._calls:
                self._new.wait()
            method, arguments = self._calls.popleft()
            rows: list[tuple[int, Metrics]] = [arguments] if method == "metrics" else []  # pyright: ignore
            while rows and self._calls and self._calls[0][0] == "metrics":
                rows.append(self._calls.popleft()[1])  # pyright: ignore
            self._since = time.monotonic()
        return method, (rows,) if rows else arguments

    def _fail(self, why: str) -> None:
        if self.is_off:
            return
        self.is_off = True
        with self._new:
            self._calls.clear()
        self._say(f"warning: {self.name} is off: {why}. The run goes on, and metrics.jsonl has every step"
                  f"{self.logger.kept}")


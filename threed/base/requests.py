"""Requests: signals and callbacks ask a rank to stop or to save."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from threed.base.signals import ASKS, SAVES, STOPS, handle

ONE_S = 1.0  # within this time, signals are one request


class StopRequests:
    """How often a run was asked to stop. A press of Ctrl-C may come twice: from the terminal, and from
    torchrun or `timeout`, which pass it on."""

    def __init__(self) -> None:
        self.times = 0
        self._last_s = 0.0

    def again(self, number: int) -> bool:
        """A signal has come: whether it is a new request. The kernel repeats SIGXCPU each second."""
        now = time.monotonic()
        if self.times and (now - self._last_s < ONE_S or number == signal.SIGXCPU):
            return False
        self.times, self._last_s = self.times + 1, now
        return True


class Requests:
    """STOPS ask the run to save and stop, SAVES to save and go on. All ranks learn of a request when they
    exchange the numbers of the step."""

    def __init__(self, answer: Callable[[int, int], None] | None = None) -> None:
        """`answer`: called with each request to stop, its signal and its number (1, 2 ...), at once, on a
        thread of its own: the main thread may be in a long call. None: the launcher answers."""
        self.stop = self.save = False
        self.late: Callable[[], bool] = lambda: False  # whether the run's time is over
        handle(STOPS, self._on_stop)
        handle(SAVES, self._on_save)
        if answer is not None:
            self._listen(answer)
        # Signals that were blocked since the launcher forked are delivered now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS)

    def take(self) -> tuple[bool, bool]:
        """Whether this rank was asked to stop, and to save. A request to save is returned once."""
        asked, self.save = (self.stop or self.late(), self.save), False
        return asked

    def _on_stop(self, *_: Any) -> None:
        self.stop = True

    def _on_save(self, *_: Any) -> None:
        self.save = True

    def _listen(self, answer: Callable[[int, int], None]) -> None:
        reads, writes = socket.socketpair()
        writes.setblocking(False)
        self._kept, asked = writes, StopRequests()  # as long as signals come

        def body() -> None:
            while numbers := reads.recv(1):  # the interpreter writes the number of each signal
                if numbers[0] in STOPS and asked.again(numbers[0]):
                    self.stop = True
                    answer(numbers[0], asked.times)

        threading.Thread(target=body, daemon=True, name="answer signals").start()
        signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)

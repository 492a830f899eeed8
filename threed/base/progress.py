"""Progress: how far long work is, about every second, and how long it will take at most."""

from __future__ import annotations

import time
from collections.abc import Callable

from threed.base.quantity import show_left

EVERY_S = 1.0


class Progress:
    """`say` gets a line such as "imported 1.2 GiB of 7.2 GiB, 17% done, at most 33 s left"."""

    def __init__(self, what: str, total: float, show: Callable[[float], str], say: Callable[[str], None]):
        self._what, self._total, self._show, self._say = what, total, show, say
        self._done, self._start_s = 0.0, time.perf_counter()
        self._next_s = self._start_s + EVERY_S

    def add(self, amount: float) -> None:
        """So much more is done."""
        self._done += amount
        now_s = time.perf_counter()
        if now_s < self._next_s or self._done >= self._total:
            return
        self._next_s = now_s + EVERY_S
        left = show_left(self._done, self._total, now_s - self._start_s)
        self._say(f"{self._what} {self._show(self._done)} of {self._show(self._total)}{left}")

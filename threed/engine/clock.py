"""Clocks: a mark is a point in time of the work, taken from the host's clock on a CPU and by an event in the
stream on a GPU.

A mark on a GPU costs the host a microsecond and never makes it wait; marks are read once, after the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    def mark(self) -> Any:
        """The moment at which all work issued so far is done."""
        ...

    def reader(self, begin: Any, end: Any) -> Callable[[Any], float]:
        """Wait for the mark `end`. Returns a function from a mark to the seconds since `begin`. The next step
        may reuse the marks."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether the work has reached this mark. Any thread may call this."""
        ...


class HostClock:
    def mark(self) -> float:
        return time.monotonic()

    def reader(self, begin: float, end: float) -> Callable[[float], float]:
        return lambda mark: mark - begin

    def passed(self, mark: float) -> bool:
        return True


class CudaClock:
    """Events are kept from step to step: creating one costs more than recording it."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def mark(self) -> torch.cuda.Event:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event

    def reader(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> Callable[[torch.cuda.Event], float]:
        end.synchronize()
        self._used = 0
        return lambda mark: begin.elapsed_time(mark) / 1e3

    def passed(self, mark: torch.cuda.Event) -> bool:
        try:
            return mark.query()
        except RuntimeError:  # the device has failed: the next use of it raises the reason
            return True


def make_clock(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()

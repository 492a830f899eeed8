"""Clocks: a mark is a point in time of the work, taken from the host's clock on a CPU and by an event in the
stream on a GPU.

A mark on a GPU costs the host a microsecond and never makes it wait. The marks of a program are read once,
when somebody asks: the host need not wait for the program's end.
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

    def reader(self, begin: Any, end: Any) -> MarkReader:
        """A reader of the marks since the last call, of which `begin` is the first and `end` the last."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether the work has reached this mark. Any thread may call this."""
        ...


class MarkReader(Protocol):
    at_once = True  # whether it waits for nothing

    def __enter__(self) -> Callable[[Any], float]:
        """Wait for the last mark. Returns a function from a mark to the seconds since the first. After the
        context the marks may be used again."""
        ...

    def __exit__(self, *error: object) -> None: ...


class HostReader:
    at_once = True

    def __init__(self, begin: float):
        self._begin = begin

    def __enter__(self) -> Callable[[float], float]:
        return lambda mark: mark - self._begin

    def __exit__(self, *error: object) -> None:
        pass


class HostClock:
    def mark(self) -> float:
        return time.monotonic()

    def reader(self, begin: float, end: float) -> HostReader:
        return HostReader(begin)

    def passed(self, mark: float) -> bool:
        return True


class CudaReader:
    at_once = False

    def __init__(self, marks: list[torch.cuda.Event], begin: torch.cuda.Event, end: torch.cuda.Event,
                 spare: list[torch.cuda.Event]):
        self._marks, self._begin, self._end, self._spare = marks, begin, end, spare

    def __enter__(self) -> Callable[[torch.cuda.Event], float]:
        self._end.synchronize()
        return lambda mark: self._begin.elapsed_time(mark) / 1e3

    def __exit__(self, *error: object) -> None:
        self._spare += self._marks
        self._marks = []


class CudaClock:
    """Events are kept from step to step: creating one costs more than recording it."""

    def __init__(self) -> None:
        self._spare: list[torch.cuda.Event] = []
        self._marks: list[torch.cuda.Event] = []  # since the last reader

    def mark(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        self._marks.append(event)
        event.record()
        return event

    def reader(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> CudaReader:
        marks, self._marks = self._marks, []
        return CudaReader(marks, begin, end, self._spare)

    def passed(self, mark: torch.cuda.Event) -> bool:
        try:
            return mark.query()
        except RuntimeError:  # the device has failed: the next use of it raises the reason
            return True


def make_clock(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()

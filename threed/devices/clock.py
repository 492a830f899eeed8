"""Clocks: a mark is a point in time of the work, taken from the host's clock on a CPU and by an event in the
stream on a GPU (`cuda`).

A mark on a GPU costs the host a microsecond and never makes it wait. The marks of a program are read once,
when somebody asks: the host need not wait for the program's end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol


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
    mark = staticmethod(time.monotonic)

    def reader(self, begin: float, end: float) -> HostReader:
        return HostReader(begin)

    def passed(self, mark: float) -> bool:
        return True

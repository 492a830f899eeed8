"""Remember what functions of a config return, while one block of code asks for many plans of one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

T = TypeVar("T")
_KNOWN: ContextVar[dict[object, Any] | None] = ContextVar("known", default=None)


@contextmanager
def remembering() -> Iterator[None]:
    """Inside, functions with `remembered` compute each result once. Outside they always compute: a layer's
    code may change between two calls in one process."""
    token = _KNOWN.set({} if _KNOWN.get() is None else _KNOWN.get())
    try:
        yield
    finally:
        _KNOWN.reset(token)


def remembered(key: Callable[..., object]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """`key`: from the arguments, a hashable value on which the result depends. Callers must not change the
    result."""
    def around(function: Callable[..., T]) -> Callable[..., T]:
        @wraps(function)
        def call(*arguments: Any) -> T:
            if (known := _KNOWN.get()) is None:
                return function(*arguments)
            own = function, key(*arguments)
            if own not in known:
                known[own] = function(*arguments)
            return known[own]
        return call
    return around

"""Calls in a process of their own, one after the other: what kills or hangs one does not end the others."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

# Forked: what is imported here is imported there. The caller must not have used a GPU, nor OpenMP's threads.
FORK = get_context("fork")


class Outcome(NamedTuple):
    value: Any  # what the call returned, or None
    failure: str | None  # why it returned nothing
    seconds: float


def outcomes(calls: Sequence[Callable[[], Any]], limit_s: Callable[[], float]) -> Iterator[Outcome]:
    """What each call comes to. They share a process until one fails, raises or takes longer than `limit_s()`
    seconds, asked when it begins: then the next one gets a new process, since a GPU that has met an
    error refuses all later work of its process."""
    rest = list(calls)
    while rest:
        ours, theirs = FORK.Pipe(duplex=False)
        child = FORK.Process(target=_serve, args=(theirs, rest))
        child.start()
        theirs.close()
        failure = None
        while rest and failure is None:
            begin = time.monotonic()
            value, failure = _receive(ours, child, limit_s())
            rest.pop(0)
            yield Outcome(value, failure, time.monotonic() - begin)
        if failure is not None:
            child.kill()
        child.join(10)
        ours.close()


def _serve(pipe: Connection, rest: Sequence[Callable[[], Any]]) -> None:
    for call in rest:
        try:
            answer = call(), None
        except Exception as error:
            traceback.print_exc()
            answer = None, _cause(error)
        pipe.send(answer)
        if answer[1] is not None:
            return


def _receive(pipe: Connection, child: Any, limit_s: float) -> tuple[Any, str | None]:
    if not pipe.poll(max(limit_s, 0)):
        return None, f"took longer than {limit_s:.0f} s"
    try:
        return pipe.recv()
    except EOFError:
        child.join(10)
        how = f"signal {-child.exitcode}" if (child.exitcode or 0) < 0 else f"status {child.exitcode}"
        return None, f"its process ended with {how}"


def _cause(error: BaseException) -> str:
    """The first error of a chain, in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {line}"

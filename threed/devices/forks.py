"""Forks: what processes that are forked from this one can do with torch. Each question is asked in a child,
which answers through a pipe: whatever it starts ends with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from threed.base.signals import ASKS

PRODUCT_S = 10  # how long a child may take for a small product on several threads
_SIGNALS = (*ASKS, signal.SIGALRM)


def computes() -> bool:
    """Whether a forked process can compute on several threads. OpenMP does not say; its threads are gone in
    the child, which waits for them for ever."""
    def product() -> bool:
        matrix = torch.ones(512, 512, device="cpu")
        return bool((matrix @ matrix).sum() > 0)

    return ask(product, PRODUCT_S) is True


def ask(question: Callable[[], Any], limit_s: int) -> Any:
    """What `question` returns in a child, as JSON carries it; None where the child dies, or takes longer than
    `limit_s`."""
    read, write = os.pipe()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # none of this process's handlers runs there
    child = os.fork()
    if not child:
        _answer(question, limit_s, write)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.close(write)
    with open(read, "rb") as pipe:
        text = pipe.read()
    with contextlib.suppress(ChildProcessError):  # where a script ignores SIGCHLD
        os.waitpid(child, 0)
    return json.loads(text) if text else None


def _answer(question: Callable[[], Any], limit_s: int, write: int) -> None:
    """Run in the child: write the answer to the pipe as JSON, and exit. An alarm ends the child after
    `limit_s`."""
    try:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        signal.alarm(limit_s)
        with contextlib.suppress(Exception):
            os.write(write, json.dumps(question()).encode())
    finally:
        os._exit(0)

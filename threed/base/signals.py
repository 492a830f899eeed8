"""Signals that people and batch systems send: which ask a run to stop, and which to save; and what they do in
the first seconds of `threed train`, while libraries are imported and a run has nothing to save."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from threed.base import console, marks

BEGAN = "THREED_BEGAN"  # in the environment: when the run was started, in seconds since 1970
RUNS = ("train", "eval", "generate", "calibrate")  # commands that compute
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU)  # to save, and end
SAVES = (signal.SIGUSR1, signal.SIGUSR2)  # to save, and go on
ASKS = (*STOPS, *SAVES)


def handle(numbers: Iterable[int], handler: Any) -> None:
    """Install `handler` for signals, but not for SIGHUP if the process ignores it, as under nohup."""
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def begin() -> None:
    """Install handlers for the seconds of importing: a request to stop ends the process with a word, a
    request to save is ignored. Set what libraries read when they are imported."""
    console.open_standard()
    if sys.argv[1:2] and sys.argv[1] in RUNS:
        calm()
    if sys.argv[1:2] == ["train"]:
        console.steady()
        os.environ[BEGAN] = repr(time.time())
        marks.begin("start", marks.age_s())
        # For each try of a broken connection torch prints 40 lines of addresses; threed says it once.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        handle(STOPS, leave)
        handle(SAVES, signal.SIG_IGN)


def calm() -> None:
    """Have OpenMP's threads sleep while they wait for work. By default GNU's spin; on a machine with other
    work, or with several ranks, spinning threads keep the processors from those that compute."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def leave(number: int, _: FrameType | None) -> None:
    """End with a word."""
    if console.speaks_for_machine():
        console.say(f"stopped by {signal.Signals(number).name} before the first step")
    console.leave(128 + number)

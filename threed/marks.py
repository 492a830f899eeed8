"""Marks: what a run's processes do, and since when, before there is a log. They are in the environment, so
that ranks have those of their launcher; `monitor.goodput` writes them down when a run has begun.

    start     processes start, connect and plan       data    data are prepared
    waiting   for other nodes, or ranks               load    a checkpoint is read
    down      no rank lives: between a failure and the next start
"""

from __future__ import annotations

import os
import time

_NAME = "THREED_MARKS"


def begin(doing: str) -> None:
    """Forget all marks, and set one."""
    os.environ[_NAME] = ""
    mark(doing)


def begin_once(doing: str) -> None:
    """Set the first mark, if there is none."""
    if not os.environ.get(_NAME):
        mark(doing)


def mark(doing: str) -> None:
    """From now on the run does this."""
    os.environ[_NAME] = f"{os.environ.get(_NAME, '')} {doing}:{time.time():.3f}".strip()


def take() -> list[tuple[str, float]]:
    """All marks, with seconds since 1970; they are forgotten."""
    pairs = (text.split(":") for text in os.environ.pop(_NAME, "").split())
    return [(doing, float(at_s)) for doing, at_s in pairs]

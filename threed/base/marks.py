"""Marks: what a run's processes do, and since when, before there is a log. They are in the environment, so
that ranks have those of their launcher; `monitor.goodput` writes them down when a run has begun.

    start     processes start, connect and plan       data    data are prepared
    waiting   for other nodes, or ranks               load    a checkpoint is read
    down      no rank lives: between a failure and the next start
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_NAME = "THREED_MARKS"
_MOST_AGE_S = 60.0  # an older process has run something else, which called `exec`


def begin(doing: str, ago_s: float = 0.0) -> None:
    """Forget all marks, and set one."""
    os.environ[_NAME] = f"{doing}:{time.time() - ago_s:.3f}"


def begin_once(doing: str) -> None:
    """Set the first mark, if there is none."""
    if not os.environ.get(_NAME):
        mark(doing)


def mark(doing: str) -> None:
    """From now on the run does this."""
    os.environ[_NAME] = f"{os.environ.get(_NAME, '')} {doing}:{time.time():.3f}".strip()


def age_s() -> float:
    """How long this process has lived: the interpreter takes a second to come here from a slow disk. 0 where
    that is not known, or the process did something else before."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0
    return age_s if 0 < age_s < _MOST_AGE_S else 0.0


def take() -> list[tuple[str, float]]:
    """All marks, with seconds since 1970; they are forgotten."""
    pairs = (text.split(":") for text in os.environ.pop(_NAME, "").split())
    return [(doing, float(at_s)) for doing, at_s in pairs]

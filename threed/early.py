"""The first seconds of `threed train`, while libraries are imported and nothing is there to save yet."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def begin() -> None:
    """Before anything is imported. Until the launcher or a rank has handlers of its own, what asks to stop ends the process with
    a word, and what asks to save finds nothing to save."""
    if sys.argv[1:2] == ["train"]:
        # Of a connection that breaks torch prints 40 lines of addresses for each try; threed says it once.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        for number in STOPS:
            signal.signal(number, _leave)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _leave(number: int, _: FrameType | None) -> None:
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":  # one line a run
        os.write(2, f"threed: stopped by {signal.Signals(number).name} before the first step\n".encode())
    os._exit(128 + number)

"""State: whether a run is under way, from two things in its folder.

    .lock        rank 0 holds it while it lives (flock): the kernel lets go of it however the process ends
    state.json   the run's last status: running, ended, stopped or failed; its host, its step, and when

A run that is killed writes nothing: its lock is free, and its last status is still "running".
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from threed.base.files import write_whole

FILE, LOCK = "state.json", ".lock"
RUNNING, ENDED, STOPPED, FAILED, UNKNOWN = "running", "ended", "stopped", "failed", "unknown"
FRESH_S = 60.0  # without a lock to go by, a run whose last sign is younger is taken to be under way


def note(folder: Path, state: str, step: int) -> None:
    """Write the status. A disk that is full must not end a run."""
    word = {"state": state, "step": step, "host": socket.gethostname(), "process": os.getpid(),
            "time": time.time()}
    try:
        write_whole(folder / FILE, json.dumps(word) + "\n")
    except OSError:
        return


def last_word(folder: Path) -> dict[str, Any]:
    """What `note` has left; {} where that is nothing, or damaged."""
    try:
        word = json.loads((folder / FILE).read_text())
        return word if isinstance(word, dict) and isinstance(word.get("state"), str) else {}
    except (OSError, ValueError):
        return {}


def is_locked(folder: Path) -> bool | None:
    """Whether a process holds the run's lock; None where there is no lock, or the file system has none. The
    lock is taken, shared, for an instant."""
    try:
        with (folder / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def state_of(word: dict[str, Any], locked: bool | None, age_s: float | None, done: bool) -> tuple[str, str]:
    """The state of a run, and a remark. `age_s`: since its last sign; None: it gave none. `done`: whether it
    has made all of its steps."""
    said, host = word.get("state"), word.get("host", "")
    if locked:
        return RUNNING, ""
    away = said == RUNNING and host != socket.gethostname()
    if locked is None or away:
        if said in (ENDED, STOPPED, FAILED):
            return said, ""
        if age_s is not None and age_s < FRESH_S:
            return RUNNING, f"by its last sign; it is on {host}" if host else "by its last sign"
        return UNKNOWN, "its lock says nothing here" + (f"; look on {host}" if host else "")
    if said == RUNNING:
        return FAILED, "its last status is still 'running': killed, or its machine failed"
    if said is None:
        return (ENDED, "") if done else (UNKNOWN, "no process has it, and it does not say how it ended")
    return said, ""

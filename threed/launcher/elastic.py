"""Elastic: what a rank does under an elastic agent (torchrun, threed.torchrun, ft_launcher), and how many
restarts it takes part in.

An agent restarts its ranks at once after every failure. Rank 0 first decides whether the restart can help: it
reads the failures so far, and waits or refuses. If it refuses, the first rank of each machine ends its agent
by SIGQUIT.

`failures.jsonl`, in run.dir, has a row for each failure under an agent: the note of the rank that failed
first (see `engine.watch.tell`), with the agent of rank 0 and the newest checkpoint then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from threed.base import console
from threed.base.errors import InputError, RunError, ThreedError
from threed.base.restart import FailureNote, Restarts
from threed.checkpoint.format import folder_in
from threed.checkpoint.lineage import latest_in
from threed.comm.environment import RankPlace, agent
from threed.schema import Config

FAILURES = "failures.jsonl"
HEARD_S = 1.0  # delay before a rank exits, so that its agent reads the report first, and restarts nothing
LINGER_S = 2.0  # how long rank 0, or its launcher, lives on after a failure: twice as long as a rank takes to
# see it and end; more where ranks look less often
AGENT, GO = "threed/agent", "threed/go"  # keys of a start's store: rank 0's agent, and what it has decided
LAUNCHER = "THREED_LAUNCHER"  # in the environment: the descriptor on which `threed.torchrun` hears its ranks


class NoRestart(ThreedError):
    """Another start would not help: the agents end."""

    def __init__(self, text: str, status: int):
        super().__init__(text)
        self.status = status


def begin(config: Config, place: RankPlace, store: Any, prefix: str) -> None:
    """Wait as long as the restart policy asks. NoRestart if it does not allow a start, InputError if agents
    disagree on the number of nodes. `store`: of this start; its keys have a `prefix`."""
    tell_launcher(rank=place.rank, run=str(Path(config.run.dir).absolute()),
                  store=[os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), prefix])
    nodes = os.environ.get("GROUP_WORLD_SIZE")
    if place.rank == 0:
        store.set(AGENT, agent())
        wait_s, text, status = decide(config) if agent() else (0.0, "", 0)
        if text and wait_s is not None:
            console.say(text)
        store.set(GO, json.dumps([wait_s, text, status, nodes]))
    else:
        wait_s, text, status, theirs = json.loads(store.get(GO))
        if nodes != theirs:  # torch's agents would train, and wait for each other for 300 s at the end
            raise InputError(f"NNODES is {nodes} on {socket.gethostname()} and {theirs} on node 0: give all "
                             "nodes the same number")
    if wait_s is None:
        raise NoRestart(text, status)
    time.sleep(wait_s)


def decide(config: Config) -> tuple[float | None, str, int]:
    """Seconds to wait before the ranks continue, or None if they should not; a message; and the status of the
    last failure. The policy is applied to the failures that this agent has seen."""
    run, mine = config.run, agent()
    # torchrun's --max-restarts asks for restarts even where the config does not
    restarts = Restarts(run.restarts or _number("TORCHELASTIC_MAX_RESTARTS"), run.restart_wait_s)
    wait_s, text, status = 0.0, "", 0
    for row in _rows(Path(run.dir) / FAILURES):
        if row.get("agent") == mine:
            note = FailureNote.of(row)
            wait_s, text = restarts.after(note, row["newest"])
            status = note.status
    return wait_s, text, status


def _rows(file: Path) -> list[dict[str, Any]]:
    """The complete rows; a rank may have been killed while it wrote one."""
    rows = []
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return rows


def note_failure(run: Path, store: Any, note: FailureNote) -> None:
    """Append a failure to the file in a run's folder. Skipped if that cannot be written or the store is gone:
    then only the agents' own count ends a run that keeps failing."""
    with contextlib.suppress(OSError, RuntimeError):
        mine = store.get(AGENT).decode() if store.check([AGENT]) else ""
        if not mine:
            return
        row = {"time": time.time(), **asdict(note), "agent": mine, "newest": latest_in(folder_in(run))[0]}
        file = os.open(run / FAILURES, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
        try:
            os.write(file, json.dumps(row).encode() + b"\n")
        finally:
            os.close(file)


def is_final(note: FailureNote | None) -> bool:
    """Whether another start would not help: after a mistake, a wrong result, a stop, or missing nodes; or
    without a note, if node 0's agent served the store, which is gone."""
    if note is None:
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return note.final or (note.rank is not None and note.status != RunError.status)


def end_agent(status: int) -> None:
    """Make the agent that started this rank end with the rank's status, without a restart. The first rank of
    each machine does it."""
    again = _number("TORCHELASTIC_MAX_RESTARTS") > _number("TORCHELASTIC_RESTART_COUNT")
    if not agent() or not again or os.environ.get("LOCAL_RANK") != "0":
        return
    if LAUNCHER in os.environ:
        tell_launcher(ends=status)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(os.getppid(), signal.SIGQUIT)
    time.sleep(HEARD_S)


def _number(variable: str) -> int:
    return int(os.environ.get(variable, 0))


def error_file(text: str) -> None:
    """Write the reason where torch's agents look for it, so that they print it."""
    if agent():
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with contextlib.suppress(OSError):
            get_error_handler().record_exception(RunError(text))


def tell_launcher(**values: Any) -> None:
    """Report to `threed.torchrun`, if it started this rank."""
    if LAUNCHER in os.environ:
        line = {"pid": os.getpid(), **values}
        with contextlib.suppress(OSError):
            os.write(int(os.environ[LAUNCHER]), json.dumps(line).encode() + b"\n")

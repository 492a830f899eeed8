"""Struck: runs of four ranks of which one is killed inside an exchange, and what is said of it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest

from tests.gloo.test_train import free_port
from threed.comm.process import ProcessGroup

RANK = 1  # which is struck


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def inside_exchanges(monkeypatch: pytest.MonkeyPatch, due: Callable[[], bool],
                     do: Callable[[], None]) -> None:
    """`do` when a call of an exchange is under way, if it is `due`."""
    exchange = ProcessGroup._exchange

    def under_way(self, *arguments):
        handle = exchange(self, *arguments)
        if due():
            do()
        return handle

    monkeypatch.setattr(ProcessGroup, "_exchange", under_way)


def assert_killed(run) -> None:
    """The others end with the rank, and their own words are left out."""
    assert run.wait(60) == 128 + 9, run.output
    assert [line for line in run.output.splitlines() if line.startswith("threed: ")] == [
        f"threed: rank {RANK} was killed by SIGKILL"], run.output
    assert "Traceback" not in run.output and "gloo" not in run.output, run.output


def assert_named_without_launcher(start, needs: str) -> None:
    """No launcher or neighbour: the first whose connection breaks names the exchange and its ranks. `needs`:
    a pattern."""
    place = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(free_port())}
    runs = [start(env={**place, "RANK": str(rank)}) for rank in range(4)]
    assert [run.wait(60) for run in runs] == [-9 if rank == RANK else 1 for rank in range(4)]
    text = "".join(run.output for run in runs)
    assert text.count("threed: ") == 1 == text.count("the connection to another rank is gone"), text
    assert re.search(f"which needs {needs}", text), text
    assert "Traceback" not in text, text

"""A process with fake GPUs, for a test session that has none.

torch takes fake GPUs only before its import, and pytest has imported it long before. So a process apart
installs them and imports what tests need once; each call runs in a fork of it, whose devices are new. A fork
may die, as one does whose host touches device memory.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_S = 120  # of a call
ROOT = Path(__file__).parents[2]


class Outcome(NamedTuple):
    value: Any
    error: str  # the traceback; "" where there was none
    died: int  # the signal that ended the process, or 0
    races: list[str]
    counts: dict[str, int]


class Server:
    def __init__(self, **env: str) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakecuda.server", str(theirs.fileno())], cwd=ROOT,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_MODULE_LOADING": "LAZY", **env})
        theirs.close()
        self._pipe = Connection(ours.detach())

    def outcome(self, function: Callable[..., Any], *arguments: Any) -> Outcome:
        """Call a function of a module in a fork. Its arguments and its value are pickled."""
        self._pipe.send_bytes(pickle.dumps((function, arguments)))  # (`send` would share tensors by files)
        return Outcome(*pickle.loads(self._pipe.recv_bytes()))

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's value. AssertionError where it fails, or where there was a race."""
        outcome = self.outcome(function, *arguments)
        assert not outcome.died, f"killed by signal {outcome.died}"
        assert not outcome.error, outcome.error
        assert not outcome.races, "\n".join(sorted(set(outcome.races))[:8])
        return outcome.value

    def close(self) -> None:
        self._pipe.close()
        self._process.wait(30)


def serve(descriptor: int) -> None:
    from tests.fakecuda import shim

    device = shim.install()
    import torch

    import tests.harness  # noqa: F401  (imported once, before the forks)
    from tests.fakecuda import transport

    torch.set_num_threads(1)
    transport.use()
    pipe = Connection(descriptor)
    while True:
        try:
            request = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            with os.fdopen(write, "wb") as answer:
                answer.write(_answer(device, *request))
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as answer:
            data = answer.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        pipe.send_bytes(data or pickle.dumps((None, "" if status < 0 else "no answer", -status, [], {})))


def _answer(device: Any, function: Callable[..., Any], arguments: Any) -> bytes:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    # In a fork torch makes its pool of threads anew at the next call, and aborts where two threads do so at
    # once.
    sys.modules["torch"].set_num_threads(1)
    try:
        value = function(*arguments)
        return pickle.dumps((value, "", 0, device.races(), device.counts()))
    except BaseException:
        return pickle.dumps((None, traceback.format_exc(), 0, device.races(), device.counts()))


if __name__ == "__main__":
    serve(int(sys.argv[1]))

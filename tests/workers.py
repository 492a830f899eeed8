"""Worker processes for tests over gloo: forked once from a process that has imported everything.

For each call a worker forks again: gloo leaves threads behind that never sleep for long, and hundreds of them
would slow down all tests that follow.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from threed.launcher.processes import die_with_parent

TIMEOUT_S = 120.0


class Workers:
    """`run(work, n, *args)` calls work(rank, store_path, *args) on ranks 0 .. n-1 and returns their
    results."""

    def __init__(self, count: int):
        context = multiprocessing.get_context("fork")
        self._scratch = tempfile.TemporaryDirectory(prefix="threed-test-")
        self._calls = 0
        self._pipes, self._processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(os.getpid(), rank, theirs), daemon=True)
            process.start()
            assert process.pid is not None
            with contextlib.suppress(PermissionError):  # it has done so itself
                os.setpgid(process.pid, process.pid)
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, work: Callable[..., Any], count: int, *args: Any) -> list[Any]:
        self._calls += 1
        path = str(Path(self._scratch.name) / f"store-{self._calls}")
        for pipe in self._pipes[:count]:
            pipe.send((self._calls, work, path, args))
        results, failed = [], []
        for rank, pipe in enumerate(self._pipes[:count]):
            call, ok, value = 0, False, None
            while call != self._calls:  # the answer to a call before, which somebody gave up
                assert pipe.poll(TIMEOUT_S), "\n".join([f"worker {rank} does not answer", *failed])
                call, ok, value = pickle.loads(pipe.recv_bytes())
            if not ok:  # the others say why, if this one was only left alone
                failed.append(f"worker {rank} failed:\n{value}")
            results.append(value)
        assert not failed, "\n".join(failed)
        return results

    def close(self) -> None:
        for process in self._processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()  # so that its processor time counts
        self._scratch.cleanup()


def _serve(parent: int, rank: int, pipe: Any) -> None:
    os.setpgid(0, 0)
    die_with_parent(parent)
    torch.set_num_threads(1)
    while True:
        call, work, path, args = pipe.recv()
        me = os.getpid()
        if os.fork() == 0:
            die_with_parent(me)
            try:
                answer = call, True, work(rank, path, *args)
            except BaseException:
                answer = call, False, traceback.format_exc()
            pipe.send_bytes(pickle.dumps(answer))  # `send` would leave tensors in this process's memory
            os._exit(0)
        _, status = os.wait()
        if status:
            text = f"it ended with status {os.waitstatus_to_exitcode(status)}"
            pipe.send_bytes(pickle.dumps((call, False, text)))

"""Worker processes for tests over gloo: forked once from a process that has imported everything, then
reused."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, work: Callable[..., Any], count: int, *args: Any) -> list[Any]:
        self._calls += 1
        path = str(Path(self._scratch.name) / f"store-{self._calls}")
        for pipe in self._pipes[:count]:
            pipe.send((work, path, args))
        results = []
        for rank, pipe in enumerate(self._pipes[:count]):
            assert pipe.poll(TIMEOUT_S), f"worker {rank} does not answer"
            ok, value = pipe.recv()
            assert ok, f"worker {rank} failed:\n{value}"
            results.append(value)
        return results

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        self._scratch.cleanup()


def _serve(rank: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    while True:
        work, path, args = pipe.recv()
        try:
            pipe.send((True, work(rank, path, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))

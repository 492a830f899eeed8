"""Lanes: queues of work beside the computation, and handles to wait for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch


class Handle:
    """One communication under way."""

    def __init__(self, wait: Callable[[], Any] | None, keep: Sequence[torch.Tensor] = (),
                 done: Callable[[], bool] | None = None):
        self._wait = wait
        self._done = done
        self._keep = keep  # buffers that must live until the transfer ends

    def wait(self) -> None:
        """Return when the result can be used (on a GPU: by the current stream)."""
        if self._wait is not None:
            self._wait()
        self._wait, self._keep, self._done = None, (), None

    def done(self) -> bool:
        return self._wait is None or (self._done is not None and self._done())


class Lane:
    """A queue of work beside the computation: jobs run one after the other, in the order in which they were
    submitted.

    The base class is for lanes that wait for no other rank: it runs a job at once.
    """

    def submit(self, job: Callable[[], None]) -> Handle:
        """Run a job, which may wait for communication, after the jobs before it. The job sees the results of
        all computation before this call."""
        job()
        return Handle(None)

    def close(self) -> None:
        """No more jobs."""


class ThreadLane(Lane):
    """A thread. An exception of a job is raised by its handle's `wait`."""

    def __init__(self, name: str):
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        # A daemon: a job may hang with the rank that it talks to, and must not keep the process.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        with torch.no_grad():
            while (entry := self._jobs.get()) is not None:
                job, future = entry
                try:
                    job()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(None)
                del entry, job, future  # free what they hold before the next job comes

    def submit(self, job: Callable[[], None]) -> Handle:
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return Handle(future.result, (), future.done)

    def close(self) -> None:
        self._jobs.put(None)


class StreamLane(Lane):
    """A CUDA stream. A job is issued at once, and runs after the work that was issued before it on the
    current stream."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def submit(self, job: Callable[[], None]) -> Handle:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            job()
            event = torch.cuda.Event()
            event.record()
        return Handle(lambda: torch.cuda.current_stream().wait_event(event), (), event.query)


class AfterDevice(Lane):
    """A lane whose jobs wait for the device."""

    def __init__(self, lane: Lane):
        self._lane = lane

    def submit(self, job: Callable[[], None]) -> Handle:
        event = torch.cuda.Event()
        event.record()

        def after() -> None:
            event.synchronize()
            job()

        return self._lane.submit(after)


def copy(into: torch.Tensor, of: torch.Tensor) -> None:
    """Copy on the lane that calls this. The allocator does not reuse the device's memory before the copy is
    done."""
    into.copy_(of, non_blocking=True)
    for tensor in (into, of):
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())

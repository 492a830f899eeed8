"""Lanes: queues of work beside the computation, and handles to wait for it.

A lane runs jobs one after the other. A job names the handles of the work that it needs, and waits for nothing
else: neither for the computation, nor for the thread that issues all work.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

from threed.devices import device_of
from threed.devices.device import Device

T = TypeVar("T")
Job = Callable[[], object]


class Handle:
    """Work under way."""

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

    def block(self) -> None:
        """Return when the result can be used by the host."""
        self.wait()

    def done(self) -> bool:
        done = self._done  # (another thread may have waited, and forget it now)
        return self._wait is None or (done is not None and done())

    def ready(self) -> bool:
        """Whether `wait` on a GPU does not hold up the host."""
        return True


DONE = Handle(None)


class Waiting:
    """A job that waits for the device: it needs a thread of its own."""

    def __init__(self, job: Job):
        self._job = job

    def __call__(self) -> object:
        return self._job()


def run_as_batch() -> None:
    """Have this thread, and those that it starts from now on, not take the processor of another thread when
    they wake.

    A thread of gloo tries the lock of a connection again and again. Where it wakes on the processor of the
    thread that holds the lock, it spins until the scheduler's next tick, up to 4 ms, and a collective takes 2
    to 5 times as long. Linux has batch threads wait until the other one sleeps. A policy that somebody has
    chosen (chrt) stays.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(PermissionError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class OnStream(Handle):
    """All work up to now on a device's current stream."""

    def __init__(self, device: Device):
        super().__init__(None)
        self._device, self._event = device, device.record()

    def wait(self) -> None:
        self._device.current_stream().wait_event(self._event)

    def block(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return self._event.query()


def so_far(device: torch.device) -> Handle:
    """All computation that has been issued; on a CPU it has ended."""
    return OnStream(known) if (known := device_of(device)).asynchronous else DONE


def in_order(device: torch.device, work: Callable[[], T]) -> Callable[[], T]:
    """`work`, to be done by another thread than this one, and once. On the device it comes after all that
    this thread has issued so far, and has ended when it returns: a thread that does not say otherwise works
    on GPU 0, and on a stream that waits for no other."""
    before = so_far(device)

    def done_there() -> T:
        device_of(device).use()
        before.block()
        result = work()
        so_far(device).block()
        return result

    return done_there


class Queued(Handle):
    """A job in a thread's queue. `wait` and `block` raise its exception."""

    def __init__(self) -> None:
        super().__init__(None)
        self._issued: Handle | BaseException | None = None  # of what the job has issued; or why it failed
        # Until then the lane holds it. (A Future has a lock, a condition and two lists for it.)
        self._ends = threading.Lock()
        self._ends.acquire()

    def end(self, issued: Handle | BaseException) -> None:
        self._issued = issued
        self._ends.release()

    def _result(self) -> Handle:
        if self._issued is None:
            with self._ends:
                pass
        if isinstance(self._issued, BaseException):
            raise self._issued
        assert self._issued is not None
        return self._issued

    def wait(self) -> None:
        self._result().wait()

    def block(self) -> None:
        self._result().block()

    def done(self) -> bool:
        issued = self._issued
        return issued is not None and (isinstance(issued, BaseException) or issued.done())

    def ready(self) -> bool:
        return isinstance(self._issued, Handle)


class Lane:
    """A queue of work. The base class is for work that waits for no other rank: it runs a job at once, as
    part of the computation."""

    at_once = True  # whether jobs are part of the computation
    defers = True  # whether a job may be submitted before what it needs has been issued, without waiting

    def __init__(self, device: torch.device):
        self.device = device

    def submit(self, job: Job, after: Sequence[Handle] = ()) -> Handle:
        """Run a job, which may wait for communication, after the jobs before it and after this work."""
        for handle in after:
            handle.wait()
        job()
        return so_far(self.device)

    def close(self) -> None:
        """No more jobs."""


class ThreadLane(Lane):
    """A thread. After a job that failed all later ones fail with its exception: they may need its result."""

    at_once = False

    def __init__(self, name: str, device: torch.device):
        super().__init__(device)
        self._jobs: queue.SimpleQueue[tuple[Job, Sequence[Handle], Queued] | None] = queue.SimpleQueue()
        # A daemon: a job may hang with the rank that it talks to, and must not keep the process.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    @torch.no_grad()
    def _work(self) -> None:
        device_of(self.device).use()  # a thread's work goes to the first otherwise
        failure: BaseException | None = None
        while (entry := self._jobs.get()) is not None:
            job, after, handle = entry
            try:
                if failure is not None:
                    raise failure
                handle.end(self._run(job, after))
            except BaseException as error:
                failure = error
                handle.end(error)
            del entry, job, after, handle  # free what they hold before the next job comes

    def _run(self, job: Job, after: Sequence[Handle]) -> Handle:
        for handle in after:
            handle.block()
        job()
        return DONE

    def submit(self, job: Job, after: Sequence[Handle] = ()) -> Handle:
        handle = Queued()
        self._jobs.put((job, after, handle))
        return handle

    def close(self) -> None:
        self._jobs.put(None)


class StreamLane(Lane):
    """A stream. A job is issued at once, and runs when the work that it names has run."""

    at_once, defers = False, False

    def __init__(self, device: torch.device):
        super().__init__(device)
        # Before the computation: what a lane's job does is short, and somebody will wait for it.
        self._on = device_of(device)
        self._stream = self._on.stream(first=True)

    def submit(self, job: Job, after: Sequence[Handle] = ()) -> Handle:
        with self._on.on(self._stream):
            for handle in after:
                handle.wait()
            job()
            return OnStream(self._on)


class CopyLane(ThreadLane):
    """A stream for copies, some of which wait for the host or the disk, or have the host add what has
    come. A thread issues those, so that the computation goes on meanwhile; the others are issued at once."""

    def __init__(self, name: str, device: torch.device):
        super().__init__(name, device)
        self._stream = StreamLane(device)
        self._last: Handle = DONE
        self._under_way: deque[tuple[Handle, Job]] = deque()  # of the thread

    def _run(self, job: Job, after: Sequence[Handle]) -> Handle:
        handle = self._stream.submit(job, after)
        # While another thread records a graph, the allocator forgets which streams use what is freed.
        while self._under_way and self._under_way[0][0].done():
            self._under_way.popleft()
        self._under_way.append((handle, job))
        return handle

    def submit(self, job: Job, after: Sequence[Handle] = ()) -> Handle:
        direct = (not isinstance(job, Waiting) and self._last.ready()
                  and all(handle.ready() for handle in after))
        self._last = self._stream.submit(job, after) if direct else super().submit(job, after)
        return self._last


def copy(into: torch.Tensor, of: torch.Tensor) -> None:
    """Copy on the lane that calls this. The allocator does not reuse the device's memory before the copy is
    done."""
    into.copy_(of, non_blocking=True)
    for tensor in (into, of):
        device_of(tensor.device).in_use(tensor)

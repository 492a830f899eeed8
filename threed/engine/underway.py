"""What of a program under way runs beside the computation, and who waits for it."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import torch

from threed.comm.group import COPY_LANES, HOST_LANES
from threed.comm.lanes import DONE, Handle, Job, Lane, Waiting, so_far
from threed.devices.clock import Clock
from threed.program.instruction import Slot
from threed.program.order import Order
from threed.program.trace import Ran, Wait


class UnderWay:
    """The handles of a program's instructions, and the waits for them so far."""

    def __init__(self, order: Order, clock: Clock, device: torch.device, copies: dict[Slot, Handle]):
        """`copies`: slot -> the copy for a checkpoint that an earlier program has begun. Those that are
        waited for are taken out, those that this program begins are put in."""
        self.order, self.clock, self.copies = order, clock, copies
        self.began = so_far(device)
        # (index, source, from, to), as in Wait, with marks of the clock for times
        self.waits: list[tuple[int, int, Any, Any]] = []
        self.waiting: int | None = None  # index of the instruction that the host waits for now
        # What lanes between tiers, and the host's, have done: (index, from, to). With marks of the clock of
        # copies, and with the host's time of what threads of the host do.
        self._copied: list[tuple[int, Any, Any]] = []
        self._on_host: list[tuple[int, float, float]] = []
        self._begin_s = time.monotonic()
        self._handles: dict[int, Handle] = {}
        self._copies_of: dict[int, list[Handle]] = {}  # instruction -> the copies for which it waits

    def put(self, index: int, handle: Handle) -> None:
        self._handles[index] = handle

    def submit(self, index: int, lane: Lane, job: Job | None) -> None:
        """Run the job of an instruction on a lane, after all that the instruction waits for."""
        if job is None:
            self._handles[index] = DONE
            return
        needs = self.order.waits[index]
        after = [self._handles[need] for need in needs] + self._copies(index)
        if index in self.order.first:
            after.append(self.began)
        if not lane.defers:  # the host waits until what the job needs has been issued
            self.waiting = next((need for need in needs if not self._handles[need].ready()), None)
        self._handles[index] = lane.submit(self._timed(index, job), after)
        self.waiting = None

    def _timed(self, index: int, job: Job) -> Job:
        """The job, wrapped so that its time is recorded, if its lane copies between tiers or runs on the
        host. (Copies for a checkpoint are not timed: they may outlast the program.)"""
        name = self.order.effects[index].lane
        if name not in (*COPY_LANES, *HOST_LANES) or index in self.order.copies.values():
            return job
        on_host = name in HOST_LANES
        mark, kept = (time.monotonic, self._on_host) if on_host else (self.clock.mark, self._copied)

        def timed() -> None:
            before = mark()
            job()
            kept.append((index, before, mark()))

        return Waiting(timed) if isinstance(job, Waiting) else timed

    def ran(self, since: Any) -> list[Ran]:
        """What the lanes between tiers, and the host's, have done. `since` as in `recorded`."""
        copied = [Ran(index, since(start), since(end) - since(start)) for index, start, end in self._copied]
        return copied + [Ran(index, start - self._begin_s, end - start)
                         for index, start, end in self._on_host]

    def wait(self, index: int) -> None:
        """Let the computation wait for all that an instruction waits for."""
        for source in self.order.waits[index]:
            self._wait(index, source)
        for handle in self._copies(index):
            self._record(index, -1, handle)

    def finish(self) -> None:
        """Wait for the last job of each lane. Copies for a checkpoint may take longer."""
        self.copies.update((slot, self._handles[index]) for slot, index in self.order.copies.items())
        for source in self.order.last:
            self._wait(len(self.order.effects), source)

    def ahead_of(self, job: int, raised: bool) -> int:
        """What holds up a job: the first on its lane that has not ended, or that has failed (`raised`: that
        has failed). What is no job is held up by itself. Any thread may call this."""
        order = self.order
        if job not in order.jobs:
            return job
        before = (index for index in sorted(order.jobs) if index < job
                  and order.effects[index].lane == order.effects[job].lane)
        return next((index for index in before if self._is_open(self._handles.get(index, DONE), raised)), job)

    def _is_open(self, handle: Handle, raised: bool) -> bool:
        with suppress(RuntimeError):  # the device has failed: the next use of it raises the reason
            return not handle.ready() or (not raised and not handle.done())
        return False

    def recorded(self, since: Any) -> list[Wait]:
        """The waits so far. `since`: a mark -> seconds from the program's start."""
        return [Wait(index, source, since(to) - since(from_)) for index, source, from_, to in self.waits]

    def _wait(self, index: int, source: int) -> None:
        """Let an instruction wait for a source; first for what the source itself still waits for, so that
        time counts for what takes it."""
        if not self._handles[source].done():
            for need in self.order.waits[source]:
                if need in self.order.jobs and not self._handles[need].done():
                    self._wait(index, need)
            for handle in self._copies_of.get(source, ()):
                if not handle.done():
                    self._record(index, -1, handle)
        self._record(index, source, self._handles[source])

    def _record(self, index: int, source: int, handle: Handle) -> None:
        before, self.waiting = self.clock.mark(), source
        handle.wait()
        self.waiting = None
        self.waits.append((index, source, before, self.clock.mark()))

    def _copies(self, index: int) -> list[Handle]:
        """The copies of earlier programs for which an instruction waits."""
        if not self.copies:
            return []
        reads = [slot for slot in self.order.effects[index].reads if slot in self.copies]
        self._copies_of[index] = [self.copies.pop(slot) for slot in reads]
        return self._copies_of[index]

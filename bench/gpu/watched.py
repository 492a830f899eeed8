"""Lanes that note when their jobs run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from threed.comm.group import HOST_LANES, Comm
from threed.comm.lanes import Handle, Job, Lane, Waiting
from threed.program.instruction import COMPUTE
from threed.program.trace import Trace

LANES = ("d2h", "h2d", "host")
Intervals = list[tuple[float, float]]  # seconds from a step's begin


class TimedLane(Lane):
    """A lane that notes when each of its jobs ran."""

    def __init__(self, lane: Lane, mark: Callable[[], Any]):
        super().__init__(lane.device)
        self.at_once, self.defers = lane.at_once, lane.defers
        self._lane, self._mark = lane, mark
        self.marks: list[tuple[Any, Any]] = []

    def submit(self, job: Job, after: Sequence[Handle] = ()) -> Handle:
        def timed() -> None:
            begin = self._mark()
            job()
            self.marks.append((begin, self._mark()))

        return self._lane.submit(Waiting(timed) if isinstance(job, Waiting) else timed, after)

    def close(self) -> None:
        self._lane.close()


def event() -> Any:
    """A mark in the current stream."""
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def watch_lanes(comm: Comm) -> dict[str, TimedLane]:
    """Put a TimedLane around each lane of LANES. The host's lanes tell the host's time, whatever the
    device."""
    lanes = {}
    for name in LANES:
        streams = comm.device.type == "cuda" and name not in HOST_LANES
        lanes[name] = comm._lanes[name] = TimedLane(comm.lane(name), event if streams else time.monotonic)
    return lanes


def overlap(intervals: Intervals, others: Intervals) -> float:
    """Seconds of `intervals` inside `others`; neither has two at the same time."""
    return sum(max(0.0, min(end, stop) - max(begin, start))
               for begin, end in intervals for start, stop in others)


def hidden(lane: TimedLane, trace: Trace, program: Sequence[Any], begin: float,
           origin: Any) -> tuple[float, float]:
    """Seconds at work, and the share of them during which the device computed."""
    def since(mark: Any) -> float:
        return mark - begin if isinstance(mark, float) else origin.elapsed_time(mark) / 1e3

    jobs = [(since(start), since(stop)) for start, stop in lane.marks]
    computes = [(trace.started[i], trace.ended[i]) for i, item in enumerate(program) if item.op in COMPUTE]
    busy = sum(stop - start for start, stop in jobs)
    return busy, overlap(jobs, computes) / busy if busy else 0.0

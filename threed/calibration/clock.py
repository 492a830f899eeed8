"""Clock: the seconds of a call, from many repetitions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

SAMPLE_S = 0.002  # a sample repeats a call for as long: a clock's own time does not show
LEAST, MOST = 5, 400  # samples


def typical(samples: Sequence[float]) -> float:
    """The lower quartile: what else runs on a machine makes samples longer, and none shorter."""
    return sorted(samples)[len(samples) // 4]


class Clock:
    """Times calls on a device: with events on a GPU, with the host's clock on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device

    def seconds(self, call: Callable[[], object], limit_s: float,
                most: Callable[[float], float] = lambda seconds: seconds) -> float:
        """Of a call, from as many samples as fit into the limit. Where ranks make the call together, `most`
        gives the largest of their numbers: all then call equally often."""
        call()
        once = max(most(self.sample(call, 1)), 1e-7)
        calls = max(1, round(SAMPLE_S / once))
        count = round(limit_s / once / calls)
        return typical([self.sample(call, calls) for _ in range(min(MOST, max(LEAST, count)))])

    def sample(self, call: Callable[[], object], calls: int) -> float:
        """Seconds of one call."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - begin) / calls
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(calls):
            call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / calls

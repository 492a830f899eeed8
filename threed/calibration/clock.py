"""Clock: the seconds of a call, as the median of repetitions."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

SAMPLE_S = 0.002  # a sample repeats a call for as long: a clock's own time does not show
LEAST, MOST = 5, 400  # samples


class Clock:
    """Times calls on a device: with events on a GPU, with the host's clock on a CPU."""

    def __init__(self, device: torch.device):
        self.device = device

    def seconds(self, call: Callable[[], object], limit_s: float) -> float:
        """The median of as many samples as fit into the limit, after a first call."""
        call()
        once = self.sample(call, 1)
        calls = max(1, round(SAMPLE_S / max(once, 1e-7)))
        until, samples = time.monotonic() + limit_s, []
        while len(samples) < LEAST or (time.monotonic() < until and len(samples) < MOST):
            samples.append(self.sample(call, calls))
        return median(samples)

    def together(self, call: Callable[[], object], limit_s: float, agree: Callable[[float], float]) -> float:
        """The same of a call that all ranks make equally often. `agree`: a number -> the largest of all
        ranks."""
        call()
        once = agree(self.sample(call, 1))
        calls = max(1, round(SAMPLE_S / max(once, 1e-7)))
        count = round(limit_s / max(once, 1e-7) / calls)
        return median(self.sample(call, calls) for _ in range(min(MOST, max(LEAST, count))))

    def sample(self, call: Callable[[], object], calls: int) -> float:
        """Seconds of one call."""
        if self.device.type != "cuda":
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - begin) / calls
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls

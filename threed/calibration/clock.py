"""Clock: the seconds of a call, from many repetitions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean

import torch

from threed.devices import device_of

SAMPLE_S = 0.002  # a sample repeats a call for as long: a clock's own time does not show
LEAST, MOST = 5, 400  # samples


def typical(samples: Sequence[float]) -> float:
    """The mean, since a step takes the sum of its calls; without the longest hundredth, which other programs
    have disturbed."""
    return fmean(sorted(samples)[:max(1, len(samples) * 99 // 100)])


class Stopwatch:
    """Times calls on a device: with events on a GPU, with the host's clock on a CPU."""

    def __init__(self, device: torch.device):
        self._clock = device_of(device).clock()

    def seconds(self, call: Callable[[], object], limit_s: float) -> float:
        """Of a call, from as many samples as fit into the limit."""
        until, samples = time.monotonic() + limit_s, []
        calls = self._calls(self._first(call))
        while len(samples) < LEAST or (time.monotonic() < until and len(samples) < MOST):
            samples.append(self.sample(call, calls))
        return typical(samples)

    def together(self, call: Callable[[], object], limit_s: float, most: Callable[[float], float]) -> float:
        """The same of a call that all ranks make equally often. `most`: a number -> the largest of all
        ranks."""
        once = most(self._first(call))
        calls = self._calls(once)
        count = min(MOST, max(LEAST, round(limit_s / once / calls)))
        return typical([self.sample(call, calls) for _ in range(count)])

    def _first(self, call: Callable[[], object]) -> float:
        """Seconds of the second call. The first call is a warm-up and is not timed."""
        call()
        return max(self.sample(call, 1), 1e-7)

    def _calls(self, once: float) -> int:
        return max(1, round(SAMPLE_S / once))

    def sample(self, call: Callable[[], object], calls: int) -> float:
        """Seconds of one call."""
        begin = self._clock.mark()
        for _ in range(calls):
            call()
        end = self._clock.mark()
        with self._clock.reader(begin, end) as since:
            return since(end) / calls

"""Points: what a machine was measured to take for kernels and collectives, and the constants of Hardware with
which the predictions come nearest.

A point is predicted by the same `Prices` and `Travel` that predict a step, so the error of a fit is that of
the prices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import NamedTuple

from threed.prediction.hardware import SHARES, GroupPlace, Hardware
from threed.prediction.prices import Prices, Travel
from threed.spec.kernels import Kernel

UNITS = "units"
FINEST = 1.003  # a search ends when its factors are nearer to 1


class Computed(NamedTuple):
    """Kernels that one rank has run, while other ranks of the machine did the same: one kernel again and
    again, or a unit as an instruction of the engine, with the host's time for it."""

    kind: str  # products, products in 16 bits, element-wise, attention or UNITS
    what: str
    kernels: tuple[Kernel, ...]
    element: int  # bytes
    backward: bool
    seconds: float

    def predicted_s(self, hardware: Hardware) -> float:
        unit = self.kind == UNITS
        prices = Prices(hardware if unit else replace(hardware, launch_us=0.0), self.element)
        if self.backward:
            seconds = prices.input_half(self.kernels) + prices.weight_half(self.kernels)
        else:
            seconds = prices.forward(self.kernels)
        return seconds + unit * hardware.host_us * 1e-6


class Sent(NamedTuple):
    """A collective or a message, of ranks of one node."""

    kind: str  # collectives, all-to-alls or messages
    what: str
    way: str  # the method of Travel: all_reduce, ring, all_to_all or message
    size: int  # bytes that a rank sends
    ranks: int
    busy: int  # ranks of the machine that do so at the same time
    seconds: float

    def predicted_s(self, hardware: Hardware) -> float:
        travel, place = Travel(hardware), GroupPlace(range(self.ranks), self.ranks)
        if self.way == "message":
            seconds = travel.message(self.size, False)
        else:
            seconds = getattr(travel, self.way)(self.size, place)
        return seconds * self._sharing(hardware)

    def alone_s(self, hardware: Hardware) -> float:
        """Seconds that it would have taken if each rank had a processor."""
        return self.seconds / self._sharing(hardware)

    def _sharing(self, hardware: Hardware) -> float:
        """Ranks that share a processor."""
        return max(1.0, self.busy / hardware.devices) if hardware.waits else 1.0


Point = Computed | Sent


@dataclass
class RankPoints:
    """What one rank has measured. `rates`: speeds, times, sizes and ratios by name (calibration/task)."""

    device: str = ""  # what a GPU calls itself
    computed: list[Computed] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)


def fit(points: Sequence[Point], hardware: Hardware, names: Sequence[str]) -> Hardware:
    """The hardware with other numbers of these names: least squares of the logarithms of predicted over
    measured, by a search along one number after the other. Each kind of points counts alike."""
    kinds = {point.kind: [other for other in points if other.kind == point.kind] for point in points}

    def loss(at: Hardware) -> float:
        return fmean(fmean(math.log(point.predicted_s(at) / point.seconds) ** 2 for point in each)
                     for each in kinds.values())

    best, least, factors = hardware, loss(hardware), dict.fromkeys(names, 1.5)
    while max(factors.values()) > FINEST:
        for name in names:
            for factor in (factors[name], 1 / factors[name]):
                value = getattr(best, name) * factor
                other = replace(best, **{name: min(1.0, value) if name in SHARES else value})
                if (now := loss(other)) < least:
                    best, least = other, now
                    break
            else:
                factors[name] **= 0.5
    return best


def errors(points: Iterable[Point], hardware: Hardware) -> dict[str, tuple[float, float, int]]:
    """Kind -> mean and largest relative error of the predictions, and the number of points."""
    found: dict[str, list[float]] = {}
    for point in points:
        found.setdefault(point.kind, []).append(abs(point.predicted_s(hardware) / point.seconds - 1))
    return {kind: (fmean(each), max(each), len(each)) for kind, each in found.items()}

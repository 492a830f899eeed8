"""Points: what a machine was measured to take for kernels and collectives, and the constants of Hardware with
which the predictions come nearest.

A point is predicted by the same `Prices` and `Travel` that predict a step, so the error of a fit is that of the
prices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from threed.models.kernels import Kernel
from threed.prediction.hardware import SHARES, Hardware, Place
from threed.prediction.kernels import Prices, Travel

FINEST = 1.003  # a search ends when its factors are nearer to 1


class Computed(NamedTuple):
    """Kernels that one rank has run, while other ranks of the machine did the same."""

    kind: str  # products, element-wise, attention or layers
    what: str
    kernels: tuple[Kernel, ...]
    element: int  # bytes
    backward: bool
    seconds: float

    def predicted_s(self, hardware: Hardware) -> float:
        prices = Prices(hardware, self.element)
        if self.backward:
            return prices.input_half(self.kernels) + prices.weight_half(self.kernels)
        return prices.forward(self.kernels)


class Sent(NamedTuple):
    """A collective or a message, of ranks of one node."""

    kind: str  # collectives
    what: str
    way: str  # all_reduce, ring or message
    size: int  # bytes that a rank sends
    ranks: int
    busy: int  # ranks of the machine that do so at the same time
    seconds: float

    def predicted_s(self, hardware: Hardware) -> float:
        travel, place = Travel(hardware), Place(range(self.ranks), self.ranks)
        if self.way == "message":
            seconds = travel.message(self.size, False)
        else:
            seconds = (travel.all_reduce if self.way == "all_reduce" else travel.ring)(self.size, place)
        return seconds * max(1.0, self.busy / hardware.devices if hardware.waits else 1.0)


Point = Computed | Sent


def fit(points: Sequence[Point], hardware: Hardware, names: Sequence[str]) -> Hardware:
    """The hardware with other numbers of these names: least squares of the logarithms of predicted over
    measured, by a search along one number after the other. Each kind of points counts alike."""
    kinds = {point.kind for point in points}

    def loss(at: Hardware) -> float:
        return fmean(fmean(math.log(point.predicted_s(at) / point.seconds) ** 2 for point in points
                           if point.kind == kind) for kind in kinds)

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

"""Turned: how large the steps are of the matrices that a rank has turned, for the metrics.

The device adds up, and the host reads the sum a step later: it waits for no turn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from threed.comm.lanes import Handle, so_far
from threed.devices import device_of


class _Sum(NamedTuple):
    squares: torch.Tensor  # for the host, once it has arrived
    elements: int
    arrives: Handle


class Turned:
    def __init__(self, device: torch.device):
        self._squares, self._elements = torch.zeros((), dtype=torch.float64, device=device), 0
        self._before: _Sum | None = None

    def add(self, squares: torch.Tensor, elements: int) -> None:
        """Add a matrix: the squares of its step at a learning rate of 1, summed up."""
        self._squares.add_(squares)
        self._elements += elements

    def take(self) -> tuple[float, int]:
        """(sum of the squares, elements) since the last call; where the device works behind the host, those
        before it, and at first none."""
        device = self._squares.device
        behind = device_of(device).asynchronous
        squares = torch.empty((), dtype=torch.float64, pin_memory=behind)
        squares.copy_(self._squares, non_blocking=True)
        now = _Sum(squares, self._elements, so_far(device))
        self._squares.zero_()
        self._elements = 0
        told, self._before = (self._before, now) if behind else (now, None)
        if told is None:
            return 0.0, 0
        if not told.arrives.done():  # a step's CLIP comes later, and the host has seen it
            told.arrives.block()
        return float(told.squares), told.elements

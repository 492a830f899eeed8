"""Buffers that are shared in turn: made once, handed out, given back; first in, first out.

A pool waits for nobody. The plan knows which instructions used a buffer before (program/order.py counts as a
pool does), and the one that takes it waits for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable

import torch

from threed.base.quantity import ALIGNMENT
from threed.devices import pinned


class Pool:
    """A fixed number of flat buffers of each size. Buffers of one size are one piece of memory. A smaller
    tensor is the beginning of a buffer of the next larger size; one of a wider dtype takes a buffer of as
    many times more elements."""

    def __init__(self, counts: dict[int, int], dtype: torch.dtype, device: torch.device, pin: bool = False,
                 for_disk: bool = False):
        """`counts`: elements -> how many buffers of that size. `pin`: host memory that a GPU copies from
        and to directly. `for_disk`: host memory that begins at a multiple of ALIGNMENT, as do its buffers if
        their sizes are multiples, too."""
        self.dtype = dtype
        self._free: dict[int, deque[torch.Tensor]] = {}
        for numel, count in counts.items():
            make = aligned if for_disk else flat
            arena = make(numel * count, dtype, device, pin).view(count, numel)
            # `.data` gives each buffer its own version counter. With one for all of them, a lane that writes
            # into one buffer would make autograd refuse, now and then, what it saves of another.
            self._free[numel] = deque(buffer.data for buffer in arena)
        self._sizes = sorted(counts)
        self.first = {numel: free[0] for numel, free in self._free.items()}

    def sample(self, numel: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory of this size, to give shapes to what has no value yet."""
        return self._begin(self.first.__getitem__, numel, dtype or self.dtype)

    def take(self, numel: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A flat buffer: of those that are free the one that was given back first. The plan has counted the
        buffers, so one is always free."""
        return self._begin(lambda size: self._free[size].popleft(), numel, dtype or self.dtype)

    def _begin(self, buffer: Callable[[int], torch.Tensor], numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The beginning of the buffer of a size, as so many numbers of a dtype."""
        own = numel * dtype.itemsize // self.dtype.itemsize
        begin = buffer(self._size(own))[:own]
        return begin if dtype == self.dtype else begin.view(dtype)

    def give(self, buffer: torch.Tensor) -> None:
        """Hand a buffer back."""
        if buffer.dtype != self.dtype:
            buffer = buffer.view(self.dtype)
        size = self._size(buffer.numel())
        self._free[size].append(buffer.as_strided((size,), (1,)))

    def rewind(self) -> None:
        """Order the free buffers as they were made, so that a program gets the same ones in each step."""
        for free in self._free.values():
            if len(free) > 1:
                ordered = sorted(free, key=torch.Tensor.storage_offset)
                free.clear()
                free.extend(ordered)

    def _size(self, numel: int) -> int:
        return self._sizes[bisect_left(self._sizes, numel)]


def flat(numel: int, dtype: torch.dtype, device: torch.device, pin: bool) -> torch.Tensor:
    return pinned.zeros(numel, dtype) if pin else torch.zeros(numel, dtype=dtype, device=device)


def aligned(numel: int, dtype: torch.dtype, device: torch.device, pin: bool) -> torch.Tensor:
    """Flat zeros on the host that begin at a multiple of ALIGNMENT, so that a disk can be read into them
    directly."""
    whole = flat(numel * dtype.itemsize + ALIGNMENT, torch.uint8, device, pin)
    start = -whole.data_ptr() % ALIGNMENT
    return whole[start:start + numel * dtype.itemsize].view(dtype)

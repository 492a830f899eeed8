"""Buffers that are shared in turn: made once, handed out, given back."""

from __future__ import annotations

from collections import deque

import torch

from threed.comm import Handle
from threed.quantity import ALIGNMENT


class Pool:
    """A fixed number of flat tensors of each size. Those of a size are one piece of memory."""

    def __init__(self, counts: dict[int, int], dtype: torch.dtype, device: torch.device, pinned: bool = False):
        """`counts`: elements -> how many buffers of that size. `pinned`: host memory that a GPU copies from and to directly."""
        self._free: dict[int, deque[tuple[torch.Tensor, Handle]]] = {}
        for numel, count in counts.items():
            arena = zeros(numel * count, dtype, device, pinned).view(count, numel)
            self._free[numel] = deque((row, Handle(None)) for row in arena)
        self.first = {numel: free[0][0] for numel, free in self._free.items()}  # to give shapes to what has no value yet

    def take(self, numel: int) -> torch.Tensor:
        """A flat buffer, once those who read it have done so. The plan has counted them: there is one."""
        free = self._free[numel]
        ready = next((index for index, (_, handle) in enumerate(free) if handle.done()), 0)
        buffer, handle = free[ready]
        del free[ready]
        handle.wait()
        return buffer

    def give(self, buffer: torch.Tensor, handle: Handle | None = None) -> None:
        """Hand a buffer back, which may be written once `handle` is done."""
        self._free[buffer.numel()].append((buffer.view(-1), handle or Handle(None)))


def zeros(numel: int, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> torch.Tensor:
    """Flat zeros. On the host they begin at a multiple of ALIGNMENT, so that a disk can be read into them directly."""
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    whole = torch.zeros(numel * dtype.itemsize + ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
    start = -whole.data_ptr() % ALIGNMENT
    return whole[start:start + numel * dtype.itemsize].view(dtype)

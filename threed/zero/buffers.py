"""Buffers that units share at run time: made once, handed out, given back."""

from __future__ import annotations

from collections import deque

import torch

from threed.comm import Handle


class Pool:
    """A fixed number of flat tensors of each size."""

    def __init__(self, counts: dict[int, int], dtype: torch.dtype, device: torch.device):
        """`counts`: elements -> how many buffers of that size."""
        self._free: dict[int, deque[tuple[torch.Tensor, Handle]]] = {
            numel: deque((torch.zeros(numel, dtype=dtype, device=device), Handle(None)) for _ in range(count))
            for numel, count in counts.items()}
        self.first = {numel: free[0][0] for numel, free in self._free.items()}  # to give shapes to what has no value yet

    def take(self, numel: int) -> torch.Tensor:
        """A buffer, once those who read it have done so. The plan has counted them: there is one."""
        free = self._free[numel]
        ready = next((index for index, (_, handle) in enumerate(free) if handle.done()), 0)
        buffer, handle = free[ready]
        del free[ready]
        handle.wait()
        return buffer

    def give(self, buffer: torch.Tensor, handle: Handle | None = None) -> None:
        """Hand a buffer back, which may be written once `handle` is done."""
        self._free[buffer.numel()].append((buffer, handle or Handle(None)))

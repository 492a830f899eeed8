"""Pinned host memory: what a GPU copies from and to directly."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import torch

from threed.devices.settings import EXACT_FROM, version


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Flat zeros on the host in pinned memory, which takes no more than their bytes.

    Before EXACT_FROM torch's own allocator rounds up to a power of two, and no setting ends that: there the
    pages are registered here, and torch's allocator is used where that fails.
    """
    size = numel * dtype.itemsize
    if version() < EXACT_FROM and size >= mmap.PAGESIZE and torch.cuda.is_available():
        try:
            return torch.frombuffer(_Registered(size), dtype=dtype)
        except (MemoryError, OSError):
            pass
    return torch.zeros(numel, dtype=dtype, pin_memory=True)


class _Registered(mmap.mmap):
    """Pages that the GPU's driver has pinned. Tensors over them keep this object alive."""

    address = 0

    def __new__(cls, size: int) -> _Registered:
        pages = super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        if int(_runtime().cudaHostRegister(address, size, 0)):
            raise MemoryError(f"{size} bytes cannot be registered")
        pages.address = address
        return pages

    def __del__(self) -> None:
        """Before the pages go. (torch's allocator waits for copies under way; so does this.)"""
        if self.address and not sys.is_finalizing():
            torch.cuda.synchronize()
            _runtime().cudaHostUnregister(self.address)


def _runtime() -> Any:
    """CUDA's, as torch has loaded it."""
    return torch.cuda.cudart()

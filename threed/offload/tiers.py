"""The disk tier: a file a parameter unit, in a folder a rank, read and written past the page cache.

Files are made, with all their room, before the first step: a disk that is too small says so then. They are removed at the end.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import torch

from threed.errors import InputError, RunError
from threed.quantity import ALIGNMENT, round_up, show_bytes

BLOCK = 16 << 20  # bytes a call


class Disk:
    """Files of one rank. RunError where one cannot be read or written: the last checkpoint stands."""

    def __init__(self, path: str, rank: int):
        self.folder = Path(path) / f"rank-{rank:05d}"
        self._files: dict[str, tuple[int, Path]] = {}
        try:
            if not Path(path).is_dir():
                raise InputError(f"offload.nvme_path={path} is not a folder: make it, on the fastest disk of each machine")
            shutil.rmtree(self.folder, ignore_errors=True)  # of a run that was killed
            self.folder.mkdir()
        except OSError as error:
            raise InputError(f"offload.nvme_path={path} cannot be used: {error.strerror}") from None

    def make(self, name: str, nbytes: int) -> None:
        """A file of `nbytes`, rounded up to ALIGNMENT, with all its room."""
        file, size = self.folder / name, round_up(nbytes, ALIGNMENT)
        flags = os.O_RDWR | os.O_CREAT
        try:
            try:
                descriptor = os.open(file, flags | getattr(os, "O_DIRECT", 0), 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                descriptor = os.open(file, flags, 0o600)  # a file system in memory has no cache to go past
            self._files[name] = descriptor, file
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise InputError(f"{file}: there is no room for {show_bytes(size)} ({error.strerror}): free some, set "
                             "offload.nvme_path to a larger disk, or offload less") from None

    def read(self, name: str, into: torch.Tensor) -> None:
        """Fill aligned host memory from a file."""
        self._transfer(name, into, os.preadv, "read")

    def write(self, name: str, of: torch.Tensor) -> None:
        """Put aligned host memory into a file."""
        self._transfer(name, of, os.pwritev, "written")

    def _transfer(self, name: str, tensor: torch.Tensor, call, done: str) -> None:
        descriptor, file = self._files[name]
        memory, at = memoryview(tensor.numpy()), 0
        while at < len(memory):
            try:
                moved = call(descriptor, [memory[at:at + BLOCK]], at)
            except OSError as error:
                raise RunError(f"{file} could not be {done}: {error.strerror}. The last checkpoint stands; see to "
                               "offload.nvme_path and start again") from None
            if moved <= 0:
                raise RunError(f"{file} could be {done} up to byte {at} of {len(memory)} only: it was cut short while the run "
                               "used it. The last checkpoint stands; see to offload.nvme_path and start again")
            at += moved

    def map(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A file's content as a tensor, without reading it: for checkpoints and initial values, between steps."""
        nbytes = numel * dtype.itemsize
        return torch.from_numpy(np.memmap(self._files[name][1], np.uint8, "r+", shape=(nbytes,))).view(dtype)

    def close(self) -> None:
        """Remove all files."""
        for descriptor, _ in self._files.values():
            os.close(descriptor)
        self._files.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

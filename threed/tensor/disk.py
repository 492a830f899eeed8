"""The disk tier: files of parameter units, read and written past the page cache.

Files are created at their full size before the first step, so a disk that is too small gives an error then.
They have no name in the folder: they disappear with the process, however it ends, and runs can share a
folder. (`df` shows the space that they take, `ls` does not.)
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO

import torch

from threed.base.errors import InputError, RunError
from threed.base.quantity import ALIGNMENT, round_up, show_bytes

BLOCK, FLIGHTS = 16 << 20, 4  # bytes per call, and calls at a time: a disk is fastest with several


class Disk:
    """The files of one rank. RunError where a file cannot be read or written."""

    def __init__(self, path: str, rank: int):
        self._path, self._rank = path, rank
        self._files: dict[str, IO[bytes]] = {}
        self._flights = ThreadPoolExecutor(FLIGHTS, "disk")
        if not Path(path).is_dir():
            raise InputError(f"offload.nvme_path={path} is not a folder: make it, on the fastest disk of "
                             "each machine")

    def make(self, name: str, nbytes: int) -> None:
        """Create a file of `nbytes`, rounded up to ALIGNMENT, and allocate its space."""
        size = round_up(nbytes, ALIGNMENT)
        try:
            # It is open as long as the Disk.
            file = self._files[name] = tempfile.TemporaryFile(dir=self._path, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise InputError(f"offload.nvme_path={self._path} cannot be used: {error.strerror}; give a "
                             "folder in which files can be made") from None
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise InputError(f"offload.nvme_path={self._path} has no room for {show_bytes(size)}, {name} of "
                             f"rank {self._rank} ({error.strerror}): free some, give a folder on a larger "
                             "disk, or offload less") from None
        try:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            fcntl.fcntl(file, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system in memory has no cache to bypass
                raise

    def read(self, name: str, into: torch.Tensor) -> None:
        """Fill aligned host memory from a file."""
        self._transfer(name, into, os.preadv, "read")

    def write(self, name: str, of: torch.Tensor) -> None:
        """Write aligned host memory to a file."""
        self._transfer(name, of, os.pwritev, "written")

    def _transfer(self, name: str, tensor: torch.Tensor, call, done: str) -> None:
        file = self._files[name]  # a reference keeps the file open, even if `close` is called meanwhile
        memory = memoryview(tensor.numpy())  # pyright: ignore[reportArgumentType]

        def block(start: int) -> None:
            at, stop = start, min(start + BLOCK, len(memory))
            while at < stop:
                try:
                    moved = call(file.fileno(), [memory[at:stop]], at)
                except OSError as error:
                    raise RunError(f"{self._called(name)} could not be {done}: {error.strerror}. "
                                   f"{_STANDS}") from None
                if moved <= 0:
                    raise RunError(f"{self._called(name)} could be {done} up to byte {at} of {len(memory)} "
                                   f"only: it was cut short while the run used it. {_STANDS}")
                at += moved

        flights = [self._flights.submit(block, start) for start in range(0, len(memory), BLOCK)]
        wait(flights)  # for all, even if one fails: the caller uses the memory again
        for flight in flights:
            flight.result()

    def map(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A file mapped into memory as a tensor: for checkpoints and initial values, between steps."""
        try:
            content = mmap.mmap(self._files[name].fileno(), numel * dtype.itemsize)
        except ValueError:
            raise RunError(f"{self._called(name)} was cut short while the run used it. {_STANDS}") from None
        return torch.frombuffer(content, dtype=dtype)

    def _called(self, name: str) -> str:
        return f"offload.nvme_path={self._path}: {name} of rank {self._rank}"

    def close(self) -> None:
        """Close all files. A file under way is closed, and so deleted, after its last transfer."""
        self._files.clear()
        self._flights.shutdown(wait=False)


_STANDS = "The last checkpoint is intact. Check the disk, then start again"

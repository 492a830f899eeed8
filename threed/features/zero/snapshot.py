"""Snapshot: a copy on the host of the part of a parameter unit that one rank writes to a checkpoint. The copy
is taken while the next step runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from threed.comm.lanes import DONE, Handle, Job, so_far


class Snapshot:
    """`rows`: [kinds, elements] in fp32 on the host, one row for each tensor that a checkpoint keeps."""

    def __init__(self, rows: torch.Tensor, device: torch.device):
        self.rows, self._device = rows, device
        self._taken = threading.Event()
        self._error: Exception | None = None  # why there is no copy
        self._copied: Handle = DONE  # the end of the copies

    def begin(self, parts: Callable[[], Sequence[torch.Tensor]]) -> Job | None:
        """The job that copies a part into each row; there may be fewer parts than rows. None where the parts
        cannot be had: `wait` hears of that error, as of those of the job."""
        self._taken.clear()
        self._error = None
        try:
            now = parts()  # later the optimizer's state may be elsewhere
        except Exception as error:
            self._fail(error)
            return None
        return lambda: self._take(now)

    @torch.no_grad()
    def _take(self, parts: Sequence[torch.Tensor]) -> None:
        try:
            for row, part in zip(self.rows, parts, strict=False):
                row.copy_(part, non_blocking=True)
            self._copied = so_far(self._device)
        except Exception as error:
            self._fail(error)
        self._taken.set()

    def _fail(self, error: Exception) -> None:
        """There is no copy: the checkpoint fails, the run goes on."""
        self._error = error
        self._taken.set()

    def wait(self) -> None:
        """Block the host until the copy is complete. Raises the copy's error: half a copy must not be
        written."""
        self._taken.wait()
        if self._error is not None:
            raise self._error
        self._copied.block()

"""Snapshot: a copy on the host of what one rank writes of a parameter unit into a checkpoint, taken beside
the next step."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch


class Snapshot:
    """`rows`: [kinds, elements] in fp32 on the host, one row for each tensor that a checkpoint keeps."""

    def __init__(self, rows: torch.Tensor, device: torch.device):
        self.rows, self._device = rows, device
        self._taken = threading.Event()
        self._error: Exception | None = None  # why there is no copy
        self._copied: torch.cuda.Event | None = None  # the end of the copies on a GPU

    def begin(self) -> None:
        """The next copy is about to be taken."""
        self._taken.clear()
        self._error = None

    @torch.no_grad()
    def take(self, parts: Iterable[torch.Tensor]) -> None:
        """Copy a part into each row: the job of a lane. There may be fewer parts than rows."""
        try:
            for row, part in zip(self.rows, parts, strict=False):
                row.copy_(part, non_blocking=True)
            if self._device.type == "cuda":
                self._copied = torch.cuda.Event()
                self._copied.record()
        except Exception as error:  # it costs the checkpoint, not the run: `wait` raises it
            self._error = error
        finally:
            self._taken.set()

    def wait(self) -> None:
        """Return, on the host, when the copy is complete. An error of the copy is raised: half a copy must
        not be written."""
        self._taken.wait()
        if self._error is not None:
            raise self._error
        if self._copied is not None:
            self._copied.synchronize()

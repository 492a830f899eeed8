"""The data of a program: each micro-batch is read once, and copied to the device once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from threed.devices import device_of
from threed.program.instruction import Instruction, Op
from threed.tensor.context import Batch
from threed.tensor.documents import Documents
from threed.tensor.places import Places

READERS = (Op.FORWARD, Op.RECOMPUTE)


class Feed:
    """Hands out the micro-batches of the program under way, and forgets each after its last reader. The host
    reads the next one while a GPU computes with this one."""

    def __init__(self, device: torch.device, places: Callable[[Documents | None], Places] | None = None):
        """`places`: documents of sequences -> the places of this rank's tokens; None: it has all."""
        self.device, self.places = device, places
        self.read: Callable[[int], Batch] = _nothing  # micro-batch -> its data on the host
        self._here: dict[int, Batch] = {}
        self._readers: Counter[int] = Counter()  # micro-batch -> instructions that will still read it
        self._next: dict[int, int] = {}  # micro-batch -> the one that is needed for the first time after it

    def begin(self, read: Callable[[int], Batch], program: Sequence[Instruction]) -> None:
        self.read, self._here = read, {}
        self._readers = Counter(item.microbatch for item in program if item.op in READERS)
        order = list(self._readers)
        self._next = dict(zip(order, order[1:], strict=False))

    def take(self, microbatch: int) -> Batch:
        """The data of a micro-batch, for one of its readers."""
        batch = self._load(microbatch)
        self._readers[microbatch] -= 1
        if not self._readers[microbatch]:
            del self._here[microbatch]
        return batch

    def ahead(self, microbatch: int) -> None:
        """Called when a reader of a micro-batch has been issued: on a GPU, read and copy the next one."""
        if device_of(self.device).asynchronous and microbatch in self._next:
            self._load(self._next.pop(microbatch))

    def _load(self, microbatch: int) -> Batch:
        if microbatch not in self._here:
            self._here[microbatch] = self._own(self.read(microbatch)).to(self.device)
        return self._here[microbatch]

    def _own(self, batch: Batch) -> Batch:
        """What this rank has of it."""
        places = self.places(batch.documents) if self.places is not None else None
        return batch if places is None or places.count == 1 else batch.at(places)


def _nothing(microbatch: int) -> Batch:
    raise AssertionError("no data was set for this program")

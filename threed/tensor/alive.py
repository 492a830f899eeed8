"""Storages that a thread has made and that are still alive, whoever holds them: autograd's graph, a pool, a
queue.

Every operation of the thread is seen as it is dispatched. A storage is counted from the operation that made
it until its last owner lets go of it, so nothing that the plan believes takes part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """`peak`: the most bytes that were alive after an operation; set it to `bytes()` to begin anew."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        # (a storage whose weak reference is held keeps its number)
        self._found: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self._inside = False  # a kernel that counts as one operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs))
                  if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        made = False
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage._cdata not in before:
                    what = f"{func} {list(tensor.shape)} {tensor.dtype}"
                    self._found.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes(), what))
                    made = True
        if made and not self._inside:
            self.peak = max(self.peak, self.bytes())
        return result

    @contextmanager
    def one_kernel(self) -> Iterator[None]:
        """Within the context, operations are those of one compiled kernel: what they hold in between needs no
        memory."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def storages(self) -> dict[int, int]:
        """Number -> bytes."""
        for number in [number for number, (ref, *_) in self._found.items() if ref.expired()]:
            del self._found[number]
        return {number: size for number, (_, size, _) in self._found.items()}

    def bytes(self) -> int:
        return sum(self.storages().values())

    def describe(self, *, but: Any = ()) -> str:
        """What is alive, largest first."""
        rows = sorted(((size, what) for number, (ref, size, what) in self._found.items()
                       if not ref.expired() and number not in but), reverse=True)
        return "\n".join(f"{size:>10}  {what}" for size, what in rows)

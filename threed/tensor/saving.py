"""What autograd saves in forward: tensors, or a way to get them back.

Two kinds of tensors are not saved themselves. A tensor in memory that is reused before backward (the gathered
parameters of a unit under ZeRO-3) is saved as its place in that memory. A tensor that is cheap to compute
again (the output of a norm) is saved as a recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


class UnsavedMemory(NamedTuple):
    """Memory whose tensors are not saved themselves."""

    start: torch.Tensor  # the memory, as a flat tensor
    again: Callable[[], torch.Tensor]  # returns memory with the same content at the time of backward


class _Part(NamedTuple):
    again: Callable[[], torch.Tensor]
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Recipe(NamedTuple):
    make: Callable[[], torch.Tensor]


class SavingPolicy:
    """Decides how each tensor of a rank is saved. `pieces`: the kinds of tensors that are computed again
    (activation.pieces)."""

    def __init__(self, pieces: Sequence[str] = ()):
        self.pieces = frozenset(pieces)
        self._recipes: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []
        self._without_parameters = False

    def again(self, piece: str) -> bool:
        """Whether the current forward saves recipes for tensors of this kind."""
        return piece in self.pieces and torch.is_grad_enabled()

    @contextmanager
    def instead(self, piece: str, tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> Iterator[None]:
        """Inside this context, an operation that would save `tensor` for its backward saves `make`, which
        computes it again."""
        # The tensor is held until the context ends, so that no other tensor gets its address.
        before = len(self._recipes)
        if self.again(piece):
            self._recipes.append((tensor, make))
        try:
            yield
        finally:
            del self._recipes[before:]

    def through(self, piece: str, function: Callable[..., T], *inputs: Any) -> T:
        """function(*inputs), which saves only its inputs if pieces of this kind are computed again."""
        if not self.again(piece):
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore

    def keeping(self, places: Sequence[UnsavedMemory]) -> AbstractContextManager[Any]:
        """The context of a unit's forward."""
        return self._hooked([*places]) if places or self.pieces else nullcontext()

    @contextmanager
    def _hooked(self, places: list[UnsavedMemory]) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: self._pack(t, places), self._unpack):
            yield
        places.clear()  # autograd holds the hooks until backward

    @contextmanager
    def without_parameters(self) -> Iterator[None]:
        """Within the context, an operation gets no values of parameters that were saved as their place: it
        needs their shapes alone, and their memory may hold others by now."""
        self._without_parameters = True
        try:
            yield
        finally:
            self._without_parameters = False

    def _pack(self, tensor: torch.Tensor, places: Sequence[UnsavedMemory]) -> torch.Tensor | _Part | _Recipe:
        for output, make in self._recipes:
            if _view_of(tensor) == _view_of(output):
                return _Recipe(make)
        for place in places:
            offset = _offset(tensor, place.start)
            if 0 <= offset < place.start.nbytes:
                return _Part(place.again, offset // tensor.itemsize, tensor.shape, tensor.stride(),
                             tensor.dtype, tensor.device)
        # An operation's own result would hold the operation, which holds what it saves: a ring that nobody
        # frees where backward runs in two halves and does not free what it has used.
        return tensor.detach()

    def _unpack(self, kept: torch.Tensor | _Part | _Recipe) -> torch.Tensor:
        if isinstance(kept, _Recipe):
            with torch.no_grad():
                return kept.make()
        if isinstance(kept, _Part):
            if self._without_parameters:
                return torch.zeros((), dtype=kept.dtype, device=kept.device).expand(kept.size)
            whole = kept.again()
            return whole.as_strided(kept.size, kept.stride, whole.storage_offset() + kept.offset)
        return kept


def _offset(tensor: torch.Tensor, start: torch.Tensor) -> int:
    """Bytes from the start of some memory to a tensor; -1 in other memory. (Tensors without memory have
    storages, but no addresses.)"""
    if tensor.untyped_storage()._cdata != start.untyped_storage()._cdata:
        return -1
    return int(tensor.storage_offset() * tensor.itemsize - start.storage_offset() * start.itemsize)


def _view_of(tensor: torch.Tensor) -> object:
    """The memory of a tensor, and what of it the tensor is. (Tensors without memory have storages, too.)"""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()

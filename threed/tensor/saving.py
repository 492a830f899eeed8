"""What autograd keeps of a forward: tensors, or how to have them again.

Two kinds of tensors are not kept as such. One that lies in memory which will hold other things until backward
(the parameters of a unit under ZeRO-3) is kept as its place there. One that is cheap to compute again (a
norm's output) is kept as its recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint


class Place(NamedTuple):
    """Memory in which tensors are not kept as such."""

    start: torch.Tensor  # flat
    again: Callable[[], torch.Tensor]  # the same content at the time of backward, wherever it is then


class _Part(NamedTuple):
    again: Callable[[], torch.Tensor]
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Recipe(NamedTuple):
    make: Callable[[], torch.Tensor]


class Saving:
    """One a rank. `pieces`: the kinds of tensors that are computed again (activation.pieces)."""

    def __init__(self, pieces: Sequence[str] = ()):
        self.pieces = frozenset(pieces)
        self._recipes: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []

    def again(self, piece: str) -> bool:
        """Whether tensors of this kind are computed again, in the forward under way."""
        return piece in self.pieces and torch.is_grad_enabled()

    @contextmanager
    def instead(self, piece: str, tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> Iterator[None]:
        """Inside, an operation that would keep `tensor` for its backward keeps `make`, which computes it
        again."""
        # The tensor is held until the end: as long as it lives, no other has its address.
        before = len(self._recipes)
        if self.again(piece):
            self._recipes.append((tensor, make))
        try:
            yield
        finally:
            del self._recipes[before:]

    def through(self, piece: str, function: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
        """function(*inputs); of pieces of this kind nothing is kept but the inputs."""
        if not self.again(piece):
            return function(*inputs)
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore

    def keeping(self, places: Sequence[Place]) -> AbstractContextManager[Any]:
        """The context of a unit's forward."""
        return torch.autograd.graph.saved_tensors_hooks(lambda t: self._pack(t, places), _unpack) \
            if places or self.pieces else nullcontext()

    def _pack(self, tensor: torch.Tensor, places: Sequence[Place]) -> torch.Tensor | _Part | _Recipe:
        for made, make in self._recipes:
            if (
                tensor.data_ptr() == made.data_ptr()
                and tensor.shape == made.shape
                and tensor.stride() == made.stride()
            ):
                return _Recipe(make)
        for place in places:
            offset = tensor.data_ptr() - place.start.data_ptr()
            if 0 <= offset < place.start.nbytes and tensor.device == place.start.device:
                return _Part(place.again, offset // tensor.itemsize, tensor.shape, tensor.stride())
        return tensor


def _unpack(kept: torch.Tensor | _Part | _Recipe) -> torch.Tensor:
    if isinstance(kept, _Recipe):
        with torch.no_grad():
            return kept.make()
    if isinstance(kept, _Part):
        whole = kept.again()
        return whole.as_strided(kept.size, kept.stride, whole.storage_offset() + kept.offset)
    return kept

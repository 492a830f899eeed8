"""Samples of a user's data set: a map-style one, whose items are (inputs, targets).

Sample i of a run is item p(i) of the data set, p a permutation in each epoch that the seed decides, as for
tokens (data/samples): it depends on nothing else, so a run goes on from any sample on any mesh.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from threed.base.errors import InputError, ThreedError, line_of
from threed.base.hashing import shuffled


class Samples:
    """A data set in the order of a run. `seed`: None: the order of the data set."""

    def __init__(self, items: Any, seed: int | None, dtype: torch.dtype = torch.float32):
        """`dtype`: of compute; floating-point inputs are converted to it."""
        self.items, self._seed, self._dtype = items, seed, dtype
        self.num_windows = self.num_tokens = len(items)
        self._first = item_of(items, 0)

    def batch(self, which: Iterable[int]) -> tuple[Any, Any]:
        """Inputs and targets of some samples, stacked. InputError where an item is not like item 0."""
        inputs, targets = stacked(self._item(index) for index in which)
        return tree_map(self._cast, inputs), targets

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def count(self, start: int, stop: int) -> int:
        return stop - start

    def _item(self, index: int) -> tuple[Any, Any]:
        epoch, place = divmod(index, len(self.items))
        if self._seed is not None:
            place = shuffled(place, len(self.items), self._seed, epoch)
        item = item_of(self.items, place)
        if _shapes(item) != _shapes(self._first):
            raise InputError(f"item {place} of the data set has {_text(item)}, and item 0 "
                             f"{_text(self._first)}: all items need the same shapes, dtypes and structure")
        return item


def checked_items(items: Any, what: str) -> None:
    """InputError where something is not a map-style data set with an item."""
    if not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        raise InputError(f"{what} is a {type(items).__name__}: give a map-style data set, with __len__ and "
                         "__getitem__(index) -> (inputs, targets)")
    if not len(items):
        raise InputError(f"{what} has no items")


def item_of(items: Any, index: int) -> tuple[Any, Any]:
    """(inputs, targets) of an item, trees of tensors."""
    try:
        item = items[index]
    except ThreedError:
        raise
    except Exception as error:
        raise InputError(f"item {index} of the data set: {type(error).__name__}: {error}{line_of(error)}"
                         ) from error
    if not (isinstance(item, tuple | list) and len(item) == 2):
        raise InputError(f"item {index} of the data set is a {type(item).__name__}"
                         f"{f' of {len(item)}' if isinstance(item, tuple | list) else ''}: it must be a "
                         "pair, (inputs, targets)")
    inputs, targets = item
    return _tensors(inputs, index), _tensors(targets, index)


def _tensors(tree: Any, index: int) -> Any:
    leaves, structure = tree_flatten(tree)
    return tree_unflatten([_tensor(leaf, index) for leaf in leaves], structure)


def _tensor(leaf: Any, index: int) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    if isinstance(leaf, np.ndarray | np.generic):
        return torch.as_tensor(np.asarray(leaf))
    if isinstance(leaf, bool | int | float):
        return torch.tensor(leaf)
    raise InputError(f"item {index} of the data set holds a {type(leaf).__name__}: only tensors, arrays and "
                     "numbers can be stacked, in tuples, lists and dictionaries")


def stacked(items: Iterable[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Items -> (inputs, targets), each tensor with a first dim more: the sample."""
    flat, structure = [], None
    for item in items:
        leaves, structure = tree_flatten(item)
        flat.append(leaves)
    assert structure is not None
    return tree_unflatten([torch.stack(column) for column in zip(*flat, strict=True)], structure)


def _shapes(item: Any) -> tuple[Any, ...]:
    leaves, structure = tree_flatten(item)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]


def _text(item: Any) -> str:
    return ", ".join(f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
                     for leaf in tree_flatten(item)[0])

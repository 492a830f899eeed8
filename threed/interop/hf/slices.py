"""Slices: which part of a parameter of ours a tensor of transformers is.

A view is a function from our whole parameter, in the shape `stored`, or from one expert's part of it, to the
parts that are their tensors. A part shares our parameter's memory, so one function serves both directions:
import copies their tensors into the parts, and export copies the parts out of them.

Rotary positions need no permutation: threed and transformers pair the same numbers of a head, (i, i + E/2).

Shapes: V vocabulary, D hidden, F hidden layer of an MLP, K key and value heads, G queries of each,
E head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from threed.schema import ModelConfig


class TensorPart(NamedTuple):
    """One tensor of theirs, as a part of our parameter."""

    values: torch.Tensor  # a view of our parameter, whose elements are in the order of their tensor
    shape: tuple[int, ...]  # of their tensor


View = Callable[[torch.Tensor, ModelConfig], list[TensorPart]]


def same(ours: torch.Tensor, model: ModelConfig) -> list[TensorPart]:
    return [_as_is(ours)]


def vocabulary(ours: torch.Tensor, model: ModelConfig) -> list[TensorPart]:
    """[V padded, D] -> [V, D]."""
    return [_as_is(ours[:model.vocab])]


def transposed(ours: torch.Tensor, model: ModelConfig) -> list[TensorPart]:
    """A matrix as GPT-2's Conv1D has it: [outputs, inputs] -> [inputs, outputs]."""
    return [_as_is(ours.t())]


def gate_and_up(ours: torch.Tensor, model: ModelConfig) -> list[TensorPart]:
    """[2, F, D] -> twice [F, D]."""
    return [_as_is(ours[0]), _as_is(ours[1])]


def by_group(ours: torch.Tensor, model: ModelConfig) -> list[TensorPart]:
    """Rows sorted by key and value head, G queries, key, value -> queries, keys, values: [K (G + 2) E, ...]
    -> [K G E, ...] and twice [K E, ...]."""
    size, heads = model.head_size, model.num_kv_heads
    queries, rest = model.heads // heads, ours.shape[1:]
    each = ours.view(heads, queries + 2, size, *rest)
    rows = heads * size
    return [TensorPart(each[:, :queries], (rows * queries, *rest)),
            TensorPart(each[:, queries], (rows, *rest)), TensorPart(each[:, queries + 1], (rows, *rest))]


def by_kind(ours: torch.Tensor, model: ModelConfig) -> list[TensorPart]:
    """GPT-2's c_attn, all queries, then all keys, then all values, as Conv1D has it: [K 3 E, D] -> [D, 3 K
    E]; of biases [K 3 E] -> [3 K E]."""
    each = ours.view(model.heads, 3, model.head_size, *ours.shape[1:])
    if ours.dim() == 1:
        return [TensorPart(each.permute(1, 0, 2), (len(ours),))]
    return [TensorPart(each.permute(3, 1, 0, 2), (ours.shape[1], len(ours)))]


def _as_is(values: torch.Tensor) -> TensorPart:
    return TensorPart(values, tuple(values.shape))


def blocks(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, shape) of boxes of at most `limit` elements, each contiguous in row-major order, that together
    are an array of this shape, in order."""
    if not shape or math.prod(shape) <= limit:
        yield tuple(0 for _ in shape), shape
        return
    count, rest = shape[0], shape[1:]
    row = math.prod(rest)
    if row > limit and rest:
        for index in range(count):
            for offset, size in blocks(rest, limit):
                yield (index, *offset), (1, *size)
        return
    rows = max(1, limit // row)
    for first in range(0, count, rows):
        yield (first, *(0 for _ in rest)), (min(rows, count - first), *rest)

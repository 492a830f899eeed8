"""Rows of a table, such as the word embedding: their gradients go into the sum row by row, without a tensor
of the whole table's size (pieces.Pieces.add_rows).

Shapes: S sequence, B micro-batch, V rows of the table of this rank, H their width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from threed.tensor.pieces import Pieces


class PutsOff(Protocol):
    """As layers.WeightGrads."""

    put_off: list[Callable[[], Any]] | None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor, whole: bool,
                by: tuple[PutsOff, Pieces]):
        ctx.weight, ctx.by = weight, by
        ctx.save_for_backward(ids)
        if whole:
            return F.embedding(ids, weight)
        elsewhere = ids >= len(weight)
        return F.embedding(ids.masked_fill(elsewhere, 0), weight).masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        (ids,), (weight_grads, pieces) = ctx.saved_tensors, ctx.by
        grad, add = grads[0].detach(), getattr(ctx.weight, "add_rows", None)
        if add is None:  # a parameter whose gradient autograd accumulates
            made = torch.zeros_like(ctx.weight)
            pieces.add_rows(made, ids, grad)
            return made, None, None, None
        if weight_grads.put_off is None:
            add(ids, grad, pieces)
        else:
            weight_grads.put_off.append(lambda: add(ids, grad, pieces))
        return None, None, None, None


def rows_of(weight: torch.Tensor, ids: torch.Tensor, whole: bool,
            by: tuple[PutsOff, Pieces]) -> torch.Tensor:
    """[V, H], [S, B] -> [S, B, H]. Unless the table is `whole`: zeros for ids from V on. `by`: what puts off
    gradients of weights, and what adds these up."""
    return _Rows.apply(weight, ids, whole, by)  # pyright: ignore[reportReturnType]

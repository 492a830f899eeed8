"""Heads: ranks that share each sequence exchange tokens for heads (Ulysses, Jacobs et al. 2023).

    queries, keys and values of this rank's tokens, all heads  --all-to-all over cp-->  of all tokens, in the
    order of the sequence, some of the heads
    attention, as on a rank that has whole sequences
    its output for all tokens, some of the heads  --all-to-all over cp-->  for this rank's tokens, all heads

A rank of cp has a run of the key heads of its tp rank, with their queries: those are sorted by key head
(models/layers/attention), so that one message has the three. Each way is the backward of the other. Nothing
is added up, and nothing is kept.

Shapes: B micro-batch, s the tokens of this rank, S those of the sequence, C key heads of a tp rank, c those
of this one, C / cp; g numbers of each of these by what they are: its queries, its key, its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from threed.spec.deal import Deal
from threed.tensor.keys import Shared
from threed.tensor.places import in_order


def to_heads(x: torch.Tensor, sizes: Sequence[int], shared: Shared) -> tuple[torch.Tensor, ...]:
    """[s, B, C, sum of the sizes, E] -> of each size [S, B, c, size, E], in memory of its own."""
    return _ToHeads.apply(x, tuple(sizes), shared)  # pyright: ignore[reportReturnType]


def to_tokens(x: torch.Tensor, shared: Shared) -> torch.Tensor:
    """[S, B, c, g, E] -> [s, B, C, g, E]."""
    return _ToTokens.apply(x, shared)  # pyright: ignore[reportReturnType]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sizes: tuple[int, ...], shared: Shared):
        ctx.shared = shared
        return _heads(x, sizes, shared)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return _tokens(grads, ctx.shared), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shared: Shared):
        ctx.shared = shared
        return _tokens((x,), shared)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        (grad,) = grads
        return _heads(grad, (grad.shape[3],), ctx.shared)[0], None


def _heads(x: torch.Tensor, sizes: tuple[int, ...], shared: Shared) -> tuple[torch.Tensor, ...]:
    leaves = x.unflatten(2, (shared.places.count, -1)).movedim(2, 0)
    parts, deals = _exchanged(leaves, shared).split(sizes, -2), [_deal(shared)]
    return tuple(in_order(part.unbind(), deals, 0) for part in parts)


def _tokens(parts: Sequence[torch.Tensor], shared: Shared) -> torch.Tensor:
    ranks, (length, size, heads, _, width) = shared.places.count, parts[0].shape
    sizes = [part.shape[3] for part in parts]
    leaves = parts[0].new_empty(ranks, length // ranks, size, heads, sum(sizes), width)
    for part, into in zip(parts, leaves.split(sizes, -2), strict=True):
        for rows, runs in zip(into, _deal(shared), strict=True):
            for piece, run in zip(rows.split([*map(len, runs)]), runs, strict=True):
                piece.copy_(part[run.start:run.stop])
    return _exchanged(leaves, shared).movedim(0, 2).flatten(2, 3)


def _exchanged(leaves: torch.Tensor, shared: Shared) -> torch.Tensor:
    """[ranks, ...]: a part for each rank -> each rank's part for this one."""
    leaves, each = leaves.contiguous(), [1] * len(leaves)
    came = torch.empty_like(leaves)
    shared.group.exchange(came, leaves, each, each).wait()
    return came


def _deal(shared: Shared) -> Deal:
    """The tokens of each rank."""
    (deal,) = shared.places.deals
    return deal

"""Attention to keys and values that have been gathered before (parallel.cp_overlap): the arithmetic of
`keys.attend_to_all`, without its messages.

    kv of each rank of cp  --GATHER, an instruction-->  of all ranks, in the order of the ranks
    the gradient of that, in fp32  --REDUCE, an instruction-->  of this rank's kv

Shapes as in `keys`.
"""

from __future__ import annotations

from typing import Any

import torch

from threed.tensor.documents import Documents
from threed.tensor.keys import Rectangles, Shared, of_all, of_each
from threed.tensor.places import Places


def attend_to_gathered(q: torch.Tensor, every: torch.Tensor, shared: Shared,
                       documents: Documents | None) -> torch.Tensor:
    """Causal attention, inside documents where there are some: [B, N, s, E], keys and values of the ranks one
    after the other, [2 ranks, B, K, s, E] -> [B, N, s, E]. The gradient of `every` is in fp32."""
    return _ToGathered.apply(q, every, shared, documents)  # pyright: ignore[reportReturnType]


class _ToGathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, every: torch.Tensor, shared: Shared, documents: Documents | None):
        ctx.places, ctx.work = shared.places, Rectangles.of(q, every, shared, documents)
        out, kept = ctx.work.forward(q, _whole(every, ctx.places))
        ctx.save_for_backward(q, every, out, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        q, every, out, *kept = ctx.saved_tensors
        of_q, sums = ctx.work.backward(grads[0], q, _whole(every, ctx.places), out, kept)
        return of_q, of_each(sums, ctx.places).flatten(0, 1), None, None


def _whole(every: torch.Tensor, places: Places) -> torch.Tensor:
    return of_all(every.unflatten(0, (places.count, 2)), places)

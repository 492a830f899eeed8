"""Softmax: the running one of a vocabulary that is computed tile by tile (model.tile_linears).

There is a running softmax. Each tile passes a tensor [2, S, B] in fp32 to the next: the log of the sum of
exponentials so far, and the label's logit (0 before the tile with the label). Each tp rank has both for its
own part of the vocabulary; after the last tile they are combined over tp.

Shapes as in `layers`: S sequence, B micro-batch, V the rank's part of the vocabulary (of a tile).
"""

from __future__ import annotations

from typing import Any

import torch

from threed.comm.group import Group

# The logit of padding. It is finite: a tile may be all padding, and differences of logits must not be NaN.
MASKED = -1e30


def _place(labels: torch.Tensor, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each label among the ids from `first` on, [..., 1], and whether it has one there (else
    the column is 0)."""
    here = (labels >= first) & (labels < first + width)
    return (labels - first).masked_fill(~here, 0).unsqueeze(-1), here


def add_at(values: torch.Tensor, index: torch.Tensor, what: torch.Tensor) -> torch.Tensor:
    """Add to one column of each row of [T, V], in place. (scatter_add_ would use atomics on a GPU.)"""
    rows = torch.arange(len(values), device=values.device)
    values[rows, index.squeeze(-1)] += what
    return values


class _AddToSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, before: torch.Tensor | None, logits: torch.Tensor, labels: torch.Tensor, first: int,
                vocab: int):
        wide, width = logits.float(), logits.shape[-1]
        wide[..., min(max(vocab - first, 0), width):] = MASKED
        index, here = _place(labels, first, width)
        chosen = wide.gather(-1, index).squeeze(-1) * here
        largest = wide.amax(-1)
        exponents = wide.sub_(largest.unsqueeze(-1)).exp_()
        total = exponents.sum(-1)
        softmax, log_sum = exponents.div_(total.unsqueeze(-1)), largest + total.log()
        after = log_sum if before is None else torch.logaddexp(before[0], log_sum)
        kept = None if before is None else (before[0] - after).exp()  # the share of the tiles before
        ctx.save_for_backward(softmax, here, index, (log_sum - after).exp(), kept)
        ctx.dtype = logits.dtype
        return torch.stack([after, chosen if before is None else before[1] + chosen])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        softmax, here, index, share, kept = ctx.saved_tensors
        of_sum, of_label = grads[0]
        grad = (softmax * (of_sum * share).unsqueeze(-1)).contiguous()
        add_at(grad.flatten(0, 1), index.flatten(0, 1), (of_label * here).flatten())
        before = None if kept is None else torch.stack([of_sum * kept, of_label])
        return before, grad.to(ctx.dtype), None, None, None


class _CrossEntropyOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, running: torch.Tensor, group: Group):
        log_sum, label = running[0], running[1].clone()
        largest = log_sum.clone()
        group.all_reduce(largest, "max").wait()
        total = (log_sum - largest).exp()
        group.all_reduce(total).wait()
        group.all_reduce(label).wait()
        whole = largest + total.log()
        ctx.save_for_backward((log_sum - whole).exp())  # this rank's share
        return whole - label

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        (share,) = ctx.saved_tensors
        return torch.stack([grads[0] * share, -grads[0]]), None


def add_to_softmax(before: torch.Tensor | None, logits: torch.Tensor, labels: torch.Tensor, first: int,
                   vocab: int) -> torch.Tensor:
    """The running softmax [2, S, B] after one more tile. It may overwrite `logits` [S, B, V], which are of
    the ids from `first` on; `labels` are [S, B]. `before`: None for the first tile. Ids from `vocab` on are
    padding and are masked."""
    return _AddToSoftmax.apply(before, logits, labels.contiguous(), first, vocab)  # pyright: ignore[reportReturnType]


def cross_entropy_of(running: torch.Tensor, group: Group) -> torch.Tensor:
    """Loss of each token [S, B] in fp32, from the running softmax after the last tile, combined over tp."""
    return _CrossEntropyOf.apply(running, group)  # pyright: ignore[reportReturnType]

"""Cross entropy without a copy of the logits in fp32, and over a vocabulary that is computed tile by tile.

**In chunks** (model.loss_chunk): the logits are kept in the dtype of compute, and what is computed in fp32 is
of a few tokens at a time. Forward sums exponentials, backward computes them again and overwrites the logits
with their gradient. Every number is computed as without chunks, so losses and gradients have the same bits.

**In tiles** (model.tile_linears), there is a running softmax. Each tile passes a tensor [2, S, B] in fp32 to
the next: the log of the sum of exponentials so far, and the label's logit (0 before the tile with the label).
Each tp rank has both for its own part of the vocabulary; after the last tile they are combined over tp.

Shapes as in `layers`: S sequence, B micro-batch, V the rank's part of the vocabulary (of a tile).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from threed.comm import Group

# The logit of padding. It is finite: a tile may be all padding, and differences of logits must not be NaN.
MASKED = -1e30


class _CrossEntropyInChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, vocab: int, chunk: int, group: Group):
        width = logits.shape[-1]
        first = group.rank() * width
        logits[..., min(max(vocab - first, 0), width):] = -torch.inf
        largest = _largest(logits)
        group.all_reduce(largest, "max").wait()
        total, label = torch.empty_like(largest), torch.empty_like(largest)
        for part, wide in _shifted(logits, largest, chunk):
            index, here = _place(labels.flatten()[part], first, width)
            label.view(-1)[part] = wide.gather(-1, index).squeeze(-1).masked_fill_(~here, 0.0)
            total.view(-1)[part] = wide.exp_().sum(-1)
        group.all_reduce(label).wait()
        group.all_reduce(total).wait()
        ctx.save_for_backward(logits, labels, largest, total)
        ctx.first, ctx.chunk = first, chunk
        return total.log() - label

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        logits, labels, largest, total = ctx.saved_tensors
        rows, of_loss = logits.flatten(0, 1), grads[0].flatten()
        for part, wide in _shifted(logits, largest, ctx.chunk):
            index, here = _place(labels.flatten()[part], ctx.first, logits.shape[-1])
            softmax = wide.exp_().div_(total.view(-1)[part].unsqueeze(-1))
            _add_at(softmax, index, -here.to(softmax.dtype))
            rows[part] = softmax.mul_(of_loss[part].unsqueeze(-1))  # they are not needed again
        return logits, None, None, None, None


def _largest(logits: torch.Tensor) -> torch.Tensor:
    """[S, B, V] -> [S, B], in fp32 where the logits have 16 bits."""
    return logits.amax(-1).to(torch.promote_types(logits.dtype, torch.float32))


def _shifted(logits: torch.Tensor, largest: torch.Tensor, chunk: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """For each chunk of the tokens of [S, B, V]: which they are, and their logits less the largest, in fp32,
    [chunk, V]."""
    rows, most = logits.flatten(0, 1), largest.flatten()
    for start in range(0, len(rows), chunk):
        part = slice(start, start + chunk)
        yield part, rows[part] - most[part].unsqueeze(-1)


def _place(labels: torch.Tensor, first: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each label among the ids from `first` on, [..., 1], and whether it has one there (else
    the column is 0)."""
    here = (labels >= first) & (labels < first + width)
    return (labels - first).masked_fill(~here, 0).unsqueeze(-1), here


def _add_at(values: torch.Tensor, index: torch.Tensor, what: torch.Tensor) -> torch.Tensor:
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
        grad = softmax * (of_sum * share).unsqueeze(-1)
        _add_at(grad.flatten(0, 1), index.flatten(0, 1), (of_label * here).flatten())
        before = None if kept is None else torch.stack([of_sum * kept, of_label])
        return before, grad.to(ctx.dtype), None, None, None


class _AddToSoftmaxInChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, before: torch.Tensor | None, logits: torch.Tensor, labels: torch.Tensor, first: int,
                vocab: int, chunk: int):
        width = logits.shape[-1]
        logits[..., min(max(vocab - first, 0), width):] = max(MASKED, torch.finfo(logits.dtype).min)
        largest = _largest(logits)
        total, chosen = torch.empty_like(largest), torch.empty_like(largest)
        for part, wide in _shifted(logits, largest, chunk):
            index, here = _place(labels.flatten()[part], first, width)
            chosen.view(-1)[part] = logits.flatten(0, 1)[part].gather(-1, index).squeeze(-1) * here
            total.view(-1)[part] = wide.exp_().sum(-1)
        log_sum = largest + total.log()
        after = log_sum if before is None else torch.logaddexp(before[0], log_sum)
        kept = None if before is None else (before[0] - after).exp()  # the share of the tiles before
        ctx.save_for_backward(logits, labels, largest, total, (log_sum - after).exp(), kept)
        ctx.first, ctx.chunk = first, chunk
        return torch.stack([after, chosen if before is None else before[1] + chosen])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        logits, labels, largest, total, share, kept = ctx.saved_tensors
        of_sum, of_label = grads[0]
        rows, of_tile = logits.flatten(0, 1), (of_sum * share).flatten()
        for part, wide in _shifted(logits, largest, ctx.chunk):
            index, here = _place(labels.flatten()[part], ctx.first, logits.shape[-1])
            softmax = wide.exp_().div_(total.view(-1)[part].unsqueeze(-1))
            grad = softmax.mul_(of_tile[part].unsqueeze(-1))
            rows[part] = _add_at(grad, index, of_label.flatten()[part] * here)
        before = None if kept is None else torch.stack([of_sum * kept, of_label])
        return before, logits, None, None, None, None


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


def cross_entropy_in_chunks(logits: torch.Tensor, labels: torch.Tensor, vocab: int, chunk: int,
                            group: Group) -> torch.Tensor:
    """Loss of each token [S, B] in fp32, `chunk` tokens at a time. It overwrites `logits` [S, B, V]. Ids from
    `vocab` on are padding and are masked."""
    return _CrossEntropyInChunks.apply(logits, labels.contiguous(), vocab, chunk, group)  # pyright: ignore[reportReturnType]


def add_to_softmax(before: torch.Tensor | None, logits: torch.Tensor, labels: torch.Tensor, first: int,
                   vocab: int, chunk: int | None = None) -> torch.Tensor:
    """The running softmax [2, S, B] after one more tile. It overwrites `logits` [S, B, V], which are of the
    ids from `first` on; `labels` are [S, B]. `before`: None for the first tile. Ids from `vocab` on are
    padding and are masked. `chunk`: tokens that are computed at a time in fp32; None: all."""
    if chunk is not None:
        return _AddToSoftmaxInChunks.apply(before, logits, labels.contiguous(), first, vocab, chunk)  # pyright: ignore[reportReturnType]
    return _AddToSoftmax.apply(before, logits, labels.contiguous(), first, vocab)  # pyright: ignore[reportReturnType]


def cross_entropy_of(running: torch.Tensor, group: Group) -> torch.Tensor:
    """Loss of each token [S, B] in fp32, from the running softmax after the last tile, combined over tp."""
    return _CrossEntropyOf.apply(running, group)  # pyright: ignore[reportReturnType]

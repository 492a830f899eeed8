"""Cross entropy without a copy of the logits in fp32, and over a vocabulary that is computed tile by tile.

**In chunks** (model.loss_chunk): the logits are kept in the dtype of compute, and what is computed in fp32 is
of a few tokens at a time. Forward sums exponentials, and backward computes them again. Every number is
computed as without chunks, so losses and gradients have the same bits. **In place** (model.fused without a
GPU's kernels, which `fused_loss` has), backward writes the gradient over the logits.

**In tiles** (model.tile_linears), there is a running softmax. Each tile passes a tensor [2, S, B] in fp32 to
the next: the log of the sum of exponentials so far, and the label's logit (0 before the tile with the label).
Each tp rank has both for its own part of the vocabulary; after the last tile they are combined over tp.

Shapes as in `layers`: S sequence, B micro-batch, V the rank's part of the vocabulary (of a tile).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from threed.comm.group import Group

# The logit of padding. It is finite: a tile may be all padding, and differences of logits must not be NaN.
MASKED = -1e30


class Chunks(NamedTuple):
    tokens: int  # that are computed at a time in fp32
    in_place: bool = False  # backward writes the gradient over the logits


# Tokens at a time where model.fused needs chunks, and model.loss_chunk does not say.
CHUNK = 512


class _CrossEntropyInChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, vocab: int, chunks: Chunks,
                group: Group):
        first = group.rank() * logits.shape[-1]
        largest = _largest(logits, real_of(logits, first, vocab), -torch.inf)
        group.all_reduce(largest, "max").wait()
        total, label = torch.empty_like(largest), torch.empty_like(largest)
        ctx.first, ctx.vocab, ctx.chunks = first, vocab, chunks
        for part, wide, index, here in _chunks(ctx, logits, labels, largest, -torch.inf):
            label.view(-1)[part] = wide.gather(-1, index).squeeze(-1).masked_fill_(~here, 0.0)
            total.view(-1)[part] = wide.exp_().sum(-1)
        group.all_reduce(label).wait()
        group.all_reduce(total).wait()
        ctx.save_for_backward(logits, labels, largest, total)
        return total.log() - label

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        logits, labels, largest, total = ctx.saved_tensors
        grad, of_loss = _grad_of(logits, ctx.chunks), grads[0].flatten()
        for part, wide, index, here in _chunks(ctx, logits, labels, largest, -torch.inf):
            softmax = wide.exp_().div_(total.view(-1)[part].unsqueeze(-1))
            _add_at(softmax, index, -here.to(softmax.dtype))
            grad.flatten(0, 1)[part] = softmax.mul_(of_loss[part].unsqueeze(-1))
        return grad, None, None, None, None


def real_of(logits: torch.Tensor, first: int, vocab: int) -> int:
    """How many of the ids from `first` on are no padding."""
    return min(max(vocab - first, 0), logits.shape[-1])


def _largest(logits: torch.Tensor, real: int, padding: float) -> torch.Tensor:
    """The largest logit of each token, [S, B, V] -> [S, B], in fp32 where the logits have 16 bits. `padding`:
    where all are padding."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    if not real:
        return logits.new_full(logits.shape[:-1], padding, dtype=wide)
    return logits[..., :real].amax(-1).to(wide)


def _grad_of(logits: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """Where the gradient is written."""
    return logits.detach() if chunks.in_place else torch.empty_like(logits)


def _chunks(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, largest: torch.Tensor,
            padding: float) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each chunk of the tokens of [S, B, V]: which they are; their logits less the largest, in fp32,
    [chunk, V], with `padding` for padding; and their labels, as from `_place`."""
    rows, most, width = logits.flatten(0, 1), largest.flatten(), logits.shape[-1]
    for start in range(0, len(rows), ctx.chunks.tokens):
        part = slice(start, start + ctx.chunks.tokens)
        wide = rows[part] - most[part].unsqueeze(-1)
        wide[:, real_of(logits, ctx.first, ctx.vocab):] = padding
        yield part, wide, *_place(labels.flatten()[part], ctx.first, width)


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
        grad = (softmax * (of_sum * share).unsqueeze(-1)).contiguous()
        _add_at(grad.flatten(0, 1), index.flatten(0, 1), (of_label * here).flatten())
        before = None if kept is None else torch.stack([of_sum * kept, of_label])
        return before, grad.to(ctx.dtype), None, None, None


class _AddToSoftmaxInChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, before: torch.Tensor | None, logits: torch.Tensor, labels: torch.Tensor, first: int,
                vocab: int, chunks: Chunks):
        real = real_of(logits, first, vocab)
        largest = _largest(logits, real, MASKED)
        total, chosen = torch.empty_like(largest), torch.empty_like(largest)
        ctx.first, ctx.vocab, ctx.chunks = first, vocab, chunks
        ctx.padding = -torch.inf if real else 0.0  # as MASKED less the largest
        for part, wide, index, here in _chunks(ctx, logits, labels, largest, ctx.padding):
            chosen.view(-1)[part] = logits.flatten(0, 1)[part].gather(-1, index).squeeze(-1) * here
            total.view(-1)[part] = wide.exp_().sum(-1)
        log_sum = largest + total.log()
        after = log_sum if before is None else torch.logaddexp(before[0], log_sum)
        kept = None if before is None else (before[0] - after).exp()  # the share of the tiles before
        ctx.save_for_backward(logits, labels, largest, total, (log_sum - after).exp(), kept)
        return torch.stack([after, chosen if before is None else before[1] + chosen])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        logits, labels, largest, total, share, kept = ctx.saved_tensors
        of_sum, of_label = grads[0]
        grad, of_tile = _grad_of(logits, ctx.chunks), (of_sum * share).flatten()
        for part, wide, index, here in _chunks(ctx, logits, labels, largest, ctx.padding):
            softmax = wide.exp_().div_(total.view(-1)[part].unsqueeze(-1))
            softmax.mul_(of_tile[part].unsqueeze(-1))
            grad.flatten(0, 1)[part] = _add_at(softmax, index, of_label.flatten()[part] * here)
        before = None if kept is None else torch.stack([of_sum * kept, of_label])
        return before, grad, None, None, None, None


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


def cross_entropy_in_chunks(logits: torch.Tensor, labels: torch.Tensor, vocab: int, chunks: Chunks,
                            group: Group) -> torch.Tensor:
    """Loss of each token [S, B] in fp32, of `logits` [S, B, V], some tokens at a time. Ids from `vocab` on
    are padding and are masked."""
    return _CrossEntropyInChunks.apply(logits.contiguous(), labels.contiguous(), vocab, chunks, group)  # pyright: ignore[reportReturnType]


def add_to_softmax(before: torch.Tensor | None, logits: torch.Tensor, labels: torch.Tensor, first: int,
                   vocab: int, chunks: Chunks | None = None) -> torch.Tensor:
    """The running softmax [2, S, B] after one more tile. It may overwrite `logits` [S, B, V], which are of
    the ids from `first` on; `labels` are [S, B]. `before`: None for the first tile. Ids from `vocab` on are
    padding and are masked. `chunks`: None: all tokens at a time."""
    if chunks is not None:
        logits, labels = logits.contiguous(), labels.contiguous()
        return _AddToSoftmaxInChunks.apply(before, logits, labels, first, vocab, chunks)  # pyright: ignore[reportReturnType]
    return _AddToSoftmax.apply(before, logits, labels.contiguous(), first, vocab)  # pyright: ignore[reportReturnType]


def cross_entropy_of(running: torch.Tensor, group: Group) -> torch.Tensor:
    """Loss of each token [S, B] in fp32, from the running softmax after the last tile, combined over tp."""
    return _CrossEntropyOf.apply(running, group)  # pyright: ignore[reportReturnType]

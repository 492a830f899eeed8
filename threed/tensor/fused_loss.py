"""Fused loss: cross entropy that keeps the logits in the dtype of compute, and computes exponentials again in
backward. A GPU's kernels do it (`loss_kernel`), or separate operations on some tokens at a time (`Chunks`).

Chunks compute every number as the whole loss does (`layers`, `softmax`): losses and gradients have the same
bits. Kernels round otherwise: over tp, each rank first sums exponentials less its own largest logit, which
spares it a second pass over the logits.

Shapes as in `softmax`: S sequence, B micro-batch, V the rank's part of the vocabulary (of a tile).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch

from threed.comm.group import Group
from threed.tensor.softmax import MASKED, add_at

CHUNK = 512  # tokens at a time where model.loss_chunk does not say


class LossKernels(Protocol):
    """What computes on logits. All tensors are contiguous, and numbers of a token are in fp32, or fp64 as the
    logits. `places`: [S, B], the column of each label among the rank's, which it may lie outside of. The
    first `real` columns are no padding."""

    def largest(self, logits: torch.Tensor, real: int, /) -> torch.Tensor | None:
        """[S, B, V] -> the largest logit of each token, [S, B] (-inf where all are padding); None where
        `statistics` finds it in its only pass."""
        ...

    def statistics(self, logits: torch.Tensor, places: torch.Tensor, real: int, largest: torch.Tensor | None,
                   /) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, B, V], [S, B] -> two numbers a token, [2, S, B]: `largest`, or this rank's largest logit, and
        the sum of exponentials of the logits less it; and the label's logit, [S, B] (0 where it is
        elsewhere)."""
        ...

    def gradient(self, logits: torch.Tensor, places: torch.Tensor, numbers: torch.Tensor,
                 of_sum: torch.Tensor, of_label: torch.Tensor | None, real: int, /) -> torch.Tensor:
        """The gradient of the logits, which may be written over them: exp(logit - largest) / sum times
        `of_sum`, [S, B], and `of_label` more for the label's (None: `of_sum` less); 0 for padding."""
        ...


class Chunks(NamedTuple):
    """As LossKernels, by separate operations."""

    tokens: int = CHUNK  # at a time
    in_place: bool = True  # the gradient is written over the logits

    def largest(self, logits: torch.Tensor, real: int) -> torch.Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        if not real:
            return logits.new_full(logits.shape[:-1], -torch.inf, dtype=wide)
        return logits[..., :real].amax(-1).to(wide)

    def statistics(self, logits: torch.Tensor, places: torch.Tensor, real: int,
                   largest: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        largest = self.largest(logits, real) if largest is None else largest
        total, label = torch.empty_like(largest), torch.empty_like(largest)
        for part, exponents, index, here in self._parts(logits, places, largest, real):
            chosen = logits.flatten(0, 1)[part].gather(-1, index).squeeze(-1)
            label.view(-1)[part] = chosen.masked_fill_(~here, 0.0)
            total.view(-1)[part] = exponents.sum(-1)
        return torch.stack([largest, total]), label

    def gradient(self, logits: torch.Tensor, places: torch.Tensor, numbers: torch.Tensor,
                 of_sum: torch.Tensor, of_label: torch.Tensor | None, real: int) -> torch.Tensor:
        grad = logits.detach() if self.in_place else torch.empty_like(logits)
        largest, total = numbers
        for part, exponents, index, here in self._parts(logits, places, largest, real):
            softmax = exponents.div_(total.flatten()[part].unsqueeze(-1))
            factor = of_sum.flatten()[part].unsqueeze(-1)
            if of_label is None:
                add_at(softmax, index, -here.to(softmax.dtype)).mul_(factor)
            else:
                add_at(softmax.mul_(factor), index, of_label.flatten()[part] * here)
            grad.flatten(0, 1)[part] = softmax
        return grad

    def _parts(self, logits: torch.Tensor, places: torch.Tensor, largest: torch.Tensor,
               real: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each chunk of the tokens: which they are; exponentials of their logits less the largest, in
        fp32, 0 for padding; their labels' columns, [chunk, 1], and whether they have one here (else it is
        0)."""
        rows, columns, most = logits.flatten(0, 1), places.flatten(), largest.flatten()
        for start in range(0, len(rows), self.tokens):
            part = slice(start, start + self.tokens)
            wide = rows[part] - most[part].unsqueeze(-1)
            wide[:, real:] = -torch.inf
            here = (columns[part] >= 0) & (columns[part] < real)
            yield part, wide.exp_(), columns[part].where(here, 0).unsqueeze(-1), here


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, vocab: int, group: Group,
                kernels: LossKernels):
        first = group.rank() * logits.shape[-1]
        ctx.kernels, ctx.real, places = kernels, *_read(logits, labels, first, vocab)
        given = kernels.largest(logits, ctx.real)
        if given is not None:
            group.all_reduce(given, "max").wait()
        numbers, label = kernels.statistics(logits, places, ctx.real, given)
        largest, total = numbers
        if given is None and group.size() > 1:
            own = largest.clone()
            group.all_reduce(largest, "max").wait()
            total.mul_(own.sub_(largest).exp_())
        group.all_reduce(label).wait()
        group.all_reduce(total).wait()
        ctx.save_for_backward(logits, places, numbers)
        return total.log() - label.sub_(largest)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        logits, places, numbers = ctx.saved_tensors
        grad = ctx.kernels.gradient(logits, places, numbers, grads[0], None, ctx.real)
        return grad, None, None, None, None


class _AddToSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, before: torch.Tensor | None, logits: torch.Tensor, labels: torch.Tensor, first: int,
                vocab: int, kernels: LossKernels):
        ctx.kernels, ctx.real, places = kernels, *_read(logits, labels, first, vocab)
        numbers, chosen = kernels.statistics(logits, places, ctx.real, None)
        largest, total = numbers
        if not ctx.real:  # as if its padding were logits that are far below all others
            largest.fill_(MASKED)
            total.fill_(1.0)
        log_sum = largest + total.log()
        after = log_sum if before is None else torch.logaddexp(before[0], log_sum)
        kept = None if before is None else (before[0] - after).exp()  # the share of the tiles before
        ctx.save_for_backward(logits, places, numbers, (log_sum - after).exp(), kept)
        return torch.stack([after, chosen if before is None else before[1] + chosen])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        logits, places, numbers, share, kept = ctx.saved_tensors
        of_sum, of_label = grads[0]
        grad = ctx.kernels.gradient(logits, places, numbers, of_sum * share, of_label, ctx.real)
        before = None if kept is None else torch.stack([of_sum * kept, of_label])
        return before, grad, None, None, None, None


def _read(logits: torch.Tensor, labels: torch.Tensor, first: int, vocab: int) -> tuple[int, torch.Tensor]:
    """How many of the ids from `first` on are no padding, and the places of labels among them."""
    return min(max(vocab - first, 0), logits.shape[-1]), labels - first if first else labels


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, vocab: int, group: Group,
                  kernels: LossKernels) -> torch.Tensor:
    """Loss of each token [S, B] in fp32, of `logits` [S, B, V], which backward may write over. Ids from
    `vocab` on are padding and are masked."""
    return _CrossEntropy.apply(logits.contiguous(), labels.contiguous(), vocab, group, kernels)  # pyright: ignore[reportReturnType]


def add_to_softmax(before: torch.Tensor | None, logits: torch.Tensor, labels: torch.Tensor, first: int,
                   vocab: int, kernels: LossKernels) -> torch.Tensor:
    """As softmax.add_to_softmax. Backward may write over `logits`."""
    return _AddToSoftmax.apply(before, logits.contiguous(), labels.contiguous(), first, vocab, kernels)  # pyright: ignore[reportReturnType]

"""Cross entropy by kernels that read logits in the dtype of compute and write their gradient over them.

Numbers are those of `softmax` but for rounding: over tp, each rank first sums exponentials less its own
largest logit, which spares it a second pass over the logits.

Shapes as in `softmax`: S sequence, B micro-batch, V the rank's part of the vocabulary (of a tile).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from threed.comm.group import Group
from threed.tensor.softmax import CHUNK, MASKED, real_of


class LossKernels(Protocol):
    """What computes on logits. All tensors are contiguous, and all numbers a token in fp32. `places`: [S, B],
    the column of each label among the rank's, which it may lie outside of. The first `real` columns are no
    padding."""

    def statistics(self, logits: torch.Tensor, places: torch.Tensor, real: int,
                   /) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, B, V], [S, B] -> two numbers a token, [2, S, B]: the largest logit (-inf where all are padding)
        and the sum of exponentials of the logits less it; and the label's logit, [S, B] (0 where it is
        elsewhere)."""
        ...

    def gradient(self, logits: torch.Tensor, places: torch.Tensor, numbers: torch.Tensor, grads: torch.Tensor,
                 real: int, /) -> None:
        """Write over each logit its share exp(logit - largest) / sum times grads[0], and grads[1] more over
        the label's; 0 over padding. `grads`: [2, S, B]."""
        ...


class Separate:
    """As LossKernels, by separate operations on a few tokens at a time: where the kernels turn out not to
    compile, which may be in backward, behind a forward that was theirs."""

    @staticmethod
    def statistics(logits: torch.Tensor, places: torch.Tensor,
                   real: int) -> tuple[torch.Tensor, torch.Tensor]:
        label = places.new_zeros(places.shape, dtype=torch.float32)
        numbers = label.new_zeros(2, *places.shape)
        if not real:
            numbers[0] = -torch.inf
            return numbers, label
        largest, total = numbers.flatten(1)
        for part, wide, index, here in _parts(logits, places, real):
            most = wide.amax(-1, keepdim=True)
            largest[part] = most.squeeze(-1)
            label.view(-1)[part] = wide.gather(-1, index).squeeze(-1).masked_fill_(~here, 0.0)
            total[part] = wide.sub_(most.masked_fill(most == -torch.inf, 0.0)).exp_().sum(-1)
        return numbers, label

    @staticmethod
    def gradient(logits: torch.Tensor, places: torch.Tensor, numbers: torch.Tensor, grads: torch.Tensor,
                 real: int) -> None:
        rows, (largest, total) = logits.flatten(0, 1), numbers.flatten(1)
        of_sum, of_label = grads.flatten(1)
        most, scale = largest.unsqueeze(-1), (of_sum / total).unsqueeze(-1)
        for part, wide, index, here in _parts(logits, places, real) if real else ():
            wide.sub_(most[part]).exp_().mul_(scale[part])
            wide[torch.arange(len(wide), device=wide.device), index.squeeze(-1)] += of_label[part] * here
            rows[part, :real] = wide
        rows[:, real:] = 0.0


def _parts(logits: torch.Tensor, places: torch.Tensor, real: int) -> Iterator[
        tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each few tokens: which they are; their real logits in fp32; their labels' columns, [.., 1], and
    whether they have one here (else it is 0)."""
    rows, columns = logits.flatten(0, 1), places.flatten()
    for start in range(0, len(rows), CHUNK):
        part = slice(start, start + CHUNK)
        place = columns[part]
        here = (place >= 0) & (place < real)
        yield part, rows[part, :real].to(torch.float32, copy=True), place.where(here, 0).unsqueeze(-1), here


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, vocab: int, group: Group,
                kernels: LossKernels):
        places, numbers, label = _read(ctx, kernels, logits, labels, group.rank() * logits.shape[-1], vocab)
        largest, total = numbers
        if group.size() > 1:
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
        grad = _written(ctx, logits, places, numbers, torch.stack([grads[0], -grads[0]]))
        return grad, None, None, None, None


class _AddToSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, before: torch.Tensor | None, logits: torch.Tensor, labels: torch.Tensor, first: int,
                vocab: int, kernels: LossKernels):
        places, numbers, chosen = _read(ctx, kernels, logits, labels, first, vocab)
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
        grad = _written(ctx, logits, places, numbers, torch.stack([of_sum * share, of_label]))
        before = None if kept is None else torch.stack([of_sum * kept, of_label])
        return before, grad, None, None, None, None


def _read(ctx: Any, kernels: LossKernels, logits: torch.Tensor, labels: torch.Tensor, first: int,
          vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The places of labels among the ids from `first` on, and what `statistics` returns."""
    ctx.kernels, ctx.real = kernels, real_of(logits, first, vocab)
    places = labels - first if first else labels
    return places, *kernels.statistics(logits, places, ctx.real)


def _written(ctx: Any, logits: torch.Tensor, places: torch.Tensor, numbers: torch.Tensor,
             grads: torch.Tensor) -> torch.Tensor:
    """The gradient, written over the logits. Autograd is told, so that whoever has saved them for a backward
    that is still to come gets an error, not the gradient."""
    ctx.kernels.gradient(logits, places, numbers, grads, ctx.real)
    torch.autograd.graph.increment_version(logits)
    return logits.detach()


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, vocab: int, group: Group,
                  kernels: LossKernels) -> torch.Tensor:
    """As softmax.cross_entropy_in_chunks. Backward writes over `logits`."""
    return _CrossEntropy.apply(logits.contiguous(), labels.contiguous(), vocab, group, kernels)  # pyright: ignore[reportReturnType]


def add_to_softmax(before: torch.Tensor | None, logits: torch.Tensor, labels: torch.Tensor, first: int,
                   vocab: int, kernels: LossKernels) -> torch.Tensor:
    """As softmax.add_to_softmax. Backward writes over `logits`."""
    return _AddToSoftmax.apply(before, logits.contiguous(), labels.contiguous(), first, vocab, kernels)  # pyright: ignore[reportReturnType]

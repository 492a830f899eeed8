"""What adapters (LoRA, Hu et al. 2021) add to a linear, forward and backward: scale B A x, to some rows.

They are computed with the linear, on its input and its part of the output, so they send nothing of their own:
their part of the output, or of the input's gradient, travels in the linear's sum.

Shapes: [..., I] input, [..., O] output of this rank, r rank, o rows of an adapter; A [r, I], B [o, r].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from threed.models.spec import Factors


class Half(NamedTuple):
    """What the input half of an adapter's backward leaves for the gradients of its weights."""

    grad: torch.Tensor  # of its rows, [..., o]
    hidden_grad: torch.Tensor  # of scale A x, times scale, [..., r]


def matrices(adapters: Sequence[Factors]) -> list[torch.Tensor]:
    """A, B of each, in order."""
    return [matrix for each in adapters for matrix in (each.A, each.B) if matrix is not None]


def without(adapters: Sequence[Factors]) -> list[Factors]:
    """The adapters without their matrices."""
    return [each._replace(A=None, B=None) for each in adapters]


def with_matrices(adapters: Sequence[Factors], found: Sequence[torch.Tensor]) -> list[Factors]:
    """The adapters with other tensors, in the order of `matrices`."""
    return [each._replace(A=a, B=b) for each, a, b in zip(adapters, found[::2], found[1::2], strict=True)]


def add(output: torch.Tensor, x: torch.Tensor, adapters: Sequence[Factors]) -> list[torch.Tensor]:
    """Add to a linear's output, in place. Returns scale A x of each."""
    hidden = []
    for rows, scale, a, b in adapters:
        assert a is not None and b is not None
        hidden.append(F.linear(x, a) * scale)
        part = rows.of(output, output.dim() - 1)
        part += F.linear(hidden[-1], b).view(part.shape)
    return hidden


def input_half(grad: torch.Tensor, grad_x: torch.Tensor, adapters: Sequence[Factors]) -> list[Half]:
    """Add to the gradient of the input, in place, from that of the output."""
    halves = []
    for rows, scale, a, b in adapters:
        assert a is not None and b is not None
        part = rows.of(grad, grad.dim() - 1).reshape(*grad.shape[:-1], -1).contiguous()
        halves.append(Half(part, (part @ b) * scale))
        grad_x.view(-1, grad_x.shape[-1]).addmm_(halves[-1].hidden_grad.flatten(0, -2), a)
    return halves


def again(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor

"""What adapters (LoRA, Hu et al. 2021) add to a linear, forward and backward: scale B A x, to some rows.

They are computed with the linear, on its input and its part of the output, so they send nothing of their own:
their part of the output, or of the input's gradient, travels in the linear's sum.

Shapes: [..., I] input, [..., O] output of this rank, r rank, o rows of an adapter; A [r, I], B [o, r].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from threed.spec.parameter import Rows


class Factors(NamedTuple):
    """An adapter."""

    rows: Rows
    scale: float
    A: torch.Tensor
    B: torch.Tensor


class Half(NamedTuple):
    """What the input half of an adapter's backward leaves for the gradients of its weights."""

    grad: torch.Tensor  # of its rows, [..., o]
    hidden_grad: torch.Tensor  # of scale A x, times scale, [..., r]


class Added(NamedTuple):
    """Adapters without their matrices, which an autograd function gets and keeps one by one."""

    rows: list[Rows]
    scales: list[float]

    def of(self, matrices: Sequence[torch.Tensor]) -> list[Factors]:
        """The adapters with their matrices: A, B of each, in order."""
        return list(map(Factors, self.rows, self.scales, matrices[::2], matrices[1::2]))


def separated(adapters: Sequence[tuple[Any, ...]]) -> tuple[Added, list[torch.Tensor]]:
    """(the adapters without their matrices, the matrices), of values as in Factors."""
    each = [Factors(*adapter) for adapter in adapters]
    return (Added([one.rows for one in each], [one.scale for one in each]),
            [matrix for one in each for matrix in (one.A, one.B)])


def part_of(tensor: torch.Tensor, rows: Rows, dim: int) -> torch.Tensor:
    """A view of a tensor with some rows alone along a dim, which becomes [cells, runs, size]."""
    size = rows.size or tensor.shape[dim] // rows.runs
    return tensor.unflatten(dim, (-1, rows.runs, size)).narrow(dim + 1, rows.first, rows.stop - rows.first)


def add(output: torch.Tensor, x: torch.Tensor, adapters: Sequence[Factors]) -> list[torch.Tensor]:
    """Add to a linear's output, in place. Returns scale A x of each."""
    hidden = []
    for rows, scale, a, b in adapters:
        hidden.append(F.linear(x, a) * scale)
        part = part_of(output, rows, output.dim() - 1)
        part += F.linear(hidden[-1], b).view(part.shape)
    return hidden


def input_half(grad: torch.Tensor, grad_x: torch.Tensor, adapters: Sequence[Factors]) -> list[Half]:
    """Add to the gradient of the input, in place, from that of the output."""
    halves = []
    for rows, scale, a, b in adapters:
        part = part_of(grad, rows, grad.dim() - 1).reshape(*grad.shape[:-1], -1).contiguous()
        halves.append(Half(part, (part @ b) * scale))
        grad_x.view(-1, grad_x.shape[-1]).addmm_(halves[-1].hidden_grad.flatten(0, -2), a)
    return halves


def again(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor

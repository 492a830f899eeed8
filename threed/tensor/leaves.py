"""Leaves of a unit's graph for what has come from other ranks. Their gradients go back there."""

from __future__ import annotations

from typing import Any

import torch

from threed.base.errors import InputError

WIDENS = hasattr(torch.Tensor, "grad_dtype")  # torch 2.10


def like(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf of the same shape and dtype, without memory of its own."""
    return _hollow(tensor).requires_grad_()


def spent(leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A leaf with the values of another tensor, which the graph does not hold unless a node of it does."""
    return _Spent.apply(leaf, value)  # pyright: ignore[reportReturnType]


class _Spent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def wide(value: torch.Tensor) -> torch.Tensor:
    """A leaf with these values, whose gradient is in fp32, whatever its dtype."""
    leaf = value.detach().requires_grad_()
    if leaf.dtype == torch.float32:
        return leaf
    if not WIDENS:
        raise InputError("what travels twice, as with parallel.cp_overlap, has a gradient in fp32, which a "
                         f"tensor of 16 bits cannot have in torch {torch.__version__}: install torch 2.10 or "
                         "newer, or leave it out")
    leaf.grad_dtype = torch.float32
    return leaf


def free(leaf: torch.Tensor) -> None:
    """Let a leaf have no values any more."""
    leaf.data = _hollow(leaf)


def _hollow(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype without memory. (A gradient has the strides of its leaf where
    there is nothing in it.)"""
    return tensor.new_empty(()).expand(tensor.shape) if tensor.numel() else torch.empty_like(tensor)

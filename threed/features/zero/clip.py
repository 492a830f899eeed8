"""Clip: the result of CLIP. The device computes it, and STEP reads it there; the host reads a copy, later.

So the host goes on after CLIP: it issues the updates, and what comes after them, while the device still
computes gradients. Who reads a number that has not arrived waits for CLIP, and for nothing that comes after.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from threed.base.errors import RunError
from threed.comm.lanes import so_far
from threed.devices import device_of

FIELDS = ("loss", "grad_norm", "scale", "finite", "counted", "penalty")  # of Clipped, which the host reads


class Limits(NamedTuple):
    """What CLIP knows beforehand."""

    tokens: int  # of the global batch
    loss_scale: float  # of the gradients
    clip_grad: float  # the largest norm; 0: any
    counts: bool  # whether a loss may count by itself


class _Row(NamedTuple):
    """What the device computes: numbers in fp64."""

    loss: Any
    grad_norm: Any
    scale: Any
    finite: Any  # 1 or 0
    tokens: Any
    counting: Any
    count: Any
    penalties: Any
    penalty: Any


class Clipped:
    """The result of CLIP, equal on all ranks."""

    loss: float  # mean over the tokens of the global batch
    grad_norm: float
    scale: float  # STEP multiplies gradients by this
    finite: bool  # else STEP changes nothing
    loss_scale: float  # the scale of this step's gradients
    counted: float | None  # what the loss has counted by itself (`Out.count`), and was divided by
    penalty: float | None  # apart from the loss (`Out.penalty`); None: no layer has one

    def __init__(self, sums: torch.Tensor, limits: Limits):
        """`sums`: over all ranks, fp64: [norm squared, not finite, tokens, and the numbers of LossSum]."""
        self.loss_scale, self._tokens = limits.loss_scale, limits.tokens
        row = _decide(sums, limits)
        # For kernels, on the device: 1 where the step is taken and 0 where it is not, the opposite in fp32,
        # and by what gradients are divided (None: by 1; a kernel that divides also writes them).
        self.taken, self.found_inf = row.finite, (1 - row.finite).float()
        scales = limits.counts or limits.clip_grad > 0 or limits.loss_scale != 1
        self.divisor = (torch.ones_like(row.scale) / row.scale).float() if scales else None
        self._numbers = numbers = torch.stack(list(row))
        if device_of(sums.device).asynchronous:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
        self._arrives = so_far(sums.device)
        self.waits: Callable[[], AbstractContextManager[object]] = nullcontext  # around a wait of the host

    @property
    def known(self) -> bool:
        """Whether the host need not wait for the numbers."""
        return "finite" in vars(self) or self._arrives.done()

    def __getattr__(self, name: str) -> Any:
        """Python asks here for numbers that the host has not read yet. RunError where a loss has counted
        wrongly."""
        if name not in FIELDS:
            raise AttributeError(name)
        if not self.known:
            with self.waits():
                self._arrives.block()
        vars(self).update(zip(FIELDS, self._read(_Row(*self._numbers.tolist())), strict=True))
        return vars(self)[name]

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("loss_scale", *FIELDS)}

    def _read(self, row: _Row) -> tuple[float | None, ...]:
        assert row.tokens == self._tokens, f"{row.tokens} tokens were counted, not {self._tokens}"
        if row.counting and row.count < 0:
            raise RunError(f"the loss returned counts whose sum over the global batch is {row.count:g}: the "
                           "second of what it returns is a number of tokens, or a sum of their weights")
        return (row.loss, row.grad_norm, row.scale, bool(row.finite), row.count if row.counting else None,
                row.penalty if row.penalties else None)


def _decide(sums: torch.Tensor, limits: Limits) -> _Row:
    """Without a wait, and the same to the bit on a CPU. (A number divided by a tensor is a product with its
    reciprocal, which rounds twice: so each is a tensor.)"""
    squared, found, tokens, summed, counting, count, penalties, penalty = sums.unbind()  # as LossSum
    one = torch.ones_like(squared)
    # What a loss has counted by itself, as a share of the samples by whose number it was divided before
    # backward. Gradients are linear in the loss: they are divided when they are used. Of a batch in which
    # nothing counts, the loss and all gradients are zeros: it is divided by anything.
    counted = torch.where(counting != 0, count / limits.tokens, one)
    share = torch.where(counted == 0, one, counted)
    loss, norm = summed / share, _root(squared) / limits.loss_scale / share
    scale = one
    if limits.clip_grad > 0:
        scale = (limits.clip_grad * one / (norm + 1e-6)).clamp(max=1.0)
    finite = (found == 0) & norm.isfinite() & loss.isfinite() & (share > 0)
    return _Row(loss, norm, scale / limits.loss_scale / share, finite.double(), tokens, counting, count,
                penalties, penalty / share)


def _root(squared: torch.Tensor) -> torch.Tensor:
    """The square root. On a CPU torch's is not always the nearest number."""
    if squared.device.type != "cpu" or device_of(squared.device).asynchronous:
        return squared.sqrt()
    return torch.full_like(squared, math.sqrt(squared) if squared >= 0 else math.nan)

"""Pieces of layers as one function each, with a backward of their own (model.fused).

Separate operations keep what each of them needs for its own backward. Here a piece keeps its inputs alone and
computes the rest again: SwiGLU keeps gate and up, but not the opened gate; dropout keeps nothing, since its
mask is computed from counters. The bodies have the operations of the plain piece in their order, so results
have the same bits; compiled bodies (`compile`) read and write each tensor once, and round once.

The loss is such a piece, too: its kernels are our own (`loss_kernel`), and without them it is computed in
chunks. Either way keeps the logits in the dtype of compute, and writes their gradient over them. So are the
pieces with sums over tokens (`pieces`).

Shapes: [...] any; F hidden layer of an MLP, E head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from threed.base.console import say
from threed.base.errors import ThreedError
from threed.devices import device_of
from threed.tensor.fused_loss import Chunks, LossKernels
from threed.tensor.pieces import Kernels, Pieces, Separate
from threed.tensor.places import Rows, numbers
from threed.tensor.random import keyed, mask_of
from threed.tensor.rectangles import kernel

Body = Callable[..., Any]


class Fused:
    """The pieces, with compiled bodies or plain ones. `falls_back`: plain bodies take the place of compiled
    ones as soon as one cannot be compiled, with a warning."""

    def __init__(self, compile: bool = False, falls_back: bool = False):
        self._fallback = _Fallback() if falls_back else None
        self._compile = compile
        compiled = self._fallback or _compiled
        self.body: Callable[[Body], Body] = compiled if compile else _plain

    @property
    def compile(self) -> bool:
        return self._compile and not (self._fallback and self._fallback.needed)

    rectangle = staticmethod(kernel)  # of attention to the keys of other ranks

    def kernels(self, device: torch.device) -> LossKernels | None:
        """Those of the loss on a device; None where separate operations compute it, in chunks."""
        if not self.compile or not device_of(device).triton:
            return None
        return self._fallback or _triton()

    def sums(self, device: torch.device) -> Pieces:
        """What computes pieces with sums over tokens on a device: kernels, or separate operations."""
        if not self.compile or not device_of(device).triton:
            return Separate
        return self._fallback or _kernels()

    def swiglu(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, where x is gate and up: [..., 2F] -> [..., F]."""
        return _SwiGlu.apply(x, self.body)  # pyright: ignore[reportReturnType]

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotary positions: pairs are (i, i + E/2). [..., E], twice [S, E] -> [..., E]."""
        return _Rotate.apply(x, cos, sin, self.body)  # pyright: ignore[reportReturnType]

    def drop(self, x: torch.Tensor, probability: float, key: tuple[int, str], samples: torch.Tensor,
             rows: Rows) -> torch.Tensor:
        """Dropout with `keep_mask`: [s, B, D], [B] -> [s, B, D]. `rows`: the places of the tokens."""
        return _Drop.apply(x, probability, key, samples, rows, self.body)  # pyright: ignore[reportReturnType]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean of x^2 + eps) * weight over the last dim, in fp32. [..., H], [H] -> [..., H]."""
        return _RmsNorm.apply(x, weight, eps, self.body)  # pyright: ignore[reportReturnType]


def _plain(body: Body) -> Body:
    return body


@cache
def _compiled(body: Body) -> Body:
    return torch.compile(body, dynamic=False)


def _triton() -> LossKernels:
    from threed.tensor.loss_kernel import TritonKernels

    return TritonKernels


def _kernels() -> Pieces:
    from threed.tensor.pieces_kernel import start

    return Kernels(start)


class _Fallback:
    """Compiled bodies, the loss's kernels and those of sums, until one cannot be compiled. A compiler works
    at the first call of a body, and at that with a new shape, where what it lacks may be found out late: a
    full disk, a shape that it fails on."""

    def __init__(self) -> None:
        self.needed = False

    def __call__(self, body: Body) -> Body:
        return body if self.needed else lambda *inputs: self._run(lambda: _compiled(body), body, *inputs)

    def largest(self, logits: torch.Tensor, real: int) -> torch.Tensor | None:
        return Chunks().largest(logits, real) if self.needed else None

    def statistics(self, *given: Any) -> Any:
        return self._run(lambda: _triton().statistics, Chunks().statistics, *given)

    def gradient(self, *given: Any) -> torch.Tensor:
        return self._run(lambda: _triton().gradient, Chunks().gradient, *given)

    def gelu(self, *given: Any) -> Any:
        return self._run(lambda: _kernels().gelu, Separate.gelu, *given)

    def gelu_backward(self, *given: Any) -> Any:
        return self._run(lambda: _kernels().gelu_backward, Separate.gelu_backward, *given)

    def joined(self, *given: Any) -> Any:
        return self._run(lambda: _kernels().joined, Separate.joined, *given)

    def ended(self, *given: Any) -> Any:
        return self._run(lambda: _kernels().ended, Separate.ended, *given)

    def ended_backward(self, *given: Any) -> Any:
        return self._run(lambda: _kernels().ended_backward, Separate.ended_backward, *given)

    def add_rows(self, *given: Any) -> Any:
        return self._run(lambda: _kernels().add_rows, Separate.add_rows, *given)

    def _run(self, compiled: Callable[[], Body], plain: Body, *inputs: Any) -> Any:
        if self.needed:
            return plain(*inputs)
        try:
            return compiled()(*inputs)
        except (torch.OutOfMemoryError, ThreedError):
            raise
        except Exception as error:  # a compiler may raise anything, and has changed no input
            result = plain(*inputs)  # fails, too, where the device or an input is at fault
            if not self.needed:
                self.needed = True
                say("warning: model.fused=auto: a piece of the model was not compiled on this rank, which "
                    "computes all pieces by separate operations from now on: slower, and rounded as with "
                    f"model.fused=off ({in_short(error)})")
            return result


def in_short(error: BaseException) -> str:
    """An error of a compiler in one line: what it says itself, of the pages that torch writes around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "raised:" not in line]
    said = next((line for line in lines if "error: " in line), lines[0] if lines else "")
    return (said if ": " in said else f"{type(error).__name__}: {said}")[:200]


# ---- bodies


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _swiglu_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.cat([torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)], -1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def rotate_backward(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The rotation by the opposite angles."""
    low, high = (grad * sin).chunk(2, -1)
    return torch.cat([high, -low], -1) + grad * cos


def _drop(x: torch.Tensor, probability: float, hashes: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    counters = counters.view(-1, len(x), x.shape[2])
    return x * mask_of(probability, hashes, counters).transpose(0, 1) / (1.0 - probability)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In fp32 where x has 16 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    wide = _wide(x)
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight).to(x.dtype), scale


def _rms_norm_backward(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor,
                       grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad, normed = _wide(grad), _wide(x) * scale
    grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
    grad = grad * weight
    grad_x = scale * (grad - normed * (grad * normed).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), grad_weight


# ---- functions


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, body: Callable[[Body], Body]):
        ctx.save_for_backward(x)
        ctx.body = body
        return body(_swiglu)(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        (x,) = ctx.saved_tensors
        return ctx.body(_swiglu_backward)(x, grads[0]), None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                body: Callable[[Body], Body]):
        ctx.save_for_backward(cos, sin)
        ctx.body = body
        return body(rotate)(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return ctx.body(rotate_backward)(grads[0], *ctx.saved_tensors), None, None, None


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, probability: float, key: tuple[int, str], samples: torch.Tensor,
                rows: Rows, body: Callable[[Body], Body]):
        width = x.shape[2]

        def drop(tensor: torch.Tensor) -> torch.Tensor:
            # The body gets no seed: it would be compiled for each. And nothing of its size is kept.
            return body(_drop)(tensor, probability, keyed(key, samples), numbers(rows, samples.device, width))

        ctx.drop = drop
        return drop(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return ctx.drop(grads[0]), None, None, None, None, None


class _RmsNorm(torch.autograd.Function):
    """Saves its input and one number a token; separate operations would save fp32 copies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, body: Callable[[Body], Body]):
        output, scale = body(_rms_norm)(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.body = body
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return *ctx.body(_rms_norm_backward)(*ctx.saved_tensors, grads[0]), None, None

"""Rectangles: causal attention of the last queries of a sequence to all keys before them, as kernels with a
forward and a backward of their own.

        keys      0 1 2 3 4 5
    query 4       x x x x x .        two queries of six: the rectangle is aligned at the lower right
    query 5       x x x x x x

torch's scaled_dot_product_attention aligns a causal rectangle at the upper left, and with a mask keeps that
for backward. What is here calls the kernels behind it.

Shapes: B sequences, N query heads, K key and value heads, E head size, S queries, T keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from threed.devices import device_of

Kept = tuple[torch.Tensor, ...]  # what a backward needs besides its forward's inputs and output
Gradients = tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]  # keys; of all q from them, of their k, v
_ops: Any = torch.ops.aten


class Rectangle(NamedTuple):
    """A kernel. `forward`: q [B, N, S, E], k and v [B, K, T, E], and where there are `rows` a mask
    (`lower_right`) -> output [B, N, S, E], what it keeps. `backward`: the output's gradient, q, k, v, the
    output, what was kept -> gradients, keys by keys: those of q are added up."""

    forward: Callable[..., tuple[torch.Tensor, Kept]]
    backward: Callable[..., Iterator[Gradients]]
    rows: int | None = None  # the most queries of a call, which needs a mask; None: any number, and none


def kernel(device: torch.device, dtype: torch.dtype, head_size: int, repeats: bool) -> Rectangle:
    """The best kernel for a device. `repeats`: there are fewer key heads than query heads. On a GPU each is
    tried once, and must compute what separate operations do."""
    if not device_of(device).asynchronous:
        return HOST
    return _tried(device, dtype, head_size, repeats)


@cache
def _tried(device: torch.device, dtype: torch.dtype, head_size: int, repeats: bool) -> Rectangle:
    made = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, heads, length, head_size, generator=made).to(device, dtype)
                     for heads, length in ((4, 3), *((2 if repeats else 4, 8),) * 2, (4, 3)))
    want = _both(SEPARATE, q, k, v, grad)
    for each in (FLASH, EFFICIENT):
        try:
            got = _both(each, q, k, v, grad)
        except (TypeError, ValueError, RuntimeError):  # other arguments; none for this device or dtype
            continue
        if all(near(one, other) for one, other in zip(got, want, strict=True)):
            return each
    return SEPARATE


def _both(of: Rectangle, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
          grad: torch.Tensor) -> list[torch.Tensor]:
    out, kept = of.forward(q, k, v)
    (_, *gradients), = of.backward(grad, q, k, v, out, kept)
    return [out, *gradients]


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results differ by rounding only."""
    change = torch.linalg.vector_norm((one - other).float())
    return bool(change <= 0.05 * torch.linalg.vector_norm(other.float()))


def lower_right(rows: int, keys: int, like: torch.Tensor) -> torch.Tensor:
    """What is added to scores of the last `rows` queries of a sequence of `keys` tokens, [rows, keys]. Its
    lower right is that of fewer queries, or of a shorter sequence."""
    return torch.full((rows, keys), -torch.inf, dtype=like.dtype, device=like.device).triu_(keys - rows + 1)


# ---- on the host: a few rows at a time, so that few keys are seen for nothing. A mask costs a tenth of a
# forward; a backward needs none, since its parts add up


def _host(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
          mask: torch.Tensor | None = None) -> tuple[torch.Tensor, Kept]:
    out, log_sum = _ops._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=None if mask is None else mask[-q.shape[2]:, -k.shape[2]:])
    return out, (log_sum,)


_PART = 1024  # keys of a backward: they and their gradients stay in a core's cache


def _host_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                   kept: Kept) -> Iterator[Gradients]:
    """The keys before the queries, which all of these see, and the queries' own."""
    own = k.shape[2] - q.shape[2]
    for first in (*range(0, own, _PART), own):
        keys = slice(first, min(first + _PART, own) if first < own else None)
        yield keys, *_host_part(grad, q, k[:, :, keys], v[:, :, keys], out, kept, causal=first == own)


def _host_part(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
               kept: Kept, causal: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _ops._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, kept[0], 0.0, causal)


HOST = Rectangle(_host, _host_backward, 256)


def _host_whole(*inputs: Any) -> Iterator[Gradients]:
    yield slice(None), *_host_part(*inputs)


SHAPES = Rectangle(_host, _host_whole)  # of tensors without values: the shapes of a kernel without a mask


# ---- flash attention, which is aligned at the lower right: tensors are [B, S, heads, E]


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Kept]:
    out, *kept, _ = _ops._flash_attention_forward(*_turned(q, k, v), None, None, q.shape[2], k.shape[2], 0.0,
                                                  True, False)
    return out.transpose(1, 2), tuple(kept)


def _flash_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                    kept: Kept) -> Iterator[Gradients]:
    log_sum, state, unused = kept
    yield slice(None), *_turned(*_ops._flash_attention_backward(
        *_turned(grad, q, k, v, out), log_sum, None, None, q.shape[2], k.shape[2], 0.0, True, state, unused))


FLASH = Rectangle(_flash, _flash_backward)


def _turned(*parts: torch.Tensor) -> Any:
    return tuple(part.transpose(1, 2) for part in parts)


# ---- torch's memory-efficient attention, for fp32: tensors are [B, S, heads, E], with as many key heads

_LOWER_RIGHT = 2  # its number of such a mask


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Kept]:
    out, log_sum, seed, offset, *_ = _ops._efficient_attention_forward(
        *_turned(q, *_repeated(q, k, v)), None, None, None, None, None, 0.0, _LOWER_RIGHT, True)
    return out.transpose(1, 2), (log_sum, seed, offset)


def _efficient_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                        out: torch.Tensor, kept: Kept) -> Iterator[Gradients]:
    log_sum, seed, offset = kept
    inputs = _turned(grad, q, *_repeated(q, k, v))
    of_q, of_k, of_v, _ = _ops._efficient_attention_backward(
        *inputs, None, out.transpose(1, 2), None, None, q.shape[2], k.shape[2], log_sum, 0.0, seed, offset,
        _LOWER_RIGHT, False)
    of_q, of_k, of_v = _turned(of_q, of_k, of_v)
    yield slice(None), of_q, _joined(of_k, k), _joined(of_v, v)


EFFICIENT = Rectangle(_efficient, _efficient_backward)


# ---- separate operations, where there is no kernel


def _separate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Kept]:
    scores = _scores(q, k)
    log_sum = scores.logsumexp(-1, keepdim=True)
    return ((scores - log_sum).exp().to(v.dtype) @ _repeated(q, v)[0]), (log_sum,)


def _separate_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                       out: torch.Tensor, kept: Kept) -> Iterator[Gradients]:
    wide, values = _repeated(q, k, v)
    weights = (_scores(q, k) - kept[0]).exp()
    rows = (grad.float() * out.float()).sum(-1, keepdim=True)
    of_scores = (weights * ((grad @ values.transpose(-1, -2)).float() - rows) * q.shape[-1]**-0.5).to(q.dtype)
    yield (slice(None), of_scores @ wide, _joined(of_scores.transpose(-1, -2) @ q, k),
           _joined(weights.to(grad.dtype).transpose(-1, -2) @ grad, v))


SEPARATE = Rectangle(_separate, _separate_backward)


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = (q @ _repeated(q, k)[0].transpose(-1, -2)).float() * q.shape[-1]**-0.5
    return scores + lower_right(q.shape[2], k.shape[2], scores)


def _repeated(q: torch.Tensor, *parts: torch.Tensor) -> list[torch.Tensor]:
    """Keys or values for each query head."""
    times = q.shape[1] // parts[0].shape[1]
    return [part if times == 1 else part.repeat_interleave(times, 1) for part in parts]


def _joined(grad: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """The gradient of keys or values that several query heads share."""
    if grad.shape == of.shape:
        return grad
    return grad.unflatten(1, (of.shape[1], -1)).sum(2, dtype=torch.float32)

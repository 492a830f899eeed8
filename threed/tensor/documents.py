"""Documents: attention that stays inside each document of a sequence.

    tokens      a a a a b b b c | c c d d d d d d      two sequences of a micro-batch
    positions   0 1 2 3 0 1 2 0 | 0 1 0 1 2 3 4 5      places within the documents
    ends              4     7 8 |   2           8      where documents end: a run of tokens for each

A document that a sequence cuts begins anew in the next one. Documents travel with their micro-batch: a mask
that a model keeps is of the wrong micro-batch under a pipeline.

There are two ways to compute the same. With torch's attention for sequences of varying length, one kernel
does all documents (flash, 16 bits, on a GPU). Otherwise each document is a call of
scaled_dot_product_attention, and backward computes its forward again, so that nothing is kept but queries,
keys and values. Neither makes a mask: a square of seq_len^2 numbers takes memory, and has torch choose slower
kernels.

Shapes: B micro-batch, S sequence, N query heads, K key and value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from threed.devices import device_of
from threed.tensor.fused import Body, Fused, rotate, rotate_backward
from threed.tensor.rectangles import near


@dataclass(frozen=True)
class Documents:
    """The documents of a micro-batch."""

    positions_BS: torch.Tensor  # int64: of each token of attention within its document
    ends: tuple[tuple[int, ...], ...]  # of each whole sequence: where its documents end; the last is S

    @classmethod
    def of(cls, positions_BS: torch.Tensor) -> Documents:
        """`positions_BS`: on the host."""
        length = positions_BS.shape[1]
        starts = [row.nonzero().flatten().tolist() for row in positions_BS == 0]
        assert all(row[:1] == [0] for row in starts), "a sequence begins with the position 0"
        return cls(positions_BS, tuple((*row[1:], length) for row in starts))

    def at(self, positions_BS: torch.Tensor) -> Documents:
        """The same, with the positions on another device."""
        return replace(self, positions_BS=positions_BS)

    @property
    def whole(self) -> bool:
        """Whether each sequence is one document."""
        return all(len(row) == 1 for row in self.ends)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(sequence, first token, one past the last token) of each document."""
        for index, row in enumerate(self.ends):
            for first, stop in zip((0, *row), row, strict=False):
                yield index, first, stop


# How attention for sequences of varying length is told to be causal, and to repeat keys: what versions of
# torch differ in. (2.10, whose kernel repeats them by itself; 2.11 and 2.12; 2.13)
_CALLS: tuple[Callable[[bool], dict[str, Any]], ...] = (
    lambda repeats: {"window_size": (-1, 0), "enable_gqa": repeats},
    lambda repeats: {"window_size": (-1, 0)},
    lambda repeats: {"is_causal": True},
)


@cache
def varlen_call(device: torch.device, dtype: torch.dtype, head_size: int,
                repeats: bool) -> dict[str, Any] | None:
    """The arguments with which torch's attention for sequences of varying length computes what attention to
    one document after the other does, forward and backward. None where no arguments do, or it is missing.
    `repeats`: there are fewer key and value heads than query heads. Each call is tried once."""
    if find_spec("torch.nn.attention.varlen") is None:
        return None
    made = torch.Generator().manual_seed(0)
    parts = [torch.randn(1, heads, 5, head_size, generator=made, dtype=torch.float32).to(device, dtype)
             for heads in (4, *(2 if repeats else 4,) * 2, 4)]
    documents = Documents(torch.empty(0), ((3, 5),))
    want = _with_grads(_Attend.apply, parts, documents)
    for call in _CALLS:
        try:
            got = _with_grads(partial(_varlen, call=call(repeats)), parts, documents)
        except (TypeError, ValueError, RuntimeError):  # other arguments; no kernel for this device or dtype
            continue
        if all(near(one, other) for one, other in zip(got, want, strict=True)):
            return call(repeats)
    return None


def _with_grads(attention: Callable[..., Any], parts: Sequence[torch.Tensor],
                documents: Documents) -> list[torch.Tensor]:
    """Attention's output, and the gradients of what it takes, given the output's."""
    with torch.enable_grad():
        *inputs, grad = (part.detach().clone().requires_grad_() for part in parts)
        out = attention(*inputs, documents)
        return [out, *torch.autograd.grad(out, inputs, grad)]


def attend(q_BNSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor, documents: Documents,
           varlen: bool) -> torch.Tensor:
    """Causal attention inside each document, [B, N, S, E]. `varlen`: by one kernel for all documents."""
    if documents.whole:
        return _causal(q_BNSE, k_BKSE, v_BKSE)
    if varlen:
        call = varlen_call(q_BNSE.device, q_BNSE.dtype, q_BNSE.shape[3], q_BNSE.shape[1] > k_BKSE.shape[1])
        assert call is not None, "torch's attention for sequences of varying length cannot be used here"
        return _varlen(q_BNSE, k_BKSE, v_BKSE, documents, call)
    return _Attend.apply(q_BNSE, k_BKSE, v_BKSE, documents)  # pyright: ignore[reportReturnType]


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] > k.shape[1])


def _varlen(q_BNSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor,
            documents: Documents, call: dict[str, Any]) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    size, _, length, _ = q_BNSE.shape
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (q_BNSE, k_BKSE, v_BKSE))  # [B S, heads, E]
    sizes = [stop - first for _, first, stop in documents.runs()]
    starts = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)
    if device_of(q.device).asynchronous:
        starts = starts.pin_memory().to(q.device, non_blocking=True)
    out = varlen_attn(q, k, v, starts, starts, max(sizes), max(sizes), **call)
    assert isinstance(out, torch.Tensor)
    return out.view(size, length, *out.shape[1:]).transpose(1, 2)


class _Attend(torch.autograd.Function):
    """A call of attention for each document."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents):
        ctx.save_for_backward(q, k, v)
        ctx.documents = documents
        size, heads, length, width = q.shape
        out = q.new_empty(size, length, heads, width).transpose(1, 2)  # in memory as a kernel's output
        for index, first, stop in documents.runs():
            run = slice(index, index + 1), slice(None), slice(first, stop)
            out[run] = _causal(q[run], k[run], v[run])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        inputs = ctx.saved_tensors
        made = [torch.empty_like(each) for each in inputs]
        for index, first, stop in ctx.documents.runs():
            run = slice(index, index + 1), slice(None), slice(first, stop)
            with torch.enable_grad():
                leaves = [each[run].detach().requires_grad_() for each in inputs]
                out = _causal(*leaves)
            for into, grad in zip(made, torch.autograd.grad(out, leaves, grads[0][run]), strict=True):
                into[run] = grad
        return *made, None


def outside(positions_BS: torch.Tensor, places_S: torch.Tensor, length: int) -> torch.Tensor:
    """Whether a key is in an earlier document than the query, [B, 1, S, length], for attention by separate
    operations. `places_S`: of the queries, in a sequence of `length` keys."""
    keys = torch.arange(length, device=positions_BS.device)
    return (keys < (places_S - positions_BS).unsqueeze(-1)).unsqueeze(1)


def rotate_at(x_BNSE: torch.Tensor, positions_BS: torch.Tensor, cos_SE: torch.Tensor, sin_SE: torch.Tensor,
              fused: Fused) -> torch.Tensor:
    """As Fused.rotate, with a position for each token. The rows of the tables are looked up again in
    backward: kept, they would be as many numbers as a head has."""
    return _RotateAt.apply(x_BNSE, positions_BS, cos_SE, sin_SE, fused.body)  # pyright: ignore[reportReturnType]


class _RotateAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
                body: Any):
        ctx.save_for_backward(positions, cos, sin)
        ctx.body = body
        return _at(body(rotate), x, positions, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return _at(ctx.body(rotate_backward), grads[0], *ctx.saved_tensors), None, None, None, None


def _at(turn: Body, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor,
        sin: torch.Tensor) -> torch.Tensor:
    return turn(x, cos[positions].unsqueeze(1), sin[positions].unsqueeze(1))

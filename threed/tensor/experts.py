"""Mixture of experts: the choice of experts and their capacity, rows of tokens in their order, and
products of each expert.

Shapes: T tokens of this rank in a micro-batch, k experts a token, E experts, e those of this rank, N rows
that came to it, D hidden, F hidden layer of an expert.

    picks [T, k]    rows [T k], sorted by expert: row j is of token order[j] // k

A pick of E + e is one of expert e that its capacity drops: it has no row.

A row travels with its weight in the sum, in fp32 (`routed`): applied where the row is computed, it leaves a
plain sum for the way back, whose gradient is a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from threed.base.quantity import prime_factors
from threed.devices import device_of
from threed.spec.travel import ROW_EXTRA as EXTRA
from threed.tensor.adapters import again
from threed.tensor.layers import WeightGrads


class _Router(torch.autograd.Function):
    """Logits [T, E] in fp32, of x [T, D] and the weight [E, D] as compute reads them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, grads: WeightGrads):
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.grads = weight, grads
        return x.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        x, weight = ctx.saved_tensors
        grad_x = (grads[0] @ weight.float()).to(x.dtype)
        taken = ctx.grads.take(ctx.weight, grads[0], lambda: x.float()) if ctx.needs_input_grad[1] else None
        return grad_x, taken if taken is None else taken.to(weight.dtype), None


def logits(x: torch.Tensor, weight: torch.Tensor, grads: WeightGrads) -> torch.Tensor:
    return _Router.apply(x, weight, grads)  # pyright: ignore[reportReturnType]


def scores_of(logits_TE: torch.Tensor, how: str) -> torch.Tensor:
    return logits_TE.softmax(-1) if how == "softmax" else logits_TE.sigmoid()


class _Counted(torch.autograd.Function):
    """The weights of rows, unchanged. Backward gives the bias [E], which has no part in them, the rows of
    each expert as its gradient."""

    @staticmethod
    def forward(ctx: Any, weights_Tk: torch.Tensor, bias: torch.Tensor, picks_Tk: torch.Tensor,
                grads: WeightGrads):
        ctx.bias, ctx.picks, ctx.grads = bias, picks_Tk, grads
        return weights_Tk.view_as(weights_Tk)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        experts = len(ctx.bias)
        rows = count(ctx.picks % experts, experts).float()  # dropped ones, too
        return grads[0], ctx.grads.take_count(ctx.bias, rows), None, None


def counted(weights_Tk: torch.Tensor, bias_E: torch.Tensor, picks_Tk: torch.Tensor,
            grads: WeightGrads) -> torch.Tensor:
    return _Counted.apply(weights_Tk, bias_E, picks_Tk, grads)  # pyright: ignore[reportReturnType]


def choose(scores_TE: torch.Tensor, per_token: int, groups: int = 1, groups_per_token: int = 1,
           bias_E: torch.Tensor | None = None) -> torch.Tensor:
    """The experts of each token, [T, k], the best first. `bias_E` is added to the scores for this alone.

    With groups (DeepSeek-V3), only those of the best `groups_per_token` groups of neighbouring experts can be
    chosen: a group is as good as the sum of as many of its scores as it may have experts of a token. Among
    equal scores the lower number wins, on every device."""
    scores = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    if groups > 1:
        grouped = scores.view(len(scores), groups, -1)
        best = grouped.topk(per_token // groups_per_token, -1).values.sum(-1)
        first = best.argsort(dim=-1, descending=True, stable=True)[:, :groups_per_token]
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, first, False)
        scores = grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :per_token].contiguous()


def balanced(places_T: torch.Tensor, per_token: int, experts: int) -> torch.Tensor:
    """Choices that give each expert as many rows: choice j of the token at place t of its sequence has the
    number (t k + j) mod E, whose digits, in the base of the prime factors of E, are reversed. So the few
    tokens of one rank of a sequence also have experts of all ranks."""
    numbers = (places_T.unsqueeze(1) * per_token + torch.arange(per_token, device=places_T.device)) % experts
    picks = torch.zeros_like(numbers)
    for prime in prime_factors(experts):
        picks, numbers = picks * prime + numbers % prime, numbers // prime
    return picks


def within(picks_SBk: torch.Tensor, weights_SBk: torch.Tensor, experts: int, capacity: int) -> torch.Tensor:
    """The picks of whole sequences; E is added to those that are beyond `capacity` tokens of an expert in a
    sequence: the ones of least weight, and of equal ones the later. Weights that are equal in bf16 are
    equal: in fp32 those of equal tokens differ by rounding, on each mesh in another way."""
    sequences = torch.arange(picks_SBk.shape[1], device=picks_SBk.device)
    keys = (picks_SBk + experts * sequences.view(-1, 1)).flatten()
    heaviest = weights_SBk.flatten().bfloat16().argsort(descending=True, stable=True)
    order = heaviest[keys[heaviest].argsort(stable=True)]
    sorted_keys, places = keys[order], torch.arange(len(keys), device=keys.device)
    first = torch.searchsorted(sorted_keys, sorted_keys)
    beyond = torch.empty_like(keys).scatter_(0, order, (places - first >= capacity).long())
    return picks_SBk + experts * beyond.view_as(picks_SBk)


def count(picks_Tk: torch.Tensor, experts: int) -> torch.Tensor:
    """The rows of each expert, [E], int64."""
    flat = picks_Tk.flatten()
    return flat.new_zeros(2 * experts).scatter_add_(0, flat, torch.ones_like(flat))[:experts]


def rows_of(counts: torch.Tensor) -> int | None:
    """How many rows leave, where capacity drops some; on a GPU the host waits for it. None: as many as there
    are picks (without values, for a plan)."""
    return None if isinstance(counts, FakeTensor) else int(counts.sum())


def weights_of(scores_TE: torch.Tensor, picks_Tk: torch.Tensor, normalize: bool,
               scale: float) -> torch.Tensor:
    """The weights of a token's experts in its sum, [T, k], fp32."""
    weights = scores_TE.gather(1, picks_Tk)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights if scale == 1.0 else weights * scale


# ---------------------------------------------------------------- rows


class RowOrder(NamedTuple):
    """The order of rows by expert."""

    rows: torch.Tensor  # row -> its place in picks, flattened
    places: torch.Tensor  # inverse permutation; dropped picks map past the last row

    @classmethod
    def of(cls, keys: torch.Tensor, count: int | None = None) -> RowOrder:
        """Of keys [N], equal ones in the order in which they are. `count`: so many are rows, the first ones
        in this order."""
        rows = keys.argsort(stable=True)
        places = torch.arange(rows.shape[0], device=rows.device)
        return cls(rows[:count], torch.empty_like(rows).scatter_(0, rows, places))


class _Summed(torch.autograd.Function):
    """Rows [T k, D] -> the sum of each token's, [T, D]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, times: int):
        ctx.save_for_backward(rows)
        ctx.times = times
        return _sum(x, places, times)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return grads[0].index_select(0, ctx.saved_tensors[0] // ctx.times), None, None, None


def _sum(x: torch.Tensor, places: torch.Tensor, times: int) -> torch.Tensor:
    return _at(x, places).view(-1, times, x.shape[-1]).sum(1)


def _at(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows of x; zeros where there is none."""
    if x.shape[0] < places.shape[0]:
        x, places = torch.cat([x, x.new_zeros(1, *x.shape[1:])]), places.clamp(max=x.shape[0])
    return x.index_select(0, places)


def summed(x_ND: torch.Tensor, order: RowOrder, times: int) -> torch.Tensor:
    return _Summed.apply(x_ND, *order, times)  # pyright: ignore[reportReturnType]


class _Routed(torch.autograd.Function):
    """x [T, D] and weights [T, k] in fp32 -> rows [T k, D + EXTRA bytes] in an order, in the dtype of x. What
    comes back as their gradient is packed likewise: bits, not numbers to compute with."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, order: RowOrder):
        rows, ctx.times = order.rows, weights.shape[1]
        ctx.save_for_backward(order.places)
        packed, of_tokens = _packed(x, weights.flatten().index_select(0, rows))
        torch.index_select(x, 0, rows // ctx.times, out=of_tokens)
        return packed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        (places,), (rows, weights) = ctx.saved_tensors, _unpack(grads[0])
        return _sum(rows, places, ctx.times), _at(weights, places).view(-1, ctx.times), None


def routed(x_TD: torch.Tensor, weights_Tk: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """The rows of all tokens, each with its weight."""
    return _Routed.apply(x_TD, weights_Tk, order)  # pyright: ignore[reportReturnType]


def _packed(like: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed rows of the dtype and width of `like` [.., D], with these weights [N]; and the part of them that
    the rows [N, D] are written to."""
    width = like.shape[1]
    packed = like.new_empty(weights.shape[0], width + EXTRA // like.itemsize)
    behind = packed[:, width:].view(torch.float32)
    behind[:, 0], behind[:, 1:] = weights, 0.0
    return packed, packed[:, :width]


def _unpack(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    width = packed.shape[1] - EXTRA // packed.itemsize
    return packed[:, :width], packed[:, width:].view(torch.float32)[:, 0]


# ---------------------------------------------------------------- products


@dataclass
class Groups:
    """How many of N rows, which are in the order of the experts, belong to each."""

    counts: torch.Tensor  # [e], int64
    rows: int

    @cached_property
    def slices(self) -> list[slice]:
        """Those of each expert. On a GPU the host waits for the counts, once."""
        if isinstance(self.counts, FakeTensor):  # without values: as many for each
            counts = [self.rows // len(self.counts)] * len(self.counts)
            counts[-1] += self.rows - sum(counts)
        else:
            counts = self.counts.tolist()
        ends = [0, *accumulate(counts)]
        return [slice(first, stop) for first, stop in zip(ends, ends[1:], strict=False)]

    def ends(self) -> torch.Tensor:
        return self.counts.cumsum(0).to(torch.int32)


def _product(x: torch.Tensor, matrices: torch.Tensor, groups: Groups,
             out: torch.Tensor | None = None) -> torch.Tensor:
    """Each expert's rows times its matrix: [N, I], [e, I, O] -> [N, O], into `out` if there is one."""
    if by_one_kernel(x, matrices):
        product = F.grouped_mm(x, matrices, offs=groups.ends())
        return product if out is None else out.copy_(product)
    if out is None:
        out = x.new_empty(x.shape[0], matrices.shape[2])
    for rows, matrix in zip(groups.slices, matrices.unbind(), strict=True):
        torch.mm(x[rows], matrix, out=out[rows])
    return out


def by_one_kernel(x: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Whether torch has a kernel for all experts: on a GPU, in bf16, with strides of a multiple of 16 bytes.
    (Rows behind the last end would stay uninitialised: there are none.)"""
    return (device_of(x.device).grouped_mm and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm")
            and not any(size * x.itemsize % 16 for size in matrices.shape[1:]))


# ---------------------------------------------------------------- computation


class _Experts(torch.autograd.Function):
    """Packed rows [N, D + EXTRA bytes] -> [N, D]: those of each expert times its matrices [2, F, D] (gate and
    up) and [D, F], around SwiGLU, times the row's weight. It keeps what the first product gives: all behind
    it is computed again. An expert without rows has a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, up: torch.Tensor, down: torch.Tensor, order: RowOrder | None,
                groups: Groups, grads: WeightGrads):
        ctx.matrices, ctx.order, ctx.groups, ctx.grads = (up, down), order, groups, grads
        rows, weights = _sorted(packed, order)
        opened = _product(rows, up.flatten(1, 2).transpose(1, 2), groups)
        ctx.save_for_backward(packed, opened, up, down)
        answers = _product(_inner(opened, weights), down.transpose(1, 2), groups)
        return answers if order is None else answers.index_select(0, order.places)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        packed, opened, up, down = ctx.saved_tensors
        order, groups, packed = ctx.order, ctx.groups, packed.detach()
        grad = grads[0] if order is None else grads[0].index_select(0, order.rows)
        weights = _unpack(packed)[1]
        inner, grad_opened, grad_weights = _inner_backward(
            _product(grad, down, groups), opened,
            weights if order is None else weights.index_select(0, order.rows))
        operands = (grad_opened, lambda: _sorted(packed, order)[0]), (grad, again(inner))
        taken = [ctx.grads.take_grouped(matrix, *of, lambda: groups.slices) if matrix.requires_grad else None
                 for matrix, of in zip(ctx.matrices, operands, strict=True)]
        back, of_rows = _packed(packed[:, :up.shape[3]], grad_weights)
        _product(grad_opened, up.flatten(1, 2), groups, of_rows)
        return back if order is None else back.index_select(0, order.places), *taken, None, None, None


def _inner(opened: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """SwiGLU between the products, times the weights of rows: [N, 2 F], [N] -> [N, F]. In fp32 inside."""
    gate, up = opened.float().chunk(2, -1)
    return F.silu(gate).mul_(up).mul_(weights.unsqueeze(-1)).to(opened.dtype)


def _inner_backward(grad: torch.Tensor, opened: torch.Tensor,
                    weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output of `_inner` once more; the gradients of what it reads. In fp32 it writes over `grad` and
    `opened`, which nobody reads again, for backward runs once; in 16 bits over copies of them."""
    both, grad, column = opened.float(), grad.float(), weights.unsqueeze(-1)
    gate, up = both.chunk(2, -1)
    silu = F.silu(gate)
    inner = silu * up
    grad_weights = (grad * inner).sum(-1)
    grad.mul_(column)
    grad_silu = grad * up
    torch.mul(grad, silu, out=up)
    torch.ops.aten.silu_backward.grad_input(grad_silu, gate, grad_input=gate)
    return inner.mul_(column).to(opened.dtype), both.to(opened.dtype), grad_weights


def _sorted(packed: torch.Tensor, order: RowOrder | None) -> tuple[torch.Tensor, torch.Tensor]:
    return _unpack(packed if order is None else packed.index_select(0, order.rows))


def compute(packed: torch.Tensor, counts_re: torch.Tensor, up: torch.Tensor, down: torch.Tensor,
            grads: WeightGrads) -> torch.Tensor:
    """Rows that came from r ranks, `counts_re` for each expert from each rank -> what goes back."""
    ranks, experts = counts_re.shape
    order = None
    if ranks > 1 and experts > 1:
        numbers = torch.arange(experts, device=counts_re.device).repeat(ranks)
        order = RowOrder.of(numbers.repeat_interleave(counts_re.flatten(), output_size=len(packed)))
    groups = Groups(counts_re.sum(0), len(packed))
    return _Experts.apply(packed, up, down, order, groups, grads)  # pyright: ignore[reportReturnType]

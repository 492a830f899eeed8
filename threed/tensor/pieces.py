"""Pieces of layers with biases and layer norms, whose backward adds up columns on the way (model.fused).

Separate operations read the gradient of a linear's output once more for its bias, and add gradients of the
residual stream apart from the norm's. Here these are one pass:

    gelu     forward x -> gelu(x)                                backward, with the gradient of the bias of x
    apart    forward queries, keys and values, as views          backward into one buffer, with that bias's
    ended    forward x + dropout(part + bias), and its norm      backward of the norm, with the stream's sum,
                                                                 the dropped gradient, and the bias's
    rows     the gradient of a table's rows, each added up in the order of its tokens, and added to the sum

Kernels of a GPU compute them (`pieces_kernel`), or separate operations (`Separate`), with the bits of what
they stand for. Pieces keep for backward what these would, and no mask of dropout.

Shapes: S sequence, B micro-batch, H width of the residual stream; [...] any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from threed.spec.kernels import WHOLE, strips
from threed.tensor.places import Rows, numbers
from threed.tensor.random import keyed, mask_of

GELU = "tanh"


class DropOf(NamedTuple):
    """Dropout of a tensor [s, B, H], as Fused.drop: nothing of its size is kept."""

    probability: float
    key: tuple[int, str]
    samples: torch.Tensor
    rows: Rows

    @property
    def least(self) -> int:
        """The least of 24 bits of a hash that is kept."""
        return int(self.probability * (1 << 24))

    def bases(self, width: int) -> torch.Tensor:
        """What is hashed of the first number of each token, int64 [s, B]; of the others, one more each."""
        hashes, device = keyed(self.key, self.samples), self.samples.device
        return (hashes.unsqueeze(1) + numbers(self.rows, device) * width).t().contiguous()

    def of(self, x: torch.Tensor) -> torch.Tensor:
        counters = numbers(self.rows, x.device, x.shape[2]).view(-1, len(x), x.shape[2])
        keep = mask_of(self.probability, keyed(self.key, self.samples), counters)
        return x * keep.transpose(0, 1) / (1.0 - self.probability)


class Normed(NamedTuple):
    """A layer norm's parameters."""

    weight: torch.Tensor
    shift: torch.Tensor
    eps: float


class Statistics(NamedTuple):
    """What a norm's backward needs: its input, and two numbers a token."""

    stream: torch.Tensor
    mean: torch.Tensor
    scale: torch.Tensor


class Pieces(Protocol):
    """What computes the pieces. Sums over tokens come in fp32 or in the dtype of what is summed."""

    def gelu(self, x: torch.Tensor, /) -> torch.Tensor: ...

    def gelu_backward(self, x: torch.Tensor, grad: torch.Tensor, sums: bool,
                      /) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradient of x, [S, B, F]; and with `sums` its sum over tokens, [F]."""
        ...

    def joined(self, grads: Sequence[torch.Tensor], sums: bool,
               /) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[S, B, K, g, E] of each -> [S, B, K, all g, E]; and with `sums` its sum over tokens, flat."""
        ...

    def ended(self, x: torch.Tensor, part: torch.Tensor | None, bias: torch.Tensor | None,
              drop: DropOf | None, norm: Normed | None, /) -> tuple[torch.Tensor, Any, Any, Any]:
        """x + dropout(part + bias), or x where there is no part, [s, B, H]; its norm, and the mean and scale
        of each token, or None."""
        ...

    def ended_backward(self, grad: torch.Tensor | None, of_normed: torch.Tensor | None,
                       kept: Statistics | None, norm: Normed | None, drop: DropOf | None,
                       wanted: tuple[bool, bool], /) -> tuple[torch.Tensor, torch.Tensor, Any, Any, Any]:
        """The gradients of x and of part; and of the bias, the norm's weight and its shift. `grad`: of the
        stream. `wanted`: whether the bias, and whether the norm has a gradient."""
        ...

    def add_rows(self, into: torch.Tensor, ids: torch.Tensor, grads: torch.Tensor, /) -> None:
        """Add to row ids[i] of `into` [V, H], for each i in order, grads[i], [..., H]. Ids from V on are
        left out."""
        ...


class Separate:
    """As Pieces, by separate operations."""

    @staticmethod
    def gelu(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x, approximate=GELU)

    @staticmethod
    def gelu_backward(x: torch.Tensor, grad: torch.Tensor,
                      sums: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        made = torch.ops.aten.gelu_backward(grad, x, approximate=GELU)
        return made, made.sum((0, 1)) if sums else None

    @staticmethod
    def joined(grads: Sequence[torch.Tensor], sums: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        made = torch.cat(list(grads), -2)
        return made, made.flatten(2).sum((0, 1)) if sums else None

    @staticmethod
    def ended(x: torch.Tensor, part: torch.Tensor | None, bias: torch.Tensor | None, drop: DropOf | None,
              norm: Normed | None) -> tuple[torch.Tensor, Any, Any, Any]:
        if part is not None:
            part = part if bias is None else part + bias
            x = x + (part if drop is None else drop.of(part))
        if norm is None:
            return x, None, None, None
        weight, shift, eps = norm
        return x, *torch.native_layer_norm(x, x.shape[-1:], weight, shift, eps)

    @staticmethod
    def ended_backward(grad: torch.Tensor | None, of_normed: torch.Tensor | None, kept: Statistics | None,
                       norm: Normed | None, drop: DropOf | None,
                       wanted: tuple[bool, bool]) -> tuple[torch.Tensor, torch.Tensor, Any, Any, Any]:
        of_weight = of_shift = None
        if norm is not None:
            assert of_normed is not None and kept is not None
            stream, mean, scale = kept
            made, of_weight, of_shift = torch.ops.aten.native_layer_norm_backward(
                of_normed, stream, stream.shape[-1:], mean, scale, norm.weight, norm.shift,
                [True, wanted[1], wanted[1]])
            grad = made if grad is None else grad + made
        assert grad is not None
        of_part = grad if drop is None else drop.of(grad)
        return grad, of_part, of_part.sum((0, 1)) if wanted[0] else None, of_weight, of_shift

    @staticmethod
    def add_rows(into: torch.Tensor, ids: torch.Tensor, grads: torch.Tensor) -> None:
        ids = ids.clamp(max=len(into))  # what is left out comes last
        into.add_(torch.ops.aten.embedding_dense_backward(grads, ids, len(into) + 1, -1, False)[:-1])


Start = Callable[..., None]  # pieces_kernel.start


class Kernels:
    """As Pieces, by kernels that `start` starts, on tensors that are made here."""

    def __init__(self, start: Start):
        self._start = start

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._start("gelu", (_over(x.numel(), 4096),), x, out, x.numel(), BLOCK=4096, warps=8)
        return out

    def gelu_backward(self, x: torch.Tensor, grad: torch.Tensor,
                      sums: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, grad = x.contiguous(), grad.contiguous()
        out, width = torch.empty_like(x), x.shape[-1]
        rows = x.numel() // width
        number = strips(width, rows, False)
        added = x.new_empty((number, width) if sums else 0, dtype=torch.float32)
        self._start("gelu_backward", (number, _over(width, 256)), x, grad, out, added, rows, width, ROWS=16,
                    COLUMNS=256, SUMS=sums, warps=8)
        return out, added.sum(0) if sums else None

    def joined(self, grads: Sequence[torch.Tensor], sums: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        *shape, _, size = grads[0].shape
        out = grads[0].new_empty((*shape, sum(each.shape[-2] for each in grads), size))
        width = out[0, 0].numel()
        number = strips(width, shape[0] * shape[1], False)
        added = out.new_empty((number, width) if sums else 0, dtype=torch.float32)
        first = 0
        for grad in grads:
            group = grad.shape[-2]
            place = first * size
            self._copy(grad, out.view(-1)[place:], added.view(-1)[place:], (number, width, out.shape[3]))
            first += group
        return out, added.sum(0) if sums else None

    def _copy(self, grad: torch.Tensor, out: torch.Tensor | None, sums: torch.Tensor,
              shape: tuple[int, int, int]) -> None:
        """Copy `grad` to `out`; sum its columns. `shape`: strips; `out`'s numbers a token, heads a group."""
        (number, width, heads), (places, batch, _, group, size) = shape, grad.shape
        flat = grad.flatten(2, 3)  # a view, where heads lie evenly
        flat = flat if flat.stride(-1) == 1 else flat.contiguous()
        copies, wanted = out is not None, sums.numel() > 0
        self._start("copy", (number, flat.shape[2]), flat, out if copies else flat, sums, places * batch,
                    batch, *flat.stride()[:3], group, width, heads * size, width, SIZE=size, ROWS=32,
                    COLUMNS=_power(size), COPIES=copies, SUMS=wanted, warps=4)

    def _column_sums(self, grad: torch.Tensor) -> torch.Tensor:
        """[s, B, H] -> [H]."""
        width, size = grad.shape[-1], 128
        number = strips(width, grad.numel() // width, False)
        while width % size:
            size //= 2
        added = grad.new_empty((number, width), dtype=torch.float32)
        self._copy(grad.unflatten(-1, (-1, 1, size)), None, added.view(-1), (number, width, 1))
        return added.sum(0)

    def ended(self, x: torch.Tensor, part: torch.Tensor | None, bias: torch.Tensor | None,
              drop: DropOf | None, norm: Normed | None) -> tuple[torch.Tensor, Any, Any, Any]:
        if norm is None and part is None:
            return x, None, None, None
        x, width = x.contiguous(), x.shape[-1]
        stream = x if part is None else torch.empty_like(x)
        normed = torch.empty_like(x) if norm is not None else None
        mean, scale = (x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) if norm is not None else None
                       for _ in range(2))
        weight, shift, eps = norm or (x, x, 0.0)
        block = _power(width)
        self._start("ended", (x.numel() // width,), x, x if part is None else part.contiguous(), _or(bias, x),
                    _bases(drop, x), weight, shift, stream, _or(normed, x), _or(mean, x), _or(scale, x),
                    width, eps, *_limits(drop), BLOCK=block, PART=part is not None, BIAS=bias is not None,
                    DROP=drop is not None, NORM=norm is not None, warps=_warps(block))
        return stream, normed, mean, scale

    def ended_backward(self, grad: torch.Tensor | None, of_normed: torch.Tensor | None,
                       kept: Statistics | None, norm: Normed | None, drop: DropOf | None,
                       wanted: tuple[bool, bool]) -> tuple[torch.Tensor, torch.Tensor, Any, Any, Any]:
        grad = grad if grad is None else grad.contiguous()
        if norm is None and drop is None:
            assert grad is not None
            return grad, grad, self._column_sums(grad) if wanted[0] else None, None, None
        like = grad if of_normed is None else of_normed.contiguous()
        assert like is not None
        width = like.shape[-1]
        rows = like.numel() // width
        of_x = grad if norm is None else torch.empty_like(like)
        of_part = of_x if drop is None else torch.empty_like(like)
        assert of_x is not None and of_part is not None
        number, block = strips(width, rows, True), _power(width)
        sums = like.new_empty(3 if wanted[0] else 2 if wanted[1] else 0, number, width, dtype=torch.float32)
        of_norm = like, *(kept or (like, like, like))
        weight = like if norm is None else norm.weight
        rest = weight, _bases(drop, like), of_x, of_part, sums, rows, width, *_limits(drop)
        what = {"GRAD": grad is not None, "NORM": norm is not None, "DROP": drop is not None,
                "BIAS": wanted[0], "LEARNS": wanted[1]}
        if width <= WHOLE:
            self._start("ended_backward", (number,), _or(grad, like), *of_norm, *rest, BLOCK=block, **what,
                        warps=_warps(block))
        else:
            means = like.new_empty(2 if norm is not None else 0, rows, dtype=torch.float32)
            if norm is not None:
                self._start("means", (rows,), *of_norm, weight, means, rows, width, BLOCK=block,
                            warps=_warps(block))
            self._start("columns", (number, _over(width, 256)), _or(grad, like), *of_norm, means, *rest,
                        ROWS=8, COLUMNS=256, **what, warps=8)
        added = sums[0 if wanted[1] else 2:].sum(1)
        of_weight, of_shift = added[:2] if wanted[1] else (None, None)
        return of_x, of_part, added[-1] if wanted[0] else None, of_weight, of_shift

    def add_rows(self, into: torch.Tensor, ids: torch.Tensor, grads: torch.Tensor) -> None:
        grads, width = grads.contiguous(), into.shape[-1]
        found, order = ids.reshape(-1).sort(stable=True)
        ends = torch.searchsorted(found, found, right=True)
        block = min(1024, _power(width))
        self._start("rows", (len(found), _over(width, block)), into, grads, found, order, ends, len(into),
                    width, ROWS=8, BLOCK=block, warps=4)


def _over(size: int, block: int) -> int:
    return -(-size // block)


def _power(width: int) -> int:
    """A power of two: what triton's ranges must be."""
    return max(16, 1 << (width - 1).bit_length())


def _warps(block: int) -> int:
    """8 numbers of a token a thread."""
    return min(32, max(1, block // 256))


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A kernel does not read what it is not to read, but gets an address."""
    return other if tensor is None else tensor


def _bases(drop: DropOf | None, x: torch.Tensor) -> torch.Tensor:
    return x if drop is None else drop.bases(x.shape[-1])


def _limits(drop: DropOf | None) -> tuple[int, float]:
    return (0, 1.0) if drop is None else (drop.least, 1.0 - drop.probability)


# ---- functions


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, sums: Pieces):
        ctx.save_for_backward(x)
        ctx.sums = sums
        return sums.gelu(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        (x,) = ctx.saved_tensors
        return *ctx.sums.gelu_backward(x, grads[0], ctx.needs_input_grad[1]), None


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, runs: Sequence[int], sums: Pieces):
        ctx.sums = sums
        return x.split(runs, -2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        return *ctx.sums.joined(grads, ctx.needs_input_grad[1]), None, None


class _Ended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, part: torch.Tensor | None, bias: torch.Tensor | None,
                drop: DropOf | None, norm: Normed | None, sums: Pieces, *parameters: torch.Tensor):
        """`parameters`: those of the norm, for their gradients."""
        stream, normed, mean, scale = sums.ended(x, part, bias, drop, norm)
        ctx.drop, ctx.sums, ctx.eps = drop, sums, None if norm is None else norm.eps
        if norm is None:
            return stream
        ctx.save_for_backward(stream, mean, scale, norm.weight, norm.shift)
        return stream if part is not None else x.view_as(x), normed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        needs = ctx.needs_input_grad
        kept, norm, of_normed = None, None, None
        if ctx.eps is not None:
            stream, mean, scale, weight, shift = ctx.saved_tensors
            kept, norm, of_normed = Statistics(stream, mean, scale), Normed(weight, shift, ctx.eps), grads[1]
        of_x, of_part, of_bias, *rest = ctx.sums.ended_backward(grads[0], of_normed, kept, norm,
                                                                ctx.drop, (needs[2], any(needs[6:])))
        return (of_x, of_part if needs[1] else None, of_bias, None, None, None,
                *(rest if norm is not None else ()))


def gelu(x: torch.Tensor, bias: torch.Tensor | None, sums: Pieces) -> torch.Tensor:
    """GELU of what holds `bias` already, whose gradient it adds up. [S, B, F], [F] -> [S, B, F]."""
    return _Gelu.apply(x, bias, sums)  # pyright: ignore[reportReturnType]


def apart(x: torch.Tensor, bias: torch.Tensor | None, runs: Sequence[int],
          sums: Pieces) -> tuple[torch.Tensor, ...]:
    """Views of x, [S, B, K, all g, E] -> [S, B, K, g, E] each, of a linear's output that holds `bias`, whose
    gradient it adds up."""
    return _Apart.apply(x, bias, runs, sums)  # pyright: ignore[reportReturnType]


def ended(x: torch.Tensor, part: torch.Tensor, bias: torch.Tensor | None, drop: DropOf | None,
          norm: Normed | None, sums: Pieces) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x + dropout(part + bias), [s, B, H], and its norm."""
    if norm is None:
        return _Ended.apply(x, part, bias, drop, None, sums), None  # pyright: ignore[reportReturnType]
    return _Ended.apply(x, part, bias, drop, norm, sums, *norm[:2])  # pyright: ignore[reportReturnType]


def normed(x: torch.Tensor, norm: Normed, sums: Pieces) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x, and x for whatever else reads it: the two gradients are summed in one pass."""
    stream, value = _Ended.apply(x, None, None, None, norm, sums, *norm[:2])  # pyright: ignore
    return value, stream

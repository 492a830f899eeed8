"""Measure the cost of a layer in one run of the layer alone. The cost that a layer declares must equal it.

The layer runs with groups that send nothing, so that one process can be any rank of a mesh of any size:
shapes, bytes and FLOPs are right, but values are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from threed.base.axes import axes_of
from threed.base.mesh import GROUPS
from threed.comm.group import Group, Handle
from threed.models.layers.base import Layer, Out
from threed.models.layers.handing import handing
from threed.schema import ModelConfig
from threed.spec.kernels import AttentionKernel, Kernel, Moved, Product
from threed.spec.parameter import Cost, Parameter, Saved, Share, Traffic
from threed.tensor.context import Batch, Context
from threed.tensor.documents import Documents
from threed.tensor.layers import WeightGrads
from threed.tensor.precision import DTYPES
from threed.tensor.saving import SavingPolicy


class SilentGroup(Group):
    """Counts bytes and rings but sends nothing: results are as if every rank had this rank's values."""

    # as Traffic has them
    rings = exchanged = exchanges = 0

    def _count(self, tensor: torch.Tensor, rounds: int, given: torch.Tensor) -> None:
        self.rings += rounds * (self.size() > 1)
        super()._count(tensor, rounds, given)

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Handle:
        return Handle(None)

    def _reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, add: bool,
                        scratch: torch.Tensor | None) -> Handle:
        output.view(-1).copy_(tensor.view(-1)[:output.numel()])
        return Handle(None)

    def _all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        output.view(self.size(), -1).copy_(tensor.view(1, -1).expand(self.size(), -1))
        return Handle(None)

    def _exchange(self, output: torch.Tensor, tensor: torch.Tensor, gives: Sequence[int],
                  takes: Sequence[int]) -> Handle:
        self.exchanged += (len(tensor) - gives[self.rank()]) * tensor[:1].nbytes
        self.exchanges += 1
        output.zero_()  # how many rows another rank would have is not known
        return Handle(None)


def silent_groups(share: Share, sent: Counter[str],
                  ranks: Mapping[str, int] | None = None) -> dict[str, SilentGroup]:
    """All groups, of the last rank of each. `ranks`: group -> its ranks, where it is not an axis of `share`;
    one, where it is not there."""
    sizes = {**dict.fromkeys(GROUPS, 1), **(ranks or {}),
             **{axis: share.over(axis) for axis in (*axes_of("tokens"), *axes_of("parameters"))}}
    return {name: SilentGroup(name, range(size), size - 1, sent) for name, size in sizes.items()}


def _roots(out: Out) -> list[torch.Tensor]:
    """What backward begins with."""
    every = (out.x, *out.makes.values(), out.loss, out.penalty)
    return [root for root in every if root is not None and root.requires_grad]


class KernelCounter(TorchDispatchMode):
    """Counts the products of matrices and the attention that run under it, and the bytes that all other
    operations read and write; of these, what moves nothing does not count. `weights`: numbers of storages
    whose products count as those of weights; None: every product counts so."""

    def __init__(self, weights: Collection[int] | None = None) -> None:
        super().__init__()
        self.products: list[Product] = []
        self.attention: list[Kernel] = []
        self.bytes, self.count, self.weights = 0, 0, weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in ("mm", "addmm", "bmm"):
            left, right = args[-2:]
            *batch, m, k = left.shape
            count = batch[0] if batch else 1
            self.products.append(Product(m, right.shape[-1], k, count, self._of_weight(left, right)))
        elif name == "convolution":  # as the product of what each number of the result is made of
            k, channels = args[1][0].numel(), args[1].shape[0]
            self.products.append(Product(out.numel() // channels, channels, k, 1, self._of_weight(args[1])))
        elif name.startswith("_scaled_dot_product"):
            if "backward" not in name:
                self.attention += _attention(*args[:3])
        elif not (func.is_view or name in _FREE):
            self._move(name, func, [args, kwargs], out)
        return out

    def _of_weight(self, *operands: torch.Tensor) -> bool:
        return self.weights is None or any(_number(each) in self.weights for each in operands)

    def _move(self, name: str, func: Any, given: Any, out: Any) -> None:
        read = [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]
        written = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        if name in _SPARSE:  # they touch a few elements of their first tensor
            read = read[1:]
        if func._schema.is_mutable:
            written = written[:1] if name not in _SPARSE else []
            read = [each for each in read if name != "copy_" or not any(each is one for one in written)]
        self.bytes += sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in (*read, *written))
        self.count += 1


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Kernel]:
    """[B, N, S, E], [B, K, T, E], [B, K, T, F]: causal or not, all of the square counts."""
    size, heads, seq, width = q.shape
    if k.shape[2] == seq and v.shape[-1] == width:
        return [AttentionKernel(size, heads, k.shape[1], seq, width)]
    return [Product(seq, k.shape[2], width, size * heads, False),
            Product(seq, v.shape[-1], k.shape[2], size * heads, False)]


# Operations that move no bytes (an _unsafe_view is none of torch's views), and those that touch few elements.
_FREE = ("_unsafe_view", "new_empty", "empty_like", "empty", "detach", "slice_backward", "ones_like")
_SPARSE = ("index", "index_put", "index_put_", "gather", "embedding")


class Measured:
    """A layer as one rank of `share` has it, and its measured cost."""

    def __init__(self, layer: Layer, model: ModelConfig, share: Share, running: bool = False,
                 pieces: Iterable[str] = ()):
        """`running`: whether the layer's input is a running softmax. `pieces`: the activation pieces that are
        computed again."""
        self.layer, self.share, self.sent = layer, share, Counter()
        dtype = DTYPES["fp32" if share.element == 4 else "bf16"]
        self.groups = groups = silent_groups(share, self.sent)
        self.grads = WeightGrads()
        self.context = Context(model, groups, bool(share.sequence), dtype, self.grads,
                               SavingPolicy(tuple(pieces)), tokens=(share.tokens - 1, share.tokens),
                               by_heads=share.by_heads)
        self.weights = {p.key: weight_of(p, share, dtype) for p in layer.parameters()}
        layer.build(self.context, self.weights)
        stream = self.context.places().size, share.sequences, model.hidden
        length = share.length(model.seq_len)
        self.x = (torch.randn(2, length, share.sequences) if running else torch.randn(stream, dtype=dtype))
        hands = handing(layer)
        shapes = {name: hands.shapes.get(name, stream) for name in hands.reads}
        shapes = {name: shape(share) if callable(shape) else shape for name, shape in shapes.items()}
        self.reads = {name: torch.zeros(shape, dtype=getattr(torch, hands.without_grad[name]))
                      if name in hands.without_grad else
                      torch.randn(shape, dtype=dtype, requires_grad=True)
                      for name, shape in shapes.items()}
        tokens = torch.randint(0, model.vocab, (share.sequences, model.seq_len + 1))
        samples = torch.arange(share.sequences)
        count = torch.tensor(tokens.numel()) if share.masked else tokens.numel()
        documents = Documents.of(_halves(share.sequences, model.seq_len)) if share.documents else None
        self.batch = Batch(tokens[:, :-1].clone(), tokens[:, 1:].clone(), samples, 0, count,
                           documents=documents)
        if share.tokens > 1:
            self.batch = self.batch.at(self.context.places(documents))

    def cost(self, first: bool = False) -> Cost:
        """`first`: whether the layer reads only tokens."""
        counter = FlopCounterMode(display=False, custom_mapping=_RECTANGLES)
        with counter as flops, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            self._forward(None if first else self.x,
                          {name: read.detach() for name, read in self.reads.items()})
        self._sent("forward")  # of that run: not counted
        leaf = None if first or self.layer.adds else self.x.detach().requires_grad_()
        saved: dict[int, torch.Tensor] = {}  # by storage

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.setdefault(_number(tensor), tensor)
            return tensor

        # Hooks for pieces that are computed again run inside this one; `pack` sees only what they still save.
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            out = self._forward(self.x if leaf is None and not first else leaf)
        sent = self._sent("forward")
        shared = list(self.context.rotary(torch.device("cpu"), self.share.documents))  # one table a rank
        if isinstance(self.batch.num_tokens, torch.Tensor):  # one number
            shared.append(self.batch.num_tokens)
        # Until backward what it reads is a slot of its own, but for what forward uses up.
        reads = [read for name, read in self.reads.items() if name not in handing(self.layer).spent]
        others = {_number(tensor) for tensor in (*self.weights.values(), *reads, *shared)}
        handed = {_number(tensor) for tensor in out.makes.values()}  # they are slots of their own
        kept = tuple(Saved(f"{list(tensor.shape)} {tensor.dtype}", tensor.untyped_storage().nbytes())
                     for number, tensor in saved.items() if number not in others | handed)
        roots = _roots(out)
        passes_on = out.x is not None and not out.x.requires_grad
        if not roots or (passes_on and not self.layer.adds):  # frozen, and it reads tokens
            return Cost(_product(flops), kept, 0, sent)
        grads = [torch.ones_like(root) for root in roots]
        if leaf is None and not self.reads:  # all of its backward belongs to the weights' half
            operands = sum(saved.bytes for saved in kept) + (0 if self.layer.adds else grads[0].nbytes)
            torch.autograd.backward(roots, grads)
            return Cost(_product(flops), kept, operands, sent | self._sent("input"))
        self.grads.put_off = put_off = []
        torch.autograd.backward(roots, grads)
        self.grads.put_off = None
        sent |= self._sent("input")
        # passed to the unit before, unchanged
        passed = {_number(grads[0])} if self.layer.adds and not passes_on else set()
        held = {_number(tensor): tensor for tensor in _held(put_off)}
        operands = sum(tensor.untyped_storage().nbytes() for number, tensor in held.items()
                       if number not in others | passed)
        with torch.no_grad():
            for product in put_off:
                product()
        return Cost(_product(flops), kept, operands, sent | self._sent("weight"))

    def kernels(self, first: bool = False) -> tuple[list[Product], Moved]:
        """The matrix products of forward; and one `Moved` for all other kernels but attention, with their
        bytes in forward and in backward. `first`: whether the layer reads only tokens."""
        leaf = None if first else self.x.detach().requires_grad_()
        with KernelCounter() as forward:
            out = self._forward(leaf)
        roots = _roots(out)
        grads = [torch.ones_like(root) for root in roots]
        with KernelCounter() as backward:
            torch.autograd.backward(roots, grads)
        return forward.products, Moved("measured", forward.bytes, backward.bytes,
                                       (forward.count, backward.count))

    def _sent(self, phase: str) -> dict[tuple[str, str], Traffic]:
        """What was sent since it was asked before, in a phase."""
        calls = dict.fromkeys(self.sent, Traffic())
        for group in self.groups.values():
            if (axis := GROUPS[group.name].counts) in calls:
                calls[axis] += Traffic(0, group.rings, group.exchanged, group.exchanges)
            group.rings = group.exchanged = group.exchanges = 0
        sent = {(phase, axis): calls[axis] + Traffic(size) for axis, size in self.sent.items() if size}
        self.sent.clear()
        return sent

    def _forward(self, x: torch.Tensor | None, reads: Mapping[str, torch.Tensor] | None = None) -> Out:
        out = self.layer(x, self.batch, **(self.reads if reads is None else reads))
        return out if isinstance(out, Out) else Out(out)


def _of_rectangle(q: Sequence[int], k: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of attention's kernel for some of the queries of a sequence (tensor/rectangles)."""
    size, heads, rows, width = q
    return 4 * size * heads * rows * k[2] * width


_RECTANGLES = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _of_rectangle}


def _halves(sequences: int, length: int) -> torch.Tensor:
    """Positions of two documents in each sequence."""
    places = torch.arange(length)
    return torch.where(places < length // 2, places, places - length // 2).repeat(sequences, 1)


def _product(flops: FlopCounterMode) -> tuple[Kernel, ...]:
    """A product with all FLOPs."""
    return (Product(flops.get_total_flops() // 2, 1, 1),)


def weight_of(parameter: Parameter, share: Share, dtype: torch.dtype) -> torch.nn.Parameter:
    """A rank's part of a parameter, with any values. Products for its gradient are computed nowhere."""
    weight = torch.nn.Parameter(torch.randn(parameter.module_shape(share.ranks)).to(dtype), parameter.trains)
    weight.add_product = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]  (see tensor/layers.WeightGrads)
    weight.add_products = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    weight.add_rows = lambda ids, grad, sums: sums.add_rows(weight.detach(), ids, grad)  # pyright: ignore
    weight.add_count = lambda _: None  # pyright: ignore[reportAttributeAccessIssue]
    return weight


def _number(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _held(calls: list[Callable[[], None]]) -> list[torch.Tensor]:
    """Tensors in the closures of functions."""
    tensors: list[torch.Tensor] = []
    for call in calls:
        for value in tree_leaves([cell.cell_contents for cell in call.__closure__ or ()]):
            if isinstance(value, torch.Tensor):
                tensors.append(value)
            elif _closes(value):
                tensors += _held([value])
    return tensors


def _closes(value: Any) -> bool:
    return callable(value) and getattr(value, "__closure__", None) is not None

"""How the tensors that one unit hands to the next lie in a slot.

The residual stream is one tensor, and the slot holds it as it is. User layers may hand on any
tree (tuples, lists, dictionaries) of tensors of any dtype. Then the slot holds one flat buffer in the dtype
of compute, in which each tensor has its place:

    act     | hidden fp32 [2, 16, 8] |.| ids int64 [2, 16] | mask bool [16] |....|      . alignment
    grad    | of hidden              |                 only what gets a gradient

So messages, kept inputs and offload move one buffer, whatever is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from threed.base.quantity import round_up
from threed.spec.parameter import Outflow, Share

ALIGNED = 16  # bytes
PLAIN = (int, float, bool, str, type(None))  # may stand in a tree beside tensors, if they are always the same


class PackedStream(Protocol):
    """What a unit hands to the next one."""

    def open(self, slot: torch.Tensor, backward: bool) -> tuple[Any, list[torch.Tensor]]:
        """The value that layers read from a slot `act`; with `backward`, leaves of a new graph, which are
        returned, too."""
        ...

    def close(self, value: Any, who: str) -> torch.Tensor:
        """The content of a slot `act` for a value that the layers `who` have made."""
        ...

    def roots(self, value: Any) -> list[torch.Tensor]:
        """The tensors of a value that get gradients."""
        ...

    def gradients(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """The gradients of the roots, which a slot `grad` holds."""
        ...

    def gradient(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The content of a slot `grad`, from the leaves of `open`."""
        ...

    def empty(self, kind: str, device: torch.device) -> torch.Tensor:
        """Memory for a slot `act` or `grad`."""
        ...

    def whole(self, kept: torch.Tensor) -> torch.Tensor:
        """A slot `act`, from its elements in a row."""
        ...


class Whole:
    """The residual stream, or a running softmax: one tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        self.shape, self.dtype = shape, dtype

    def open(self, slot: torch.Tensor, backward: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaf = slot.detach()
        return (leaf.requires_grad_(), [leaf]) if backward else (leaf, [])

    def close(self, value: Any, who: str) -> torch.Tensor:
        assert isinstance(value, torch.Tensor), f"{who} has returned no residual stream"
        return value

    def roots(self, value: torch.Tensor) -> list[torch.Tensor]:
        return [value]

    def gradients(self, slot: torch.Tensor) -> list[torch.Tensor]:
        return [slot]

    def gradient(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        (leaf,) = leaves
        assert leaf.grad is not None
        return leaf.grad

    def empty(self, kind: str, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def whole(self, kept: torch.Tensor) -> torch.Tensor:
        return kept.view(self.shape)


class Leaf(NamedTuple):
    """A tensor of a tree."""

    where: str  # in the tree, such as ['hidden'] or [0]
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool  # whether it gets a gradient
    start: int  # first byte in the buffer
    grad_start: int  # first byte in the buffer of gradients

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def text(self) -> str:
        return f"{self.where or 'the tensor'} {str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Schema:
    """The tensors of a tree, and their places in a buffer."""

    tree: TreeSpec
    leaves: tuple[Leaf | Any, ...]  # of the tree, in order: a Leaf for a tensor, or a plain value
    bytes: int
    grad_bytes: int

    @classmethod
    def of(cls, value: Any) -> Schema:
        """The schema of a tree of tensors. ValueError where something else is in it."""
        pairs, tree = tree_flatten_with_path(value)
        leaves, start, grad_start = list[Any](), 0, 0
        for path, each in pairs:
            if isinstance(each, torch.Tensor):
                places = start, grad_start
                leaf = Leaf(keystr(path), tuple(each.shape), each.dtype, each.requires_grad, *places)
                start += round_up(leaf.bytes, ALIGNED)
                grad_start += round_up(leaf.bytes, ALIGNED) if leaf.grad else 0
                leaves.append(leaf)
            elif isinstance(each, PLAIN):
                leaves.append(each)
            else:
                raise ValueError(f"{keystr(path) or 'it'} is a {type(each).__name__}: only tensors, and "
                                 "tuples, lists and dictionaries of them, are handed on")
        return cls(tree, tuple(leaves), start, grad_start)

    @property
    def tensors(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Leaf)]

    def computed_in(self, dtype: torch.dtype) -> Schema:
        """What was measured in bf16 is also right for fp16, but for the name of the dtype."""
        if dtype != torch.float16:
            return self
        return replace(self, leaves=tuple(
            leaf._replace(dtype=dtype) if isinstance(leaf, Leaf) and leaf.dtype == torch.bfloat16 else leaf
            for leaf in self.leaves))

    @property
    def output(self) -> Outflow:
        return Outflow(self.bytes, self.grad_bytes)

    def text(self) -> str:
        return ", ".join(leaf.text() if isinstance(leaf, Leaf) else repr(leaf) for leaf in self.leaves)

    def key(self) -> object:
        """Equal for equal schemas."""
        return str(self.tree), self.leaves

    def example(self, make: Callable[[Leaf], torch.Tensor]) -> Any:
        """A value with this schema."""
        return tree_unflatten([make(leaf) if isinstance(leaf, Leaf) else leaf for leaf in self.leaves],
                              self.tree)


@runtime_checkable
class Packs(Protocol):
    """A layer that may hand a tree of tensors to the next layer, and not one tensor (None)."""

    def schema(self, share: Share) -> Schema | None: ...


class Packed:
    """A tree of tensors in one buffer."""

    def __init__(self, schema: Schema, dtype: torch.dtype):
        """`dtype`: of the buffer, whatever is in it."""
        self.schema = schema = schema.computed_in(dtype)
        self.dtype, self._graded = dtype, [leaf for leaf in schema.tensors if leaf.grad]

    def open(self, slot: torch.Tensor, backward: bool) -> tuple[Any, list[torch.Tensor]]:
        leaves = []

        def tensor(leaf: Leaf) -> torch.Tensor:
            view = self._view(slot, leaf, leaf.start).detach()
            if backward and leaf.grad:
                leaves.append(view.requires_grad_())
            return view

        return self.schema.example(tensor), leaves

    def close(self, value: Any, who: str) -> torch.Tensor:
        given, tree = tree_flatten(value)
        same = tree == self.schema.tree and len(given) == len(self.schema.leaves) and all(
            map(_fits, given, self.schema.leaves))
        if not same:
            shown = ", ".join(f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}"
                              if isinstance(each, torch.Tensor) else repr(each) for each in given)
            raise ValueError(f"{who} has returned {shown}, and when it was measured {self.schema.text()}: "
                             "what a layer hands on must have the same shapes, dtypes and structure always")
        return self._pack([each for each in given if isinstance(each, torch.Tensor)],
                          [leaf.start for leaf in self.schema.tensors], self.schema.bytes)

    def roots(self, value: Any) -> list[torch.Tensor]:
        return [each for each, leaf in zip(tree_flatten(value)[0], self.schema.leaves, strict=True)
                if isinstance(leaf, Leaf) and leaf.grad]

    def gradients(self, slot: torch.Tensor) -> list[torch.Tensor]:
        return [self._view(slot, leaf, leaf.grad_start) for leaf in self._graded]

    def gradient(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        return self._pack(grads, [leaf.grad_start for leaf in self._graded], self.schema.grad_bytes)

    def empty(self, kind: str, device: torch.device) -> torch.Tensor:
        size = self.schema.bytes if kind == "act" else self.schema.grad_bytes
        return torch.empty(size // self.dtype.itemsize, dtype=self.dtype, device=device)

    def whole(self, kept: torch.Tensor) -> torch.Tensor:
        return kept.view(-1)

    def _view(self, buffer: torch.Tensor, leaf: Leaf, start: int) -> torch.Tensor:
        if len(self.schema.tensors) == 1 and leaf.dtype == self.dtype:  # the buffer is the tensor
            return buffer.view(-1)[:torch.Size(leaf.shape).numel()].view(leaf.shape)
        part = buffer.view(-1).view(torch.uint8)[start:start + leaf.bytes]
        return part.view(leaf.dtype).view(leaf.shape)

    def _pack(self, tensors: Sequence[torch.Tensor], starts: Sequence[int], size: int) -> torch.Tensor:
        if len(tensors) == 1 and tensors[0].dtype == self.dtype and tensors[0].nbytes == size:
            return tensors[0].detach().reshape(-1)  # it is the buffer itself, without a copy
        device = tensors[0].device if tensors else torch.device("cpu")
        buffer = torch.zeros(size // self.dtype.itemsize, dtype=self.dtype, device=device)
        flat = buffer.view(torch.uint8)
        for tensor, start in zip(tensors, starts, strict=True):
            part = flat[start:start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            part.copy_(tensor.detach())
        return buffer


def _fits(given: Any, leaf: Any) -> bool:
    if isinstance(leaf, Leaf):
        return (isinstance(given, torch.Tensor) and tuple(given.shape) == leaf.shape
                and given.dtype == leaf.dtype)
    return type(given) is type(leaf) and given == leaf

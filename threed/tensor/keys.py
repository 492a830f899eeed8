"""Keys: attention of a part of each sequence to the keys of all of it, which other ranks have.

    keys and values of this rank's tokens  --gathered over cp-->  of all tokens, in the order of the sequence
    each chunk of queries attends to the keys up to its own end: one softmax over all of them

Backward gathers keys and values again, unless they are kept (activation.pieces). Their gradients are added up
in fp32, also where they have 16 bits, and each rank gets the sum of its own.

Shapes: B micro-batch, s the tokens of this rank, S those of the sequence, N query heads, K key and value
heads, E head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from threed.comm.group import Group
from threed.tensor.documents import Documents
from threed.tensor.places import Places, in_order, runs_of, taken
from threed.tensor.rectangles import Rectangle, kernel, lower_right


class Shared(NamedTuple):
    """The ranks that share each sequence, and the tokens of this one."""

    group: Group
    places: Places
    kernel: Callable[..., Rectangle] = kernel

    def gathered(self, *parts: torch.Tensor) -> torch.Tensor:
        """Tensors [B, K, s, E] of all ranks, [parts, B, K, S, E]."""
        own = torch.stack(parts)
        every = own.new_empty(self.group.size(), *own.shape)
        self.group.all_gather(every, own).wait()
        return of_all(every, self.places)

    def summed(self, whole: torch.Tensor) -> torch.Tensor:
        """Of the sum of all ranks' tensors [parts, B, K, S, E], this rank's tokens, [parts, B, K, s, E]."""
        every = of_each(whole, self.places)
        own = torch.empty_like(every[0])
        self.group.reduce_scatter(own, every).wait()
        return own


def of_all(every: torch.Tensor, places: Places) -> torch.Tensor:
    """The keys and values of each rank, [ranks, 2, B, K, s, E], as of all tokens, [2, B, K, S, E]."""
    return in_order(every.unbind(), places.deals, 3, 1)


def of_each(whole: torch.Tensor, places: Places) -> torch.Tensor:
    """And back."""
    return torch.stack([taken(whole, rows, 3, 1) for rows in zip(*places.deals, strict=True)])


class _Block(NamedTuple):
    """Queries that attend to the same keys, up to their own place."""

    sequences: slice
    queries: slice  # of this rank's
    keys: slice  # of all

    def of(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.sequences, :, self.queries]

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.sequences, :, self.keys]


def _blocks(places: Places, documents: Documents | None, most: int | None) -> Iterator[_Block]:
    """All queries of this rank, at most so many at a time."""
    if documents is None or documents.whole:
        spans = [(slice(None), 0, places.length)]  # all have the same deal
    else:
        spans = [(slice(index, index + 1), first, stop) for index, first, stop in documents.runs()]
    own = places.own
    for sequences, first, stop in spans:
        at = 0
        for run in runs_of(own, sequences.start or 0):
            begin, end = max(first, run.start), min(stop, run.stop)
            for row in range(begin, end, most or max(1, end - begin)):
                last = min(end, row + most) if most else end
                queries = slice(at + row - run.start, at + last - run.start)
                yield _Block(sequences, queries, slice(first, last))
            at += len(run)


def attend_to_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shared: Shared,
                  documents: Documents | None, keep: bool = False) -> torch.Tensor:
    """Causal attention, inside documents where there are some: [B, N, s, E], twice [B, K, s, E] -> [B, N, s,
    E]. `keep`: keys and values of all tokens, until backward."""
    return _ToAll.apply(q, k, v, shared, documents, keep)  # pyright: ignore[reportReturnType]


class _ToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shared: Shared,
                documents: Documents | None, keep: bool):
        ctx.shared, ctx.work = shared, Rectangles.of(q, k, shared, documents)
        whole = shared.gathered(k, v)
        out, kept = ctx.work.forward(q, whole)
        ctx.save_for_backward(q, k, v, out, whole if keep else None, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        q, k, v, out, whole, *kept = ctx.saved_tensors
        whole = ctx.shared.gathered(k, v) if whole is None else whole
        of_q, sums = ctx.work.backward(grads[0], q, whole, out, kept)
        del whole
        of_k, of_v = ctx.shared.summed(sums)
        return of_q, of_k.to(k.dtype), of_v.to(v.dtype), None, None, None


class Rectangles(NamedTuple):
    """Attention of this rank's queries to the keys of all tokens, block by block."""

    use: Rectangle
    blocks: list[_Block]

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, shared: Shared, documents: Documents | None) -> Rectangles:
        """`k`: keys of any tokens, [..., K, any, E]."""
        use = shared.kernel(q.device, q.dtype, q.shape[3], q.shape[1] > k.shape[-3])
        return cls(use, [*_blocks(shared.places, documents, use.rows)])

    def forward(self, q: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """[B, N, s, E], keys and values [2, B, K, S, E] -> the output [B, N, s, E], what backward needs."""
        size, heads, length, width = q.shape
        out = q.new_empty(size, length, heads, width).transpose(1, 2)  # in memory as a kernel's output
        every, mask = list[torch.Tensor](), list[torch.Tensor]()
        if self.use.rows:
            most = max(block.queries.stop - block.queries.start for block in self.blocks)
            mask.append(lower_right(most, whole.shape[3], q))
        for block in self.blocks:
            part, kept = self.use.forward(block.of(q), *map(block.of_keys, whole), *mask)
            block.of(out).copy_(part)
            every += kept
        return out, every

    def backward(self, grad: torch.Tensor, q: torch.Tensor, whole: torch.Tensor, out: torch.Tensor,
                 every: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of the queries, and of all keys and values, these in fp32. `every`: what forward has
        said that this needs."""
        of_q, sums = torch.empty_like(q), torch.zeros_like(whole, dtype=torch.float32)
        each = len(every) // len(self.blocks)
        for number, block in enumerate(self.blocks):
            total: torch.Tensor | None = None
            for keys, part, *made in self.use.backward(
                    block.of(grad), block.of(q), *map(block.of_keys, whole), block.of(out),
                    tuple(every[number * each:(number + 1) * each])):
                total = part if total is None else total.float().add_(part)
                for into, more in zip(sums, made, strict=True):
                    block.of_keys(into)[:, :, keys].add_(more)
            assert total is not None
            block.of(of_q).copy_(total)
        return of_q, sums


def keys_of_all(k: torch.Tensor, v: torch.Tensor, shared: Shared) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all tokens, twice [B, K, S, E], for attention by separate operations."""
    return _KeysOfAll.apply(k, v, shared)  # pyright: ignore[reportReturnType]


class _KeysOfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: torch.Tensor, v: torch.Tensor, shared: Shared):
        ctx.shared = shared
        return tuple(shared.gathered(k, v).unbind())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        of_k, of_v = ctx.shared.summed(torch.stack([grad.float() for grad in grads]))
        return of_k.to(grads[0].dtype), of_v.to(grads[1].dtype), None

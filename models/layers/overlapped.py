"""Attention as two units, so that keys and values travel between them (parallel.cp_overlap):

    Projects   the norm; queries, keys and values of this rank's tokens
                   kv -> allkv     to all ranks of cp; for forward, and once more for backward
    Block      attention to the keys of all tokens, out, the sum; and all that comes behind it in the block

The numbers are those of `Attention` over cp. What attention keeps for backward are the tensors between the
two: queries, keys and values.

Shapes: as in attention.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from threed.base.errors import InputError
from threed.base.later import torch
from threed.models.layers.attention import PIECE, Attention
from threed.models.layers.base import Layer, Out
from threed.models.layers.block import Block, Branch, BranchTile
from threed.models.layers.experts import Routes
from threed.models.layers.parts import Column, Part, Row, every, keeps
from threed.models.layers.residual import moved_by_norm
from threed.spec.kernels import AttentionKernel, Kernel, Moved
from threed.spec.parameter import SEQUENCE, Cost, Saved, Share
from threed.spec.travel import Gathered

if TYPE_CHECKING:
    from threed.tensor.context import Batch

READS = ("queries", "allkv")


def apart(layer: Layer) -> list[Layer]:
    """A layer with attention as two, any other as it is. InputError where that cannot be."""
    made = _apart(layer)
    if any(type(part) is Attention for each in made for part in every(each)):
        why = (f"{layer.body.name} is cut into tiles; raise model.tile_linears or leave one of the two out"
               if isinstance(layer, BranchTile) else
               "its attention is not the only body of one branch (Branch, Block, Routes); leave it out")
        raise InputError(f"parallel.cp_overlap=true makes attention two units, and in layer {layer.name} "
                         f"that cannot be: {why}")
    return made


def _apart(layer: Layer) -> list[Layer]:
    if isinstance(layer, Routes) and _has_attention(layer.attention):
        second, branch = copy.copy(layer), layer.attention
        second.attention = Attends(branch)
        return [Projects(layer.name, (), branch), _reading(second, branch)]
    layer = Block(layer.name, layer) if type(layer) is Branch else layer
    places = [*map(_has_attention, layer.branches)] if isinstance(layer, Block) else []
    if isinstance(layer, Block) and any(places):
        at = places.index(True)
        before, branch, behind = layer.branches[:at], layer.branches[at], layer.branches[at + 1:]
        return [Projects(layer.name, before, branch),
                _reading(Block(f"{layer.name}.attend", Attends(branch), *behind), branch)]
    return [layer]


def _has_attention(branch: Branch) -> bool:
    return [type(body) for body in branch.bodies] == [Attention]


def _reading(layer: Layer, branch: Branch) -> Layer:
    """The layer that attends, in place of a branch."""
    model = branch.bodies[0].model
    heads, kv_heads = model.heads, model.num_kv_heads

    def queries(share: Share) -> tuple[int, ...]:
        return share.sequences, heads // share.over("tp"), share.length(model.seq_len), model.head_size

    def allkv(share: Share) -> tuple[int, ...]:
        size, _, *rest = queries(share)
        return 2 * share.tokens, size, kv_heads // share.over("tp"), *rest

    layer.reads, layer.shapes = READS, {"queries": queries, "allkv": allkv}  # pyright: ignore
    return layer


class Projection(Attention):
    """The first part of attention: up to queries, keys and values."""

    def __init__(self, whole: Attention):
        vars(self).update(vars(whole))
        del self.out

    def cost(self, share: Share) -> Cost:
        model = self.model
        queries, keys = (share.bytes(model.seq_len * each * model.head_size, "tp")
                         for each in (model.heads, model.num_kv_heads))
        grouped, element = model.heads > model.num_kv_heads, share.element
        several = grouped and model.num_kv_heads > share.over("tp")
        turned = model.position == "rotary"
        copies = not turned and not model.qk_norm and not several  # queries that are a view are copied
        moved: list[Kernel] = [
            Moved("queries, keys and values apart", 2 * queries * (several + copies),
                  2 * (queries + 2 * keys), (int(several or copies), 1), PIECE),
            Moved("keys and values together", 4 * keys, 2 * keys * (1 + 4 // element), (1, 1), PIECE)]
        if model.qk_norm:
            moved += [moved_by_norm(f"norm of {what}", size // element, element, model.fuses, PIECE)
                      for what, size in (("queries", queries), ("keys", keys))]
        if turned:
            passes, kernels = (2, 2) if model.fuses else (10, 10)  # over queries and keys; 5 operations each
            size = passes * (queries + keys)
            moved.append(Moved("rotary positions", size, size, (kernels, kernels), PIECE))
        return Part.cost(self, share) + Cost(tuple(moved), self._saved(share))

    def _saved(self, share: Share) -> tuple[Saved, ...]:
        """Of queries and keys before their norms. (Rotation keeps nothing of them.)"""
        model = self.model
        seq, heads, kv_heads = model.seq_len, model.heads, model.num_kv_heads
        wide, kv = heads * model.head_size, kv_heads * model.head_size
        several = heads > kv_heads and kv_heads > share.over("tp")
        placed = model.position == "rotary" and share.documents
        positions = Saved("positions", share.bytes(seq, element=8) if placed else 0)
        if not model.qk_norm:
            return (positions,)
        return (positions,
                Saved("queries, keys and values as projected", share.bytes(seq * (wide + 2 * kv), "tp")),
                Saved("queries before their norm", share.bytes(seq * wide, "tp") if several else 0, PIECE),
                Saved("statistics of queries' and keys' norms",
                      share.bytes(seq * (heads + kv_heads), "tp", 4), PIECE))

    def forward(self, x_sBD: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [B, N, S, E], and keys and values [2, B, K, S, E]."""
        qkv_SBKgE, scales = self.projected(x_sBD), self.scales()
        # Without norms what is between the two keeps nothing, and to compute it again would keep its input.
        return self.context.saving.through(PIECE if scales else "", self._parts, qkv_SBKgE, batch, *scales)

    def _parts(self, qkv_SBKgE: torch.Tensor, batch: Batch,
               *scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = qkv_SBKgE.split(self.runs, -2)
        q, k, v = self.heads(q, k, v, batch, *scales)
        own = q.untyped_storage().nbytes() == q.nbytes  # else it is a view of what would be kept for it
        return q if own else q.contiguous(), torch.stack((k, v))


class Projects(Layer):
    """The norm of attention, and its first part. The residual stream passes through."""

    def __init__(self, name: str, before: Sequence[Layer], branch: Branch):
        """`before`: branches of the block that come before attention."""
        self.name, self.before, self.norm = f"{name}.project", tuple(before), branch.norm
        self.projection = Projection(branch.bodies[0])
        self.travels = {"kv": Gathered("allkv", "keys", again=True)}

    def makes(self, share: Share) -> dict[str, int]:
        model = self.projection.model
        queries, keys = (share.bytes(model.seq_len * each * model.head_size, "tp")
                         for each in (model.heads, model.num_kv_heads))
        return {"queries": queries, "kv": 2 * keys}

    def cost(self, share: Share) -> Cost:
        normed = share.bytes(self.norm.model.seq_len * self.norm.model.hidden, SEQUENCE)
        read = keeps(self.projection, Column)
        saved = (Saved("output of the norm", normed, "norm"),) if read else ()
        return super().cost(share) + Cost((Moved("sum of gradients", 0, 3 * normed, (0, 1)),), saved,
                                          operands=normed * read)

    def forward(self, x_sBD: torch.Tensor, batch: Batch) -> Out:
        for branch in self.before:
            x_sBD = branch(x_sBD, batch)
        normed, x = self.norm(x_sBD), x_sBD.detach()
        with self.context.saving.instead("norm", normed, lambda: self.norm(x)):
            queries, kv = self.projection(normed, batch)
        return Out(x_sBD, {"queries": queries, "kv": kv})


class Attending(Attention):
    """The second part of attention: from queries, and keys and values of all tokens."""

    def __init__(self, whole: Attention):
        vars(self).update(vars(whole))
        del self.qkv, self.norms

    def cost(self, share: Share) -> Cost:
        model, ranks = self.model, share.over("cp")
        heads, kv_heads = (each // share.over("tp") for each in (model.heads, model.num_kv_heads))
        whole = 2 * share.bytes(model.seq_len * kv_heads * model.head_size) * ranks
        wide = 4 // share.element
        kernels = (AttentionKernel(share.sequences, heads, kv_heads, share.length(model.seq_len),
                                   model.head_size, None, model.seq_len),
                   Moved("keys and values in order", 2 * whole, (6 * wide + 2) * whole,
                         (4 * ranks, 8 + 8 * ranks)))
        queries = model.seq_len * model.heads
        saved = (Saved("attention's output", share.bytes(queries * model.head_size, "tp")),
                 Saved("log of attention's sums", share.bytes(queries, "tp", 4)))
        return Part.cost(self, share) + Cost(kernels, saved)

    def forward(self, queries: torch.Tensor, allkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        x_BNSE = self.context.attend_to_gathered(queries, allkv, self.context.shared(batch), batch.documents)
        return self.out(x_BNSE.permute(2, 0, 1, 3).flatten(2))


class Attends(Branch):
    """A branch whose norm and projection are in the unit before."""

    def __init__(self, branch: Branch):
        self.name, self.dropout, self.bodies = branch.name, branch.dropout, (Attending(branch.bodies[0]),)

    def cost(self, share: Share) -> Cost:
        attention, = self.bodies
        size, end = attention.model.seq_len * attention.model.hidden, keeps(attention, Row)
        stream = share.bytes(size, SEQUENCE)
        grad = share.bytes(size) if attention.axis in share.sequence else stream
        return Part.cost(self, share) + Cost((Moved("sum", 3 * stream, 0, (1, 0)),), operands=grad * end)

    def forward(self, x_sBD: torch.Tensor, batch: Batch, queries: torch.Tensor,
                allkv: torch.Tensor) -> torch.Tensor:
        attention, = self.bodies
        return x_sBD + self.dropout(attention(queries, allkv, batch), batch)

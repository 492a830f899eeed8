"""Causal self-attention (grouped-query: G query heads share one key and value head). A tile is a run of key
and value heads with their queries.

The rows of qkv are sorted by key and value head: first the queries that share it, then its key, then its
value (as in Megatron-LM). So any run of heads is a run of rows.

With model.qk_norm, queries and keys of each head are normed. All heads share the two weights, so ranks of tp
sum their gradients, and the first tile hands them to the others.

With context parallelism a rank has the queries of its tokens, and gathers the keys and values of all
(tensor/keys); or it exchanges queries, keys and values of its tokens for those of whole sequences, of a part
of its heads (tensor/heads), with which attention is what it is without.

Shapes: S sequence (the tokens of it that this rank's attention has), s a rank's part of it in the residual
stream, B micro-batch, D hidden, E head size; in this rank (and tile) N heads, K key and value heads, and G =
N/K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from threed.base.axes import axes_of
from threed.base.errors import InputError
from threed.base.later import torch
from threed.models.layers.base import Part
from threed.models.layers.parts import Column, Held, Row, replaced
from threed.models.layers.residual import MASK, moved_by_norm
from threed.schema import KEYS, ModelConfig
from threed.spec.kernels import AttentionKernel as Core
from threed.spec.kernels import Kernel, Moved, Product, partial_sums
from threed.spec.parameter import (
    HEADS,
    WHOLE,
    WITHOUT,
    Cost,
    Parameter,
    Rows,
    Saved,
    Share,
    Tile,
    Traffic,
    each_of,
)

if TYPE_CHECKING:
    from threed.spec.deal import Runs
    from threed.tensor.context import Batch

PIECE = "attention"  # the activation piece of all between the two products
SCALES = "qk_scales"  # the weights of both norms, which the first tile hands to the others


class Attention(Part):
    """Causal attention, the body of a `Branch`. Heads are cut over tp."""

    kind, cell, axis = "attention", "kv head with its queries", "tp"
    cells_over = HEADS  # (of a tile, too, cp has equal parts)

    def __init__(self, model: ModelConfig, name: str, tile: Tile = WHOLE):
        self.model, self.name, self.tile = model, name, tile
        self.cells = model.num_kv_heads
        queries, keys = (heads * model.head_size for heads in (model.heads, model.num_kv_heads))
        qkv = Column(model, f"{name}.qkv", queries + 2 * keys, tile, bias=model.has_qkv_bias)
        rows = targets(model)
        self.qkv = qkv.offering(rows).consisting(
            tuple(rows[each] for each in ("q_proj", "k_proj", "v_proj")),
            each_of(model.heads + 2 * model.num_kv_heads))
        out = Row(model, f"{name}.out", queries, model.residual_std, tile)
        self.out = out.offering({"o_proj": Rows()})
        self.norms = HeadNorms(model, name) if model.qk_norm and tile.index == 0 else None

    def tiled(self, tile: Tile) -> Attention:
        return Attention(self.model, self.name, tile)

    def shares(self) -> Mapping[str, tuple[int, ...]]:
        return {SCALES: (2, self.model.head_size)} if self.model.qk_norm else {}

    def shared(self) -> dict[str, torch.Tensor]:
        return {SCALES: torch.stack(self.norms.weights())} if self.norms is not None else {}

    def cost(self, share: Share) -> Cost:
        if share.tokens > share.over("cp"):
            others = " x ".join(axis for axis in axes_of("tokens") if axis != "cp")
            raise InputError(f"{self.name}: it attends to all tokens of a sample, and gathers them over cp "
                             f"alone; other ranks divide them here ({others}): give that axis one rank")
        cost = super().cost(share) + Cost(self._kernels(share), self._saved(share), sent=self._sent(share))
        return replaced(cost, self.qkv.of_bias(share), []) if self._joins(share.by_heads) else cost

    def _joins(self, by_heads: bool) -> bool:
        """Whether the gradients of queries, keys and values are put together as a piece, with that of their
        bias. (What was exchanged comes back by itself.)"""
        return (self.model.fuses and self.model.has_qkv_bias and not by_heads
                and self.qkv.computes_as(Column))

    @property
    def end(self) -> Row:
        return self.out

    def _sent(self, share: Share) -> dict[tuple[str, str], Traffic]:
        """Keys and values of all tokens are gathered in forward, and again in backward, which adds up their
        gradients in fp32. (Attention by separate operations keeps what it has gathered, and so does the
        piece KEYS.) Or queries, keys and values are exchanged, and attention's output; in backward their
        gradients."""
        if share.over("cp") == 1:
            return {}
        if share.by_heads:
            heads = 2 * self.model.heads + 2 * self.model.num_kv_heads
            numbers = self.model.seq_len * heads * self.model.head_size // self.tile.count
            both = replace(share.exchanged(numbers, "cp", "tp"), exchanges=2)
            return {("forward", "cp"): both, ("input", "cp"): both}
        numbers = 2 * self.model.seq_len * self.model.num_kv_heads * self.model.head_size // self.tile.count
        gather, sums = (share.gathered(numbers, "cp", "tp", element) for element in (share.element, 4))
        again = Traffic() if self.model.attention_dropout else gather
        return {("forward", "cp"): gather, (PIECE, "cp"): gather, ("input", "cp"): sums,
                (WITHOUT + KEYS, "cp"): again}

    def _kernels(self, share: Share) -> tuple[Kernel, ...]:
        model, piece = self.model, PIECE
        seq, ranks = model.seq_len, share.over(HEADS) * self.tile.count
        heads, kv_heads = model.heads // ranks, model.num_kv_heads // ranks
        rows = seq if share.by_heads else share.length(seq)
        queries, keys = (share.sequences * rows * each * model.head_size * share.element
                         for each in (heads, kv_heads))
        apart = Moved("queries, keys and values apart", 2 * queries * (heads > kv_heads),
                      2 * (queries + 2 * keys), (int(heads > kv_heads), 1), piece)
        moved = [*([] if share.by_heads else [apart] if not self._joins(False) else
                   _joined(self.qkv, share, apart)),
                 *self._moved_over_cp(share, queries, keys)]
        if model.qk_norm:
            moved += [moved_by_norm(f"norm of {what}", size // share.element, share.element, model.fuses,
                                    piece) for what, size in (("queries", queries), ("keys", keys))]
        if model.position == "rotary":
            passes, kernels = (2, 2) if model.fuses else (10, 10)  # over queries and keys; 5 operations each
            size = passes * (queries + keys)
            moved.append(Moved("rotary positions", size, size, (kernels, kernels), piece))
        if not model.attention_dropout:
            return (Core(share.sequences, heads, kv_heads, rows, model.head_size, piece,
                         seq if rows < seq else None), *moved)
        count, own = share.sequences * heads, share.element
        squares, cast = count * rows * seq, 2 * (own + 4) if own < 4 else 0
        return (Product(rows, seq, model.head_size, count, False, piece),
                Product(rows, model.head_size, seq, count, False, piece), *moved,
                Moved("softmax and dropout", squares * (MASK + 8 * own + 9 + cast),
                      squares * (6 * own + 13 + cast), (36, 6), piece, (squares, 0)))

    def _moved_over_cp(self, share: Share, queries: int, keys: int) -> list[Moved]:
        """Keys and values, and the sums of their gradients in fp32, are put in the order of the sequence or
        of the ranks. `queries`, `keys`: bytes of this rank's."""
        ranks, wide = share.over("cp"), 4 // share.element
        if ranks == 1:
            return []
        if share.by_heads:  # each is laid out for the ranks, and what comes is put in order
            both, kernels = 8 * (queries + keys), 2 + 8 * ranks
            return [Moved("what is exchanged", both, both, (kernels, kernels))]
        whole = 2 * keys * ranks
        gather = 4 * keys + 2 * whole
        return [Moved("keys and values of all ranks", gather, gather + (6 * wide + 1) * whole,
                      (1 + 4 * ranks, 8 + 8 * ranks), PIECE)]

    def _saved(self, share: Share) -> tuple[Saved, ...]:
        """The tensors saved between the norm and the dropout of its branch."""
        model, tiles = self.model, self.tile.count
        seq, heads, kv_heads = model.seq_len, model.heads, model.num_kv_heads
        wide, kv = heads * model.head_size, kv_heads * model.head_size
        grouped, rotary, normed = heads > kv_heads, model.position == "rotary", model.qk_norm
        placed = rotary and share.documents

        def kept(what: str, elements: int, element: int | None = None,
                 piece: str | None = PIECE) -> Saved:
            return Saved(what, share.bytes(elements // tiles, "tp", element), piece)

        # The projection behind attention keeps it, and so does fused attention itself: the same tensor, if no
        # exchange is between them.
        output = ((kept("attention's output", seq * wide, piece=None if self.out.keeps else PIECE),)
                  if self.out.keeps or not model.attention_dropout else ())
        # What is exchanged has memory of its own, which is free once nothing reads it; else queries, keys and
        # values are views of the projection.
        views = not share.by_heads
        if not views and self.out.keeps and not model.attention_dropout:
            output += (kept("attention's output for all tokens", seq * wide),)
        positions = share.bytes(seq, element=8) * (1 if views else share.tokens)
        ends = (kept("queries, keys and values as projected", seq * (wide + 2 * kv), piece=None),
                *output, Saved("positions", positions if placed else 0))
        if normed:  # each norm saves what it reads, and its statistics
            # Queries of one group are a view of the projection; those of several are copied.
            copied = views and grouped and kv_heads > share.over("tp") * tiles
            ends = (*ends, kept("queries before their norm", seq * wide if copied else 0),
                    kept("statistics of queries' and keys' norms", seq * (heads + kv_heads), 4))
        if not model.attention_dropout:
            if (ranks := share.over("cp")) > 1 and not share.by_heads:
                whole = kept("keys and values of all ranks", 2 * seq * kv * ranks)
                ends = (*ends, whole._replace(kept_by=KEYS))
            turned = normed or (rotary and views)
            return (*ends, kept("queries", seq * wide if turned or (grouped and views) else 0),
                    kept("keys", seq * kv if turned else 0),
                    kept("log of attention's sums", heads * seq, 4))
        # Unfused attention saves keys and values for each query head. Where heads are rotated or copied, it
        # saves the results and not the projection; a norm saves that.
        squares, own = heads * seq * seq, wide if normed else 0
        instead = 2 * kv if (rotary or grouped) and not normed else 0
        instead = instead if views else kv * (1 if normed else 2)
        whole = 2 * wide * (share.tokens if views else 1)
        return (*ends, kept("softmax of attention", squares, 4), kept("dropped attention", squares),
                kept("attention mask", squares, 1), kept("queries", seq * own),
                kept("keys and values of each query", seq * (whole - instead)))

    def forward(self, x_sBD: torch.Tensor, batch: Batch, qk_scales: torch.Tensor | None = None,
                bias: bool = True) -> torch.Tensor:
        """`qk_scales`: the weights of the norms, from the first tile, [2, E]. `bias`: as of `end`."""
        scales, context = self.scales(qk_scales), self.context
        through, joins = partial(context.saving.through, PIECE), self._joins(context.by_heads)
        qkv_SBKgE = self.projected(x_sBD, not joins)
        if not context.by_heads:
            own = self.qkv.bias if joins else None
            return self.out(through(self._core, qkv_SBKgE, own, batch, *scales).flatten(2), bias)
        # Exchanges are outside of the piece: what is computed again sends nothing again.
        parts = context.to_heads(qkv_SBKgE, self.runs, context.shared(batch))
        del qkv_SBKgE
        x_SBKGE = through(self._of_parts, *parts, batch, *scales)
        return self.out(context.to_tokens(x_SBKGE, context.shared(batch)).flatten(2), bias)

    def scales(self, given: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """The weights of the norms of queries and of keys, if there are any. `given`: from the first tile."""
        if not self.model.qk_norm:
            return ()
        return self.norms.weights() if self.norms is not None else tuple(given)  # pyright: ignore

    def projected(self, x_sBD: torch.Tensor, bias: bool = True) -> torch.Tensor:
        """Queries, keys and values of this rank's tokens, by key head, [S, B, K, G + 2, E]. `bias`: as of a
        Linear."""
        return self.qkv(x_sBD, bias).unflatten(-1, (-1, sum(self.runs), self.model.head_size))

    @property
    def runs(self) -> tuple[int, int, int]:
        """Queries, keys and values of a key head."""
        return self.model.heads // self.model.num_kv_heads, 1, 1

    def _core(self, qkv_SBKgE: torch.Tensor, bias: torch.Tensor | None, batch: Batch,
              *scales: torch.Tensor) -> torch.Tensor:
        """`bias`: of the projection, whose gradient comes with those of queries, keys and values."""
        # `split` has one backward for all parts, where a slice of each would have one each, and their sum.
        by = self.context.fused.sums(qkv_SBKgE.device)
        q, k, v = (qkv_SBKgE.split(self.runs, -2) if bias is None else
                   self.context.pieces.apart(qkv_SBKgE, bias, self.runs, by))
        return self._of_parts(q, k, v, batch, *scales)

    def _of_parts(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch,
                  *scales: torch.Tensor) -> torch.Tensor:
        """Queries [S, B, K, G, E], keys and values [S, B, K, 1, E], weights of two norms [E] -> [S, B, K, G,
        E]."""
        q_BNSE, k_BKSE, v_BKSE = self.heads(q, k, v, batch, *scales)
        x_BNSE = self._attend(q_BNSE, k_BKSE, v_BKSE, batch)
        return x_BNSE.permute(2, 0, 1, 3).unflatten(2, q.shape[2:4])

    def heads(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch,
              *scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same -> queries [B, N, S, E], keys and values [B, K, S, E], normed and rotated."""
        model = self.model
        q_BNSE, k_BKSE, v_BKSE = (part.reshape(*part.shape[:2], -1, model.head_size).permute(1, 2, 0, 3)
                                  for part in (q, k, v))
        if scales:
            q_BNSE, k_BKSE = (self.context.rms_norm(part, scale, model.norm_eps)
                              for part, scale in zip((q_BNSE, k_BKSE), scales, strict=True))
        if model.position == "rotary":
            q_BNSE, k_BKSE = (self.context.rotate(each, batch) for each in (q_BNSE, k_BKSE))
        return q_BNSE, k_BKSE, v_BKSE

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
        probability, queries = self.model.attention_dropout, self.model.heads // self.model.num_kv_heads
        if probability == 0.0 or not batch.train:
            return self.context.attend(q, k, v, batch)
        # Fused attention draws its own dropout, which depends on the mesh: the weights are explicit here.
        places = self.context.places(batch.documents).attended
        if places.count > 1:
            k, v = self.context.keys_of_all(k, v, self.context.shared(batch))
        k, v = (t.repeat_interleave(queries, 1) for t in (k, v))
        (heads, rows), seq = q.shape[1:3], places.length
        future = _future(places.own, q, seq)  # added: not kept
        if batch.documents is not None:
            at = self.context.numbers(places.own, q.device)
            future = future.masked_fill(self.context.outside(batch.documents.positions_BS, at, seq),
                                        -torch.inf)
        scores = q @ k.transpose(-1, -2) * self.model.head_size**-0.5 + future
        squares = [_of_heads(runs, self._index() * heads, heads, seq) for runs in places.own]
        counters = self.context.numbers(squares, q.device, seq)
        keep = self.context.keep_mask(probability, (batch.seed, f"{self.name}.weights"), batch.samples_B,
                                      counters.view(-1, heads, rows, seq))
        return (scores.float().softmax(-1).to(v.dtype) * keep / (1.0 - probability)) @ v

    def _index(self) -> int:
        """Of this rank's heads among those of all ranks and tiles."""
        places, group = self.context.places(), self.context.group
        index = self.tile.index * group.size() + group.rank()
        return index * places.count + places.index if places.by_heads else index


def _joined(qkv: Column, share: Share, moved: Moved) -> list[Moved]:
    """What queries, keys and values move whose gradients are put together as a piece."""
    width, sums = qkv.outputs // share.over("tp"), 2 * qkv.sums_bias
    added = partial_sums(width, moved.backward // 2 // width // share.element) if sums else 0
    piece = moved._replace(forward=0, backward=moved.backward + added, kernels=(0, 3 + sums), fused=True)
    return [moved._replace(backward=0, kernels=(moved.kernels[0], 0)), piece]


def _future(own: Sequence[Runs], q: torch.Tensor, seq: int) -> torch.Tensor:
    """-inf where a key is behind its query, else 0, [B, 1, rows, seq], or [rows, seq] for all sequences.
    `own`: the places of the queries."""
    parts = [[torch.full((len(run), seq), -torch.inf, dtype=q.dtype, device=q.device).triu(run.start + 1)
              for run in runs] for runs in own]
    each = [part[0] if len(part) == 1 else torch.cat(part) for part in parts]
    return each[0] if len(each) == 1 else torch.stack(each).unsqueeze(1)


def _of_heads(runs: Runs, first: int, heads: int, seq: int) -> Runs:
    """Rows of the squares of heads, one square of `seq` rows after the other."""
    if len(runs) == 1:
        return (range(first * seq, (first + heads) * seq),)
    return tuple(range(head * seq + run.start, head * seq + run.stop)
                 for head in range(first, first + heads) for run in runs)


def targets(model: ModelConfig) -> dict[str, Rows]:
    """What model.lora_targets calls the rows of qkv. (The rows of one kind are in the order of the heads.)"""
    queries, size = model.heads // model.num_kv_heads, model.head_size
    runs = queries + 2
    return {"q_proj": Rows(0, queries, runs, size), "k_proj": Rows(queries, queries + 1, runs, size),
            "v_proj": Rows(queries + 1, runs, runs, size), "qkv_proj": Rows(0, runs, runs, size)}


class HeadNorms(Held):
    """The weights of the RMS norms of queries and of keys, which all heads share. Each rank of tp has the
    gradient of its own heads."""

    def __init__(self, model: ModelConfig, name: str):
        shape = (model.head_size,)
        self.held = {each: Parameter(f"{name}.{each}_norm.weight", shape, fill=1.0, partial_over=("tp",))
                     for each in ("q", "k")}

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.compute.q, self.compute.k

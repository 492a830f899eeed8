"""GPT and Llama as a list of layers: embedding, blocks, head. Each layer holds exactly the parameters of its spec.

Called with the residual stream and the batch, a layer returns the residual stream (the head: the loss). A tile of a layer is
also given the output of the layer's norm, which the first tile, given None, makes; it returns that beside its output.

Legend of shape suffixes: S sequence, s sequence cut over tp where sequence parallelism is on (else S), B micro-batch,
D hidden, N heads of this rank, K key and value heads of this rank, G = N/K, E head size, F feed-forward of this rank,
V vocabulary of this rank. The residual stream is [s, B, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from threed.comm import Group
from threed.models.spec import TIED, Layer
from threed.schema import ModelConfig
from threed.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    WeightGrads,
    parallel_config,
    rms_norm,
    vocab_parallel_cross_entropy,
)
from threed.tensor.random import keep_mask
from threed.tensor.saving import Saving
from threed.tensor.softmax import add_to_softmax, cross_entropy_of


@dataclass
class Batch:
    """A micro-batch of one rank."""

    tokens_BS: torch.Tensor  # input ids; empty where the rank does not need them
    labels_BS: torch.Tensor  # the token that follows each
    samples_B: torch.Tensor  # global sample numbers, int64: they key dropout
    seed: int
    num_tokens: int  # of the global batch: what the loss is divided by
    train: bool = True  # dropout is on


@dataclass
class Context:
    """What every layer of a rank is built with."""

    model: ModelConfig
    group: Group
    sequence_parallel: bool
    dtype: torch.dtype
    weight_grads: WeightGrads
    saving: Saving = field(default_factory=Saving)
    _rotary: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def rotary(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of rotary positions (Su et al. 2021), [S, E] each: pairs are (i, i + E/2)."""
        if device not in self._rotary:
            size = self.model.head_dim
            frequency = self.model.rope_theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
            angles = torch.outer(torch.arange(self.model.seq_len, dtype=torch.float64), frequency).repeat(1, 2)
            self._rotary[device] = angles.cos().to(device, self.dtype), angles.sin().to(device, self.dtype)
        return self._rotary[device]

    def linear(self, kind: type, inputs: int, outputs: int, bias: bool | None = None):
        parallel = parallel_config(self.group, self.sequence_parallel, self.dtype)
        return kind(inputs, outputs, self.model.bias if bias is None else bias, parallel, self.group,
                    self.weight_grads)

    def sequence(self) -> tuple[int, int]:
        """(first, length) of this rank's part of the sequence in the residual stream."""
        parts = self.group.size() if self.sequence_parallel else 1
        length = self.model.seq_len // parts
        return (self.group.rank() * length if parts > 1 else 0), length


class Norm(nn.Module):
    def __init__(self, context: Context):
        super().__init__()
        model = context.model
        self.eps = model.norm_eps
        self.weight = nn.Parameter(torch.empty(model.hidden, dtype=context.dtype))
        self.bias = nn.Parameter(torch.empty_like(self.weight)) if model.norm == "layernorm" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class Dropout:
    """Dropout of the residual stream at one site."""

    def __init__(self, context: Context, site: str):
        self.context, self.site = context, site

    def __call__(self, x_sBD: torch.Tensor, batch: Batch) -> torch.Tensor:
        probability = self.context.model.dropout
        if probability == 0.0 or not batch.train:
            return x_sBD
        first, length = self.context.sequence()
        hidden = x_sBD.shape[-1]
        counters = torch.arange(first * hidden, (first + length) * hidden, device=x_sBD.device).view(length, hidden)
        keep = keep_mask(probability, (batch.seed, self.site), batch.samples_B, counters).transpose(0, 1)
        return x_sBD * keep / (1.0 - probability)


class Embedding(nn.Module):
    def __init__(self, context: Context, tile: int = 0, tiles: int = 1):
        super().__init__()
        model = context.model
        parallel = parallel_config(context.group, context.sequence_parallel, context.dtype)
        self.word = VocabParallelEmbedding(model.padded_vocab, model.hidden, parallel, context.group, tile, tiles)
        self.position = None
        if model.position == "learned" and tile == 0:
            self.position = nn.Module()
            self.position.weight = nn.Parameter(torch.empty(model.seq_len, model.hidden, dtype=context.dtype))
        self.span = context.sequence()
        self.dropout = Dropout(context, "embedding")

    def forward(self, before_sBD: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        x_sBD = self.word(batch.tokens_BS)
        if self.position is not None:
            first, length = self.span
            x_sBD = x_sBD + self.position.weight[first:first + length].unsqueeze(1)  # pyright: ignore
        return _added(before_sBD, self.dropout(x_sBD, batch))


class Attention(nn.Module):
    """Causal self-attention; query heads share key and value heads in groups of G."""

    def __init__(self, context: Context, index: int, tile: int = 0, tiles: int = 1):
        super().__init__()
        self.context, self.site = context, f"blocks.{index}.attention.weights"
        model, tp = context.model, context.group.size()
        self.head_dim, self.kv_heads = model.head_dim, model.num_kv_heads // tp // tiles
        self.queries = model.heads // model.num_kv_heads  # G
        self.part = tile * tp + context.group.rank()  # which run of heads this is
        kv = model.num_kv_heads * model.head_dim
        self.qkv = context.linear(ColumnParallelLinear, model.hidden, (model.hidden + 2 * kv) // tiles)
        self.out = context.linear(RowParallelLinear, model.hidden // tiles, model.hidden, model.bias and tile == tiles - 1)

    def forward(self, x_sBD: torch.Tensor, batch: Batch) -> torch.Tensor:
        qkv = self.qkv(x_sBD)
        if self.context.saving.again("attention"):
            attended = checkpoint(self._core, qkv, batch, use_reentrant=False, preserve_rng_state=False)
        else:
            attended = self._core(qkv, batch)
        return self.out(attended)

    def _core(self, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[S, B, queries, keys and values of this rank] -> [S, B, N x E]."""
        seq, size = qkv.shape[:2]
        qkv = qkv.view(seq, size, self.kv_heads, self.queries + 2, self.head_dim)
        q_BNSE = qkv[..., :-2, :].reshape(seq, size, -1, self.head_dim).permute(1, 2, 0, 3)
        k_BKSE, v_BKSE = (qkv[..., index, :].permute(1, 2, 0, 3) for index in (-2, -1))
        if self.context.model.position == "rotary":
            q_BNSE, k_BKSE = self._rotate(q_BNSE), self._rotate(k_BKSE)
        x_BNSE = self._attend(q_BNSE, k_BKSE, v_BKSE, batch)
        return x_BNSE.permute(2, 0, 1, 3).reshape(seq, size, -1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
        probability = self.context.model.attention_dropout
        if probability == 0.0 or not batch.train:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.queries > 1)
        # Fused attention draws its own dropout, which depends on the mesh: attention weights are made explicitly.
        k, v = (t.repeat_interleave(self.queries, 1) for t in (k, v))
        seq, heads = q.shape[2], q.shape[1]
        future = torch.full((seq, seq), -torch.inf, dtype=q.dtype, device=q.device).triu(1)  # added: nothing is kept of it
        scores = q @ k.transpose(-1, -2) * self.head_dim**-0.5 + future
        first = self.part * heads
        counters = torch.arange(first * seq * seq, (first + heads) * seq * seq, device=q.device).view(heads, seq, seq)
        keep = keep_mask(probability, (batch.seed, self.site), batch.samples_B, counters)
        return (scores.float().softmax(-1).to(v.dtype) * keep / (1.0 - probability)) @ v

    def _rotate(self, x_BNSE: torch.Tensor) -> torch.Tensor:
        cos_SE, sin_SE = self.context.rotary(x_BNSE.device)
        low, high = x_BNSE.chunk(2, -1)
        return x_BNSE * cos_SE + torch.cat([-high, low], -1) * sin_SE


class Mlp(nn.Module):
    def __init__(self, context: Context, _: int, tile: int = 0, tiles: int = 1):
        super().__init__()
        model, self.saving = context.model, context.saving
        self.gated = model.activation == "swiglu"
        inner = model.num_ffn_hidden // tiles
        self.up = context.linear(ColumnParallelLinear, model.hidden, inner * (2 if self.gated else 1))
        self.down = context.linear(RowParallelLinear, inner, model.hidden, model.bias and tile == tiles - 1)

    def forward(self, x_sBD: torch.Tensor, batch: Batch) -> torch.Tensor:
        x_SBF = self.up(x_sBD)
        kept = x_SBF.detach()
        if self.gated:
            gate, up = x_SBF.chunk(2, -1)
            opened = F.silu(gate)
            with self.saving.instead("mlp_act", opened, lambda: F.silu(kept.chunk(2, -1)[0])):
                inner = opened * up
            with self.saving.instead("mlp_act", inner, lambda: _gated(kept)):
                return self.down(inner)
        inner = F.gelu(x_SBF, approximate="tanh")
        with self.saving.instead("mlp_act", inner, lambda: F.gelu(kept, approximate="tanh")):
            return self.down(inner)


def _gated(x_SBF: torch.Tensor) -> torch.Tensor:
    gate, up = x_SBF.chunk(2, -1)
    return F.silu(gate) * up


BRANCHES = {"attention": Attention, "mlp": Mlp}


class Block(nn.Module):
    """A block, or one branch of it."""

    def __init__(self, context: Context, index: int, branches: Sequence[str]):
        super().__init__()
        self.saving, self.branches = context.saving, tuple(branches)
        for name in branches:
            setattr(self, f"{name}_norm", Norm(context))
            setattr(self, name, BRANCHES[name](context, index))
            setattr(self, f"{name}_dropout", Dropout(context, f"blocks.{index}.{name}"))

    def forward(self, x_sBD: torch.Tensor, batch: Batch) -> torch.Tensor:
        for name in self.branches:
            x_sBD = self._branch(x_sBD, batch, name)
        return x_sBD

    def _branch(self, x_sBD: torch.Tensor, batch: Batch, name: str) -> torch.Tensor:
        """The residual stream after one of the two branches."""
        norm, branch, dropout = (getattr(self, part) for part in (f"{name}_norm", name, f"{name}_dropout"))
        normed, x = norm(x_sBD), x_sBD.detach()
        with self.saving.instead("norm", normed, lambda: norm(x)):
            out = branch(normed, batch)
        return x_sBD + dropout(out, batch)


class BranchTile(nn.Module):
    """A tile of a branch: what it adds to the residual stream. (The tiles' dropout masks are equal: dropout of a sum.)"""

    def __init__(self, context: Context, layer: Layer):
        super().__init__()
        self.name = layer.kind
        if layer.tile == 0:
            setattr(self, f"{self.name}_norm", Norm(context))
        setattr(self, self.name, BRANCHES[self.name](context, layer.block, layer.tile, layer.tiles))
        self.dropout = Dropout(context, f"blocks.{layer.block}.{self.name}")

    def forward(self, x_sBD: torch.Tensor | None, batch: Batch,
                normed_sBD: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if normed_sBD is None:
            normed_sBD = getattr(self, f"{self.name}_norm")(x_sBD)
        out = getattr(self, self.name)(normed_sBD, batch)
        return _added(x_sBD, self.dropout(out, batch)), normed_sBD  # pyright: ignore[reportReturnType]


def _added(x_sBD: torch.Tensor | None, part_sBD: torch.Tensor) -> torch.Tensor:
    """The sum; without a residual stream, which is not there when a tile is computed again for its graph, the part alone."""
    return part_sBD if x_sBD is None else x_sBD + part_sBD


class Head(nn.Module):
    """Final norm, projection onto the vocabulary, loss: the sum over this micro-batch / tokens of the global batch."""

    def __init__(self, context: Context):
        super().__init__()
        model = context.model
        self.group, self.vocab = context.group, model.vocab
        self.norm = Norm(context)
        self.output = context.linear(ColumnParallelLinear, model.hidden, model.padded_vocab, bias=False)

    def forward(self, x_sBD: torch.Tensor, batch: Batch) -> torch.Tensor:
        logits_SBV = self.output(self.norm(x_sBD))
        loss_SB = vocab_parallel_cross_entropy(logits_SBV, batch.labels_BS.t(), self.vocab, self.group)
        return loss_SB.sum() / batch.num_tokens


class HeadTile(nn.Module):
    """A tile of the head: a run of the vocabulary, added to a running softmax [2, S, B]; from the last tile comes the loss."""

    def __init__(self, context: Context, layer: Layer):
        super().__init__()
        model, tp = context.model, context.group.size()
        self.group, self.vocab, self.last = context.group, model.vocab, layer.has_loss
        width = model.padded_vocab // layer.tiles
        self.first = layer.tile * width + context.group.rank() * (width // tp)  # of this rank's ids
        self.norm = Norm(context) if layer.tile == 0 else None
        self.output = context.linear(ColumnParallelLinear, model.hidden, width, bias=False)

    def forward(self, x: torch.Tensor, batch: Batch, normed_sBD: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """`x`: the residual stream into the first tile, then the running softmax."""
        before = x
        if self.norm is not None:
            before, normed_sBD = None, self.norm(x)
        assert normed_sBD is not None
        running = add_to_softmax(before, self.output(normed_sBD), batch.labels_BS.t(), self.first, self.vocab)
        if not self.last:
            return running, normed_sBD
        return cross_entropy_of(running, self.group).sum() / batch.num_tokens, normed_sBD


def build_layer(layer: Layer, context: Context) -> nn.Module:
    """A layer, its parameters without values."""
    with torch.device("meta"):
        if layer.kind == "embedding":
            return Embedding(context, layer.tile, layer.tiles)
        if layer.kind == "head":
            return HeadTile(context, layer) if layer.tiles > 1 else Head(context)
        if layer.tiles > 1:
            return BranchTile(context, layer)
        return Block(context, layer.block, tuple(BRANCHES) if layer.kind == "block" else (layer.kind,))


def parameter_names(layer: Layer, module: nn.Module, model: ModelConfig) -> dict[str, str]:
    """Name inside the module -> key (spec.Parameter.key). The head's output weight is the word embedding's when they are tied."""
    prefix = f"blocks.{layer.block}" if layer.block >= 0 else layer.kind
    keys = {parameter.name: parameter.key for parameter in layer.parameters}
    names = {name: f"{prefix}.{name}" for name, _ in module.named_parameters()}
    if model.tie_embeddings and "output.weight" in names:
        names["output.weight"] = TIED
    return {inside: keys.get(name, name) for inside, name in names.items()}

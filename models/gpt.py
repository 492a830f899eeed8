"""GPT and Llama as a list of layers: embedding, blocks, head. Each layer holds exactly the parameters of its spec.

Legend of shape suffixes: S sequence, s sequence cut over tp where sequence parallelism is on (else S), B micro-batch,
D hidden, N heads of this rank, K key and value heads of this rank, G = N/K, E head size, F feed-forward of this rank,
V vocabulary of this rank. The residual stream is [s, B, D].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from threed.comm import Group
from threed.schema import ModelConfig
from threed.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    WeightGrads,
    parallel_config,
    vocab_parallel_cross_entropy,
)
from threed.tensor.random import keep_mask


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
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
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
    def __init__(self, context: Context):
        super().__init__()
        model = context.model
        parallel = parallel_config(context.group, context.sequence_parallel, context.dtype)
        self.word = VocabParallelEmbedding(model.padded_vocab, model.hidden, parallel, context.group)
        self.position = None
        if model.position == "learned":
            self.position = nn.Module()
            self.position.weight = nn.Parameter(torch.empty(model.seq_len, model.hidden, dtype=context.dtype))
        self.span = context.sequence()
        self.dropout = Dropout(context, "embedding")

    def forward(self, _: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        x_sBD = self.word(batch.tokens_BS)
        if self.position is not None:
            first, length = self.span
            x_sBD = x_sBD + self.position.weight[first:first + length].unsqueeze(1)  # pyright: ignore
        return self.dropout(x_sBD, batch)


class Attention(nn.Module):
    """Causal self-attention; query heads share key and value heads in groups of G."""

    def __init__(self, context: Context, site: str):
        super().__init__()
        self.context, self.site = context, site
        model, tp = context.model, context.group.size()
        self.head_dim, self.kv_heads = model.head_dim, model.num_kv_heads // tp
        self.queries = model.heads // model.num_kv_heads  # G
        self.qkv = context.linear(ColumnParallelLinear, model.hidden, model.hidden + 2 * model.num_kv_heads * model.head_dim)
        self.out = context.linear(RowParallelLinear, model.hidden, model.hidden)
        self._rotary: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x_sBD: torch.Tensor, batch: Batch) -> torch.Tensor:
        qkv = self.qkv(x_sBD)
        seq, size = qkv.shape[:2]
        qkv = qkv.view(seq, size, self.kv_heads, self.queries + 2, self.head_dim)
        q_BNSE = qkv[..., :-2, :].reshape(seq, size, -1, self.head_dim).permute(1, 2, 0, 3)
        k_BKSE, v_BKSE = (qkv[..., index, :].permute(1, 2, 0, 3) for index in (-2, -1))
        if self.context.model.position == "rotary":
            q_BNSE, k_BKSE = self._rotate(q_BNSE), self._rotate(k_BKSE)
        x_BNSE = self._attend(q_BNSE, k_BKSE, v_BKSE, batch)
        return self.out(x_BNSE.permute(2, 0, 1, 3).reshape(seq, size, -1))

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch) -> torch.Tensor:
        probability = self.context.model.attention_dropout
        if probability == 0.0 or not batch.train:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.queries > 1)
        # Fused attention draws its own dropout, which depends on the mesh: attention weights are made explicitly.
        k, v = (t.repeat_interleave(self.queries, 1) for t in (k, v))
        seq, heads = q.shape[2], q.shape[1]
        future = torch.ones(seq, seq, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-1, -2) * self.head_dim**-0.5).masked_fill(future, -torch.inf)
        first = self.context.group.rank() * heads
        counters = torch.arange(first * seq * seq, (first + heads) * seq * seq, device=q.device).view(heads, seq, seq)
        keep = keep_mask(probability, (batch.seed, self.site), batch.samples_B, counters)
        return (scores.float().softmax(-1).to(v.dtype) * keep / (1.0 - probability)) @ v

    def _rotate(self, x_BNSE: torch.Tensor) -> torch.Tensor:
        """Rotary positions (Su et al. 2021): pairs are (i, i + E/2)."""
        if self._rotary is None:
            frequency = self.context.model.rope_theta ** (
                -torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
            angles = torch.outer(torch.arange(x_BNSE.shape[2], dtype=torch.float64), frequency).repeat(1, 2)
            self._rotary = tuple(f(angles).to(x_BNSE.device, x_BNSE.dtype) for f in (torch.cos, torch.sin))  # pyright: ignore
        cos_SE, sin_SE = self._rotary  # pyright: ignore[reportGeneralTypeIssues]
        low, high = x_BNSE.chunk(2, -1)
        return x_BNSE * cos_SE + torch.cat([-high, low], -1) * sin_SE


class Mlp(nn.Module):
    def __init__(self, context: Context):
        super().__init__()
        model = context.model
        self.gated = model.activation == "swiglu"
        self.up = context.linear(ColumnParallelLinear, model.hidden, model.num_ffn_hidden * (2 if self.gated else 1))
        self.down = context.linear(RowParallelLinear, model.num_ffn_hidden, model.hidden)

    def forward(self, x_sBD: torch.Tensor) -> torch.Tensor:
        x_SBF = self.up(x_sBD)
        if self.gated:
            gate, up = x_SBF.chunk(2, -1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(x_SBF, approximate="tanh"))


class Block(nn.Module):
    def __init__(self, context: Context, index: int):
        super().__init__()
        self.attention_norm = Norm(context)
        self.attention = Attention(context, f"blocks.{index}.attention.weights")
        self.attention_dropout = Dropout(context, f"blocks.{index}.attention")
        self.mlp_norm = Norm(context)
        self.mlp = Mlp(context)
        self.mlp_dropout = Dropout(context, f"blocks.{index}.mlp")

    def forward(self, x_sBD: torch.Tensor, batch: Batch) -> torch.Tensor:
        x_sBD = x_sBD + self.attention_dropout(self.attention(self.attention_norm(x_sBD), batch), batch)
        return x_sBD + self.mlp_dropout(self.mlp(self.mlp_norm(x_sBD)), batch)


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


def build_layer(index: int, context: Context) -> nn.Module:
    """Layer `index` of the model (0: embedding, 1 ..: blocks, last: head), its parameters without values."""
    with torch.device("meta"):
        if index == 0:
            return Embedding(context)
        if index == context.model.layers + 1:
            return Head(context)
        return Block(context, index - 1)


def parameter_names(index: int, layer: nn.Module, model: ModelConfig) -> dict[str, str]:
    """Name inside the layer -> global name. The head's output weight is the word embedding's when they are tied."""
    prefix = "embedding" if index == 0 else "head" if index == model.layers + 1 else f"blocks.{index - 1}"
    names = {name: f"{prefix}.{name}" for name, _ in layer.named_parameters()}
    if model.tie_embeddings and "output.weight" in names:
        names["output.weight"] = "embedding.word.weight"
    return names

"""GPT and Llama as a list of layers: embedding, blocks, head. Each layer holds exactly the parameters of its spec.

Legend of shape suffixes: S sequence, s sequence cut over tp where sequence parallelism is on (else S), B micro-batch,
D hidden, N heads of this rank, K key and value heads of this rank, G = N/K, E head size, F feed-forward of this rank,
V vocabulary of this rank. The residual stream is [s, B, D].
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from threed.comm import Group
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
        first = self.context.group.rank() * heads
        counters = torch.arange(first * seq * seq, (first + heads) * seq * seq, device=q.device).view(heads, seq, seq)
        keep = keep_mask(probability, (batch.seed, self.site), batch.samples_B, counters)
        return (scores.float().softmax(-1).to(v.dtype) * keep / (1.0 - probability)) @ v

    def _rotate(self, x_BNSE: torch.Tensor) -> torch.Tensor:
        cos_SE, sin_SE = self.context.rotary(x_BNSE.device)
        low, high = x_BNSE.chunk(2, -1)
        return x_BNSE * cos_SE + torch.cat([-high, low], -1) * sin_SE


class Mlp(nn.Module):
    def __init__(self, context: Context):
        super().__init__()
        model, self.saving = context.model, context.saving
        self.gated = model.activation == "swiglu"
        self.up = context.linear(ColumnParallelLinear, model.hidden, model.num_ffn_hidden * (2 if self.gated else 1))
        self.down = context.linear(RowParallelLinear, model.num_ffn_hidden, model.hidden)

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


class Block(nn.Module):
    def __init__(self, context: Context, index: int):
        super().__init__()
        self.saving = context.saving
        self.attention_norm = Norm(context)
        self.attention = Attention(context, f"blocks.{index}.attention.weights")
        self.attention_dropout = Dropout(context, f"blocks.{index}.attention")
        self.mlp_norm = Norm(context)
        self.mlp = Mlp(context)
        self.mlp_dropout = Dropout(context, f"blocks.{index}.mlp")

    def forward(self, x_sBD: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._branch(self._branch(x_sBD, batch, "attention"), batch, "mlp")

    def _branch(self, x_sBD: torch.Tensor, batch: Batch, name: str) -> torch.Tensor:
        """The residual stream after one of the two branches."""
        norm, branch, dropout = (getattr(self, part) for part in (f"{name}_norm", name, f"{name}_dropout"))
        normed, x = norm(x_sBD), x_sBD.detach()
        with self.saving.instead("norm", normed, lambda: norm(x)):
            out = branch(normed, batch)
        return x_sBD + dropout(out, batch)


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

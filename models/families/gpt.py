"""GPT: norm, attention, norm, MLP, around a residual stream. Its configuration is `ModelConfig` as it is."""

from __future__ import annotations

from typing import Any

from threed.models.families.base import Family
from threed.models.layers.attention import Attention
from threed.models.layers.base import Layer
from threed.models.layers.block import Block, Branch
from threed.models.layers.embedding import Embedding
from threed.models.layers.head import Head
from threed.models.layers.mlp import Mlp
from threed.models.layers.residual import Norm
from threed.schema import ModelConfig


def block(model: ModelConfig, index: int) -> Block:
    name = f"blocks.{index}"
    attention, mlp = f"{name}.attention", f"{name}.mlp"
    return Block(name, Branch(attention, Norm(model, f"{attention}_norm"), Attention(model, attention)),
                 Branch(mlp, Norm(model, f"{mlp}_norm"), Mlp(model, mlp)))


def layers(model: ModelConfig) -> list[Layer]:
    return [Embedding(model), *(block(model, index) for index in range(model.layers)), Head(model)]


def _size(layers: int, hidden: int, heads: int, seq_len: int, vocab: int = 50257) -> dict[str, Any]:
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "seq_len": seq_len, "vocab": vocab,
        "position": "learned", "norm": "layernorm", "activation": "gelu", "bias": True,
        "tie_embeddings": True,
    }


SIZES: dict[str, dict[str, Any]] = {
    # Radford et al. 2019
    "gpt2-small": _size(12, 768, 12, 1024),
    "gpt2-medium": _size(24, 1024, 16, 1024),
    "gpt2-large": _size(36, 1280, 20, 1024),
    "gpt2-xl": _size(48, 1600, 25, 1024),
    # Brown et al. 2020, table 2.1. Its XL has 24 heads, which do not divide 2048, and its 13B a hidden size
    # of 5140, which 40 heads do not: 16 and 5120 are what everyone builds.
    "gpt3-small": _size(12, 768, 12, 2048),
    "gpt3-medium": _size(24, 1024, 16, 2048),
    "gpt3-large": _size(24, 1536, 16, 2048),
    "gpt3-xl": _size(24, 2048, 16, 2048),
    "gpt3-2.7b": _size(32, 2560, 32, 2048),
    "gpt3-6.7b": _size(32, 4096, 32, 2048),
    "gpt3-13b": _size(40, 5120, 40, 2048),
    "gpt3-175b": _size(96, 12288, 96, 2048),
    # Narayanan et al. 2021, table 1
    "megatron-1t": _size(128, 25600, 160, 2048, 51200),
}
GPT = Family(layers, sizes=SIZES)

"""GPT whose MLPs are cut over an axis `xp` of their own; the rest is cut over tp, and all ranks of xp hold it."""

from __future__ import annotations

from typing import Any

from threed.models.families.base import Family
from threed.models.layers.attention import Attention
from threed.models.layers.base import Layer
from threed.models.layers.block import Block, Branch
from threed.models.layers.embedding import Embedding
from threed.models.layers.head import Head
from threed.models.layers.mlp import Mlp
from threed.models.layers.parts import Norm
from threed.schema import ModelConfig


def block(model: ModelConfig, index: int) -> Block:
    name = f"blocks.{index}"
    attention, mlp = f"{name}.attention", f"{name}.mlp"
    return Block(name, Branch(attention, Norm(model, f"{attention}_norm"), Attention(model, attention)),
                 Branch(mlp, Norm(model, f"{mlp}_norm"), Mlp(model, mlp, axis="xp")))


def layers(model: ModelConfig) -> list[Layer]:
    return [Embedding(model), *(block(model, index) for index in range(model.layers)), Head(model)]


def check(model: Any, ranks: Any) -> list[str]:
    size, cells = ranks.get("xp", 1), model.num_ffn_hidden
    return [f"model.ffn_hidden={cells} is not divisible by parallel.xp={size}"] if cells % size else []


SECOND_AXIS = Family(layers, check=check)

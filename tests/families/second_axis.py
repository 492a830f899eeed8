"""GPT whose MLPs are cut over an axis `xp` of their own. All ranks of xp hold what is cut over tp."""

from __future__ import annotations

from collections.abc import Mapping

from threed.extend import Block, Branch, Family, Layer, Mlp, ModelConfig, gpt


def block(model: ModelConfig, usual: Block) -> Block:
    attention, mlp = usual.branches
    return Block(usual.name, attention, Branch(mlp.name, mlp.norm, Mlp(model, mlp.name, axis="xp")))


def layers(model: ModelConfig) -> list[Layer]:
    return [block(model, layer) if isinstance(layer, Block) else layer for layer in gpt.layers(model)]


def check(model: ModelConfig, ranks: Mapping[str, int]) -> list[str]:
    size, cells = ranks["xp"], model.num_ffn_hidden
    return [f"model.ffn_hidden={cells} is not divisible by parallel.xp={size}"] if cells % size else []


SECOND_AXIS = Family(layers, check=check)

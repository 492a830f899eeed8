"""A toy without attention: embedding, blocks of a norm and an MLP, head. No token sees another one."""

from __future__ import annotations

from threed.extend import Block, Embedding, Family, Head, Layer, ModelConfig, gpt


def layers(model: ModelConfig) -> list[Layer]:
    blocks = [Block(f"blocks.{index}", gpt.block(model, index).branches[1]) for index in range(model.layers)]
    return [Embedding(model), *blocks, Head(model)]


POINTWISE = Family(layers)

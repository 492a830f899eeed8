"""GPT-J's block: attention and MLP side by side, of one norm. x + attention(norm(x)) + mlp(norm(x)).

    threed train configs/toy.yaml model.family=parallel_block.py:PARALLEL
"""

from __future__ import annotations

from dataclasses import dataclass

from threed.extend import Attention, Block, Branch, Embedding, Family, Head, Layer, Mlp, ModelConfig, Norm


@dataclass
class ParallelConfig(ModelConfig):
    family: str = "parallel"
    tie_embeddings: bool = False


def block(model: ParallelConfig, index: int) -> Block:
    name = f"blocks.{index}"
    bodies = Attention(model, f"{name}.attention"), Mlp(model, f"{name}.mlp")
    return Block(name, Branch(f"{name}.both", Norm(model, f"{name}.norm"), *bodies))


def layers(model: ParallelConfig) -> list[Layer]:
    return [Embedding(model), *(block(model, index) for index in range(model.layers)), Head(model)]


PARALLEL = Family(layers, ParallelConfig)

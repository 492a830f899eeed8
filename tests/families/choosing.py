"""A toy whose first block chooses an integer for each token, which later blocks read: no gradient belongs to
it, and it is not chosen again where the block is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from threed.extend import Embedding, Family, Head, Layer, ModelConfig, Out, Share, gpt

chosen: list[int] = []  # how many tokens each choice was about


@dataclass
class ChoosingConfig(ModelConfig):
    family: str = "choosing"
    told: bool = True  # whether a reader says that no gradient belongs to it


class Choosing(Layer):
    """A block of GPT whose output is scaled by the choice for each token."""

    def __init__(self, model: ChoosingConfig, index: int):
        self.model, self.name, self.block = model, f"blocks.{index}", gpt.block(model, index)
        self.first, self.reads = index == 0, ("picks",) if index else ()
        self.shapes = {"picks": (model.seq_len, 1)}
        self.without_grad = {"picks": "int64"} if self.first or model.told else {}

    def makes(self, share: Share) -> dict[str, int]:
        return {"picks": 8 * self.model.seq_len * share.sequences} if self.first else {}

    def forward(self, x: Any, batch: Any, picks: Any = None) -> Out:
        if picks is None:
            picks = batch.tokens_BS.t() % 3
            chosen.append(picks.numel())
        x = self.block(x, batch) * (1.0 + 0.25 * picks.unsqueeze(-1).to(x.dtype))
        return Out(x, {"picks": picks} if self.first else {})


def layers(model: ChoosingConfig) -> list[Layer]:
    return [Embedding(model), *(Choosing(model, index) for index in range(3)), Head(model)]


CHOOSING = Family(layers, ChoosingConfig)

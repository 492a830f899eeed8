"""A toy whose first block hands two tensors to later ones, and whose blocks add to the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from threed.extend import SEQUENCE, Embedding, Family, Head, Layer, ModelConfig, Out, Share, gpt


@dataclass
class HandingConfig(ModelConfig):
    family: str = "handing"
    penalty: float = 0.01  # of large activations
    reported: str = "loss"  # with which it is reported: the loss, or apart from it


class Handing(Layer):
    """A block of GPT around which tensors are handed on."""

    def __init__(self, model: HandingConfig, index: int):
        self.model, self.name, self.block = model, f"blocks.{index}", gpt.block(model, index)
        self.first, self.reads = index == 0, ((), ("gate",), ("gate", "skip"))[min(index, 2)]
        self.loss = index < 2

    def makes(self, share: Share) -> dict[str, int]:
        size = share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE)
        return {"gate": size, "skip": size} if self.first else {}

    def forward(self, x: Any, batch: Any, gate: Any = None, skip: Any = None) -> Out:
        x = self.block(x if gate is None else x * gate.sigmoid(), batch)
        x = x if skip is None else x + skip
        tokens = x.square().mean(-1)
        out = Out(x, {"gate": x * 0.5, "skip": x * 2.0} if self.first else {})
        if not self.loss:
            return out
        penalty = self.model.penalty * self.context.total(tokens.sum()) / batch.num_tokens
        return out._replace(**{"penalty" if self.model.reported == "apart" else "loss": penalty})


def layers(model: HandingConfig) -> list[Layer]:
    return [Embedding(model), *(Handing(model, index) for index in range(3)), Head(model)]


HANDING = Family(layers, HandingConfig)

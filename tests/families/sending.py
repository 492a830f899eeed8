"""GPT whose MLPs work on rows that the ranks of dp sent to each other, and send the results back."""

from __future__ import annotations

from typing import Any

from threed.extend import (
    SEQUENCE,
    Embedding,
    Exchanged,
    Family,
    Head,
    Layer,
    ModelConfig,
    Out,
    Share,
    added,
    gpt,
)


class Sends(Layer):
    """Attention, and the norm of the MLP: its rows leave, equally many for each rank."""

    def __init__(self, model: ModelConfig, index: int):
        self.model, self.name = model, f"blocks.{index}"
        self.travels = {"leaving": Exchanged("arrived", over="dp")}
        self.attention, mlp = gpt.block(model, index).branches
        self.norm = mlp.norm

    def makes(self, share: Share) -> dict[str, int]:
        return {"leaving": share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE)}

    def forward(self, x: Any, batch: Any) -> Out:
        x = self.attention(x, batch)
        return Out(x, {"leaving": self.norm(x).flatten(0, 1)})


class Computes(Layer):
    """The MLP of the rows that arrived. The residual stream passes through it."""

    adds, reads = True, ("arrived",)

    def __init__(self, model: ModelConfig, index: int):
        self.model, self.name = model, f"blocks.{index}.mlp"
        self.travels = {"answers": Exchanged("returned", over="dp")}
        self.mlp, = gpt.block(model, index).branches[1].bodies
        self.shapes = {"arrived": (model.seq_len, model.hidden)}

    def makes(self, share: Share) -> dict[str, int]:
        return {"answers": share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE)}

    def forward(self, x: Any, batch: Any, arrived: Any) -> Out:
        return Out(x, {"answers": self.mlp(arrived.unsqueeze(1), batch).squeeze(1)})


class Collects(Layer):
    """Adds the rows that came back."""

    adds, reads, spent = True, ("returned",), ("returned",)

    def __init__(self, index: int):
        self.name = f"blocks.{index}.collect"

    def forward(self, x: Any, batch: Any, returned: Any) -> Any:
        return added(x, returned.unflatten(0, (-1, len(batch.samples_B))))


def layers(model: ModelConfig) -> list[Layer]:
    blocks = [part for index in range(model.layers)
              for part in (Sends(model, index), Computes(model, index), Collects(index))]
    return [Embedding(model), *blocks, Head(model)]


SENDING = Family(layers)

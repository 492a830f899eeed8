"""GPT whose MLPs are cut over a fold `fp`: runs of ranks of dp x tp hold one together.

Rows of all ranks of a run are gathered, each computes its part of the hidden layer, and the parts of the
results go back and are added up.
"""

from __future__ import annotations

from typing import Any

from threed.extend import (
    SEQUENCE,
    Cut,
    Embedding,
    Exchanged,
    F,
    Family,
    Gathered,
    Head,
    Held,
    Layer,
    ModelConfig,
    Out,
    Parameter,
    Share,
    added,
    gpt,
)


class Norms(Layer):
    """The norm of the MLP: its rows are gathered over a run."""

    def __init__(self, model: ModelConfig, index: int):
        self.model, self.name = model, f"blocks.{index}"
        self.norm = gpt.block(model, index).branches[1].norm
        self.travels = {"rows": Gathered("all", over="fp")}

    def makes(self, share: Share) -> dict[str, int]:
        return {"rows": share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE)}

    def forward(self, x: Any, batch: Any) -> Out:
        return Out(x, {"rows": self.norm(x).flatten(0, 1)})


class Attends(Norms):
    """GPT's attention before it."""

    def __init__(self, model: ModelConfig, index: int):
        super().__init__(model, index)
        self.attention = gpt.block(model, index).branches[0]

    def forward(self, x: Any, batch: Any) -> Out:
        return super().forward(self.attention(x, batch), batch)


class Mlp(Held):
    """This rank's part of the hidden layer."""

    def __init__(self, model: ModelConfig, name: str):
        inner, width, std = model.num_ffn_hidden, model.hidden, model.init_std
        self.held = {"up": Parameter(f"{name}.up", (inner, width), (Cut(0, "fp"),), std=std),
                     "down": Parameter(f"{name}.down", (width, inner), (Cut(1, "fp"),), std=std)}

    def forward(self, rows: Any) -> Any:
        return F.linear(F.gelu(F.linear(rows, self.compute.up)), self.compute.down)


class Computes(Layer):
    """This rank's part of the MLP of all rows of its run, in parts that go back to their ranks."""

    adds, reads = True, ("all",)

    def __init__(self, model: ModelConfig, index: int):
        self.model, self.name = model, f"blocks.{index}.mlp"
        self.mlp = Mlp(model, self.name)
        self.travels = {"parts": Exchanged("mine", over="fp")}

    def makes(self, share: Share) -> dict[str, int]:
        return {"parts": share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE) * share.over("fp")}

    def forward(self, x: Any, _: Any, all: Any) -> Out:
        return Out(x, {"parts": self.mlp(all)})


class Collects(Layer):
    """Adds up the parts of this rank's rows."""

    adds, reads = True, ("mine",)

    def __init__(self, index: int):
        self.name = f"blocks.{index}.collect"

    def forward(self, x: Any, batch: Any, mine: Any) -> Any:
        parts = self.context.groups["fp"].size()
        return added(x, mine.unflatten(0, (parts, -1, len(batch.samples_B))).sum(0))


def layers(model: ModelConfig, first: type[Norms] = Attends) -> list[Layer]:
    blocks = [part for index in range(model.layers)
              for part in (first(model, index), Computes(model, index), Collects(index))]
    return [Embedding(model), *blocks, Head(model)]


FOLDED = Family(layers)
# No token sees another one: for axes that divide the tokens of a sample.
POINTWISE = Family(lambda model: layers(model, Norms))

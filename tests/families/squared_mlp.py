"""GPT with an MLP of its own: the square of a ReLU (So et al. 2021), times a learned gain."""

from __future__ import annotations

from threed.extend import (
    WHOLE,
    Block,
    Branch,
    Column,
    Cost,
    F,
    Family,
    Held,
    Layer,
    ModelConfig,
    Parameter,
    Part,
    Row,
    Saved,
    Share,
    Tile,
    cut_over,
    gpt,
    torch,
)


class Gain(Held):
    """x times a number for each of its last dim, cut over tp as that is."""

    def __init__(self, name: str, length: int, tile: Tile):
        cuts = cut_over("tp", 0, tile)
        self.held = {"gain": Parameter(f"{name}.gain", (length,), cuts, fill=1.0, tile=tile)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.compute.gain


class SquaredMlp(Part):
    kind, cell, axis = "mlp", "number of model.ffn_hidden", "tp"

    def __init__(self, model: ModelConfig, name: str, tile: Tile = WHOLE):
        self.model, self.name, self.tile, self.cells = model, name, tile, model.num_ffn_hidden
        self.up = Column(model, f"{name}.up", model.num_ffn_hidden, tile)
        self.gain = Gain(name, model.num_ffn_hidden, tile)
        self.down = Row(model, f"{name}.down", model.num_ffn_hidden, model.residual_std, tile)

    def tiled(self, tile: Tile) -> SquaredMlp:
        return SquaredMlp(self.model, self.name, tile)

    def cost(self, share: Share) -> Cost:
        size = share.bytes(self.model.seq_len * self.model.num_ffn_hidden // self.tile.count, "tp")
        return super().cost(share) + Cost(saved=(Saved("open", size), Saved("squared", size, "mlp_act"),
                                                 Saved("times the gain", size, "mlp_act")))

    def forward(self, x_sBD: torch.Tensor, _) -> torch.Tensor:
        opened, instead = F.relu(self.up(x_sBD)), self.context.saving.instead
        kept = opened.detach()
        squared = opened.square()
        with instead("mlp_act", squared, lambda: kept.square()):
            inner = self.gain(squared)
        with instead("mlp_act", inner, lambda: self.gain(kept.square())):
            return self.down(inner)


def block(model: ModelConfig, usual: Block) -> Block:
    attention, mlp = usual.branches
    return Block(usual.name, attention, Branch(mlp.name, mlp.norm, SquaredMlp(model, mlp.name)))


def layers(model: ModelConfig) -> list[Layer]:
    return [block(model, layer) if isinstance(layer, Block) else layer for layer in gpt.layers(model)]


SQUARED = Family(layers)

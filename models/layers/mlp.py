"""The MLP: up, the activation, down. A tile is a run of the hidden layer.

With swiglu there are two products of one input, gate and up; their rows are two runs of one matrix.

Shapes: S sequence, s a rank's part of the sequence in the residual stream, B micro-batch, D hidden, F hidden
layer of this rank (and tile).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from threed.base.later import F
from threed.models.layers.base import Part
from threed.models.layers.parts import Column, Row, replaced
from threed.schema import ModelConfig
from threed.spec.kernels import Moved, partial_sums
from threed.spec.parameter import WHOLE, Cost, Rows, Saved, Share, Tile

if TYPE_CHECKING:
    import torch

    from threed.tensor.context import Batch


class Mlp(Part):
    """Two linears around an activation, the body of a `Branch`. `axis`: which cuts the hidden layer."""

    kind, cell = "mlp", "number of model.ffn_hidden"

    def __init__(self, model: ModelConfig, name: str, tile: Tile = WHOLE, axis: str = "tp",
                 inner: int | None = None):
        """`inner`: its hidden layer; None: as model.ffn_hidden."""
        self.model, self.name, self.tile, self.axis = model, name, tile, axis
        self.cells, products = inner or model.num_ffn_hidden, 2 if model.activation == "swiglu" else 1
        up = Column(model, f"{name}.up", products * self.cells, tile, runs=products, axis=axis)
        self.up = up.offering({"gate_proj": Rows(0, 1, 2), "up_proj": Rows(1, 2, 2)} if products == 2
                              else {"up_proj": Rows()})
        down = Row(model, f"{name}.down", self.cells, model.residual_std, tile, axis)
        self.down = down.offering({"down_proj": Rows()})

    def tiled(self, tile: Tile) -> Mlp:
        return Mlp(self.model, self.name, tile, self.axis, self.cells)

    def cost(self, share: Share) -> Cost:
        seq = share.seen(self.model.seq_len, self.axis)
        size = share.bytes(seq * self.cells // self.tile.count, self.axis)
        down = (Saved("activated", size, "mlp_act"),) if self.down.keeps else ()
        saved, count = (Saved("up", size), *down), size // share.element
        moved = Moved("gelu", 2 * size, 3 * size, (1, 1), "mlp_act", (2 * count, 2 * count))
        if self.model.activation == "swiglu":
            opened = () if self.model.fuses else (Saved("opened gate", size, "mlp_act"),)
            saved = (Saved("gate and up", 2 * size), *opened, *down)
            moved = Moved("swiglu", 5 * size, 13 * size, (2, 4), "mlp_act", (count, count))
            if self.model.fuses:
                moved = Moved("swiglu", 3 * size, 5 * size, (1, 1), "mlp_act", (count, count), fused=True)
        cost = super().cost(share) + Cost((moved,), saved)
        if not self._opens:
            return cost
        width, sums = self.up.outputs // share.over(self.axis), 2 * self.up.sums_bias
        added = partial_sums(width, size // width // share.element) if sums else 0
        return replaced(cost, [moved, *self.up.of_bias(share)],
                        [moved._replace(backward=3 * size + added, kernels=(1, 1 + sums), fused=True)])

    @property
    def _opens(self) -> bool:
        """Whether GELU is a piece with the gradient of its bias."""
        return self.model.fuses and self.model.activation != "swiglu" and self.up.computes_as(Column)

    @property
    def end(self) -> Row:
        return self.down

    def forward(self, x_sBD: torch.Tensor, _: Batch, bias: bool = True) -> torch.Tensor:
        """`bias`: as of `end`."""
        x_SBF = self.up(x_sBD, not self._opens)
        kept, swiglu = x_SBF.detach(), self.model.activation == "swiglu"
        if swiglu and not self.model.fuses:
            gate, up = x_SBF.chunk(2, -1)
            opened = F.silu(gate)
            with self.context.saving.instead("mlp_act", opened, lambda: F.silu(kept.chunk(2, -1)[0])):
                inner = opened * up
            again = _gated
        elif self._opens:
            sums = self.context.fused.sums(x_SBF.device)
            inner, again = self.context.pieces.gelu(x_SBF, self.up.bias, sums), sums.gelu
        else:
            again = self.context.fused.swiglu if swiglu else partial(F.gelu, approximate="tanh")
            inner = again(x_SBF)
        with self.context.saving.instead("mlp_act", inner, lambda: again(kept)):
            return self.down(inner, bias)


def _gated(x_SBF: torch.Tensor) -> torch.Tensor:
    gate, up = x_SBF.chunk(2, -1)
    return F.silu(gate) * up

"""Residual: what works on the residual stream: norms, dropout, and its sums.

Shapes: s a rank's part of the sequence in the residual stream, B micro-batch, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from threed.base.later import F
from threed.models.layers.base import Part
from threed.models.layers.parts import Held
from threed.schema import ModelConfig
from threed.spec.kernels import WIDEST, Moved
from threed.spec.parameter import SEQUENCE, Cost, Parameter, Saved, Share

if TYPE_CHECKING:
    import torch

    from threed.tensor.context import Batch

# Bytes that separate operations read and write to compute one number of a dropout mask (tensor/random.py).
MASK = 269


class Norm(Held):
    """model.norm, of the residual stream. It keeps its input and statistics, not its output."""

    def __init__(self, model: ModelConfig, name: str):
        self.model, self.name = model, name
        self.held = {"weight": Parameter(f"{name}.weight", (model.hidden,), fill=1.0)}
        if model.norm == "layernorm":
            self.held["bias"] = Parameter(f"{name}.bias", (model.hidden,))

    def cost(self, share: Share) -> Cost:
        seq, numbers = self.model.seq_len, len(self.held)  # an rms norm has one number a token, in fp32
        stream = share.bytes(seq * self.model.hidden, SEQUENCE)
        return Cost((self.moved(share),), saved=(
            Saved(f"input of {self.name}", stream),
            Saved(f"statistics of {self.name}", share.bytes(seq * numbers, SEQUENCE, 4))))

    @property
    def fuses(self) -> bool:
        """Whether it is a piece with the sum that it reads, and with what else reads that (tensor/pieces)."""
        model = self.model
        return (model.fuses and model.norm == "layernorm" and model.hidden <= WIDEST
                and self.computes_as(Norm))

    def moved(self, share: Share) -> Moved:
        """Of the norm alone."""
        numel = share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE, 1)
        return moved_by_norm(self.name, numel, share.element,
                             self.model.norm == "layernorm" or self.model.fuses, "norm")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, eps = self.compute.weight, self.model.norm_eps
        if self.model.norm == "rmsnorm":
            return self.context.rms_norm(x, weight, eps)
        return F.layer_norm(x, x.shape[-1:], weight, self.compute.bias, eps)

    def beside(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x; and x, for what else reads it: where the norm fuses, the gradients of both are one
        pass."""
        if not self.fuses:
            return self(x), x
        return self.context.pieces.normed(x, self.values, self.context.fused.sums(x.device))

    def again(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x, as it was computed before: without a graph."""
        by = self.context.fused.sums(x.device)
        return by.ended(x, None, None, None, self.values)[1] if self.fuses else self(x)

    @property
    def values(self) -> Any:
        """As pieces.Normed."""
        return self.context.pieces.Normed(self.compute.weight, self.compute.bias, self.model.norm_eps)


def moved_by_norm(name: str, numel: int, own: int, one: bool, piece: str) -> Moved:
    """What a norm of `numel` numbers moves. `own`: bytes of an element in the dtype of compute; `one`:
    whether it is one kernel."""
    if one:
        return Moved(name, 2 * own * numel, 3 * own * numel, (1, 2), piece)
    # Separate operations on fp32: each number is read or written so many times.
    narrow = own < 4
    forward, backward = 28 + 2 * (own + 4) * narrow, 76 + 3 * (own + 4) * narrow
    return Moved(name, forward * numel, backward * numel, (8, 13), piece)


class Dropout(Part):
    """Dropout of the residual stream at one site."""

    def __init__(self, model: ModelConfig, site: str):
        self.model, self.site = model, site

    def cost(self, share: Share) -> Cost:
        size = share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE, 1)
        if not self.model.dropout:
            return Cost()
        own = share.element
        if self.model.fuses:
            return Cost((*self.moved(share),))
        moved = Moved("dropout", (MASK + 4 * own + 1) * size, (4 * own + 1) * size, (31, 2))
        return Cost((moved,), saved=(Saved("dropout mask", size),))

    def moved(self, share: Share) -> list[Moved]:
        """Of dropout as a piece of its own."""
        size = share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE)
        return [Moved("dropout", 2 * size, 2 * size, fused=True)] if self.model.dropout else []

    def dropped(self, batch: Batch) -> Any:
        """As pieces.DropOf, for a piece that drops; None where nothing is dropped."""
        if self.model.dropout == 0.0 or not batch.train:
            return None
        rows, key = self.context.places(batch.documents).runs, (batch.seed, self.site)
        return self.context.pieces.DropOf(self.model.dropout, key, batch.samples_B, rows)

    def forward(self, x_sBD: torch.Tensor, batch: Batch) -> torch.Tensor:
        probability = self.model.dropout
        if probability == 0.0 or not batch.train:
            return x_sBD
        rows, key = self.context.places(batch.documents).runs, (batch.seed, self.site)
        if self.model.fuses:
            return self.context.fused.drop(x_sBD, probability, key, batch.samples_B, rows)
        length, _, hidden = x_sBD.shape
        counters = self.context.numbers(rows, x_sBD.device, hidden).view(-1, length, hidden)
        keep_BsD = self.context.keep_mask(probability, key, batch.samples_B, counters)
        return x_sBD * keep_BsD.transpose(0, 1) / (1.0 - probability)


def added(x_sBD: torch.Tensor | None, part_sBD: torch.Tensor) -> torch.Tensor:
    """The sum; the part alone where there is no residual stream: a tile is computed again for its graph
    without."""
    return part_sBD if x_sBD is None else x_sBD + part_sBD

"""The parts of layers: linears and tables cut over tp, norms, dropout.

A linear counts its product, its bytes over tp, and, for a delayed weight gradient, the operand on its cut
side. The operand on the other side is of the residual stream, which several linears may share: their layer
counts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from threed.later import F, torch
from threed.models.kernels import Kernel, Moved, Product
from threed.models.layers.base import Part
from threed.models.spec import SEQUENCE, TILES, WHOLE, Cost, Cut, Parameter, Saved, Share, Tile
from threed.schema import ModelConfig

if TYPE_CHECKING:
    from threed.tensor.context import Batch, Context

WORD = "embedding.word.weight"
# Bytes that separate operations read and write to compute one number of a dropout mask (tensor/random.py).
MASK = 269


def cut_over(axis: str, dim: int, tile: Tile, runs: int = 1) -> tuple[Cut, ...]:
    tiles = (Cut(dim, TILES, runs),) if tile.count > 1 else ()
    return (*tiles, Cut(dim, axis, runs))


def vocabulary(model: ModelConfig, name: str, tile: Tile = WHOLE, tied: bool = False) -> Parameter:
    """A row for each token, [padded vocabulary, hidden]."""
    return Parameter(name, (model.padded_vocab, model.hidden), cut_over("tp", 0, tile), model.init_std,
                     unpadded=model.vocab, tile=tile, tied=tied)


class Held(Part):
    """A part that holds parameters, by their names in `compute`: the torch module that has them after
    `build`."""

    held: dict[str, Parameter]

    def parameters(self) -> list[Parameter]:
        return list(self.held.values())

    def module(self, context: Context) -> torch.nn.Module:
        """The module for the parameters: empty, or a layer of megatron-core, which decides how they are
        cut."""
        return torch.nn.Module()

    def modules(self) -> list[torch.nn.Module]:
        return [self.compute]

    def build(self, context: Context, weights: Mapping[str, torch.nn.Parameter]) -> Self:
        self.context = context
        with torch.device("meta"):
            self.compute: Any = self.module(context)
        made = {name: tuple(value.shape) for name, value in self.compute.named_parameters()}
        given = {name: tuple(weights[parameter.key].shape) for name, parameter in self.held.items()}
        if made and made != given:
            keys = ", ".join(parameter.key for parameter in self.held.values())
            raise AssertionError(f"{keys}: {type(self.compute).__name__} has {made}, and is given {given}")
        for name, parameter in self.held.items():
            setattr(self.compute, name, weights[parameter.key])
        return self


class _Linear(Held):
    axis: str  # the axis of the mesh over which it is cut

    def __init__(self, weight: Parameter, bias: Parameter | None):
        self.held = {"weight": weight} | ({"bias": bias} if bias is not None else {})
        self.outputs, self.inputs = (size // (weight.tile.count if dim == weight.cuts[0].dim else 1)
                                     for dim, size in enumerate(weight.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x)

    def product(self, seq_len: int, share: Share, outputs: int, inputs: int) -> Product:
        """`outputs`, `inputs`: of this rank."""
        return Product(seq_len * share.sequences, outputs, inputs)


class Column(_Linear):
    """y = x W^T + b, W cut by rows over an axis. Over tp: [s, B, inputs] -> [S, B, outputs / tp]. Another
    axis does not gather the sequence: [s, B, inputs] -> [s, B, outputs / its ranks]."""

    def __init__(self, model: ModelConfig, name: str, outputs: int, tile: Tile = WHOLE, runs: int = 1,
                 bias: bool | None = None, axis: str = "tp"):
        """`runs`: products of one input, whose rows follow each other. `bias`: None: as model.bias."""
        self.model, self.axis, cuts = model, axis, cut_over(axis, 0, tile, runs)
        has_bias = model.bias if bias is None else bias
        super().__init__(
            Parameter(f"{name}.weight", (outputs, model.hidden), cuts, model.init_std, tile=tile),
            Parameter(f"{name}.bias", (outputs,), cuts, tile=tile) if has_bias else None)

    def cost(self, share: Share) -> Cost:
        seq, axis = share.seen(self.model.seq_len, self.axis), self.axis
        # The input's gradient is summed over the axis. Where its sequence is cut over it, it is gathered for
        # the product and once more for the weight's gradient, and the sum is scattered.
        sent = {("input", axis): 2}
        if axis in share.sequence:
            sent = {("forward", axis): 1, ("input", axis): 1, ("weight", axis): 1}
        stream, size = seq * self.model.hidden, share.bytes(seq * self.outputs, axis)
        kernels: list[Kernel] = [self.product(seq, share, self.outputs // share.over(axis), self.inputs)]
        if "bias" in self.held:
            kernels.append(Moved("gradient of the bias", 0, size, (0, 1)))
        return Cost(tuple(kernels), operands=size,
                    sent={where: share.sent(stream, axis, rings) for where, rings in sent.items()})

    def module(self, context: Context) -> torch.nn.Module:
        return context.column(self.inputs, self.outputs, "bias" in self.held, self.axis)


class Row(_Linear):
    """y = x W^T + b, W cut by columns over an axis and the product summed over it. Over tp:
    [S, B, inputs / tp] -> [s, B, outputs]. Of several tiles the last has the bias."""

    def __init__(self, model: ModelConfig, name: str, inputs: int, std: float, tile: Tile = WHOLE,
                 axis: str = "tp"):
        self.model, self.axis = model, axis
        bias = Parameter(f"{name}.bias", (model.hidden,)) if model.bias and tile.last else None
        shape = model.hidden, inputs
        super().__init__(Parameter(f"{name}.weight", shape, cut_over(axis, 1, tile), std, tile=tile), bias)

    def cost(self, share: Share) -> Cost:
        seq = share.seen(self.model.seq_len, self.axis)
        kernels: list[Kernel] = [
            self.product(seq, share, self.outputs, self.inputs // share.over(self.axis))]
        if "bias" in self.held:
            stream = share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE)
            kernels.append(Moved("bias", 2 * stream, stream))
        return Cost(tuple(kernels), operands=share.bytes(seq * self.inputs, self.axis),
                    sent=sums(share, seq * self.model.hidden, self.axis))

    def module(self, context: Context) -> torch.nn.Module:
        return context.row(self.inputs, self.outputs, "bias" in self.held, self.axis)


def sums(share: Share, stream: int, axis: str = "tp") -> dict[tuple[str, str], int]:
    """What is sent where the residual stream is a sum over an axis: scattered where its sequence is cut over
    that, and its gradient gathered."""
    rings = {("forward", axis): 1, ("input", axis): 1} if axis in share.sequence else {("forward", axis): 2}
    return {where: share.sent(stream, axis, count) for where, count in rings.items()}


class Table(Held):
    """Token ids [B, S] -> their rows [s, B, D], the vocabulary cut over tp. Of a tile: zeros for ids not in
    it."""

    def __init__(self, model: ModelConfig, weight: Parameter):
        self.model, self.held = model, {"weight": weight}

    def cost(self, share: Share) -> Cost:
        seen = share.bytes(share.seen(self.model.seq_len, "tp") * self.model.hidden)
        (weight,) = self.held.values()
        table = share.bytes(weight.numel, "tp") // share.sequences
        moved = Moved("rows of the table", 2 * seen, 2 * seen + table)
        if share.over("tp") > 1 or weight.tile.count > 1:  # rows of other ranks and tiles are 0
            moved = Moved("rows of the table", 4 * seen, 4 * seen + table, (3, 2))
        return Cost((moved,), sent=sums(share, self.model.seq_len * self.model.hidden))

    def module(self, context: Context) -> torch.nn.Module:
        return context.table(self.model.padded_vocab, self.model.hidden, self.held["weight"].tile)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return self.compute(tokens_BS)


class Norm(Held):
    """model.norm, of the residual stream. It keeps its input and statistics; its output is kept by what reads
    that."""

    def __init__(self, model: ModelConfig, name: str):
        self.model, self.name = model, name
        self.held = {"weight": Parameter(f"{name}.weight", (model.hidden,), fill=1.0)}
        if model.norm == "layernorm":
            self.held["bias"] = Parameter(f"{name}.bias", (model.hidden,))

    def cost(self, share: Share) -> Cost:
        seq, numbers = self.model.seq_len, len(self.held)  # an rms norm has one number a token, in fp32
        stream = share.bytes(seq * self.model.hidden, SEQUENCE)
        return Cost((self._moved(share),), saved=(
            Saved(f"input of {self.name}", stream),
            Saved(f"statistics of {self.name}", share.bytes(seq * numbers, SEQUENCE, 4))))

    def _moved(self, share: Share) -> Moved:
        numel = share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE, 1)
        return moved_by_norm(self.name, numel, share.element,
                             self.model.norm == "layernorm" or self.model.fuses, "norm")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, eps = self.compute.weight, self.model.norm_eps
        if self.model.norm == "rmsnorm":
            return self.context.rms_norm(x, weight, eps)
        return F.layer_norm(x, x.shape[-1:], weight, self.compute.bias, eps)


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
            return Cost((Moved("dropout", 2 * own * size, 2 * own * size),))
        moved = Moved("dropout", (MASK + 4 * own + 1) * size, (4 * own + 1) * size, (31, 2))
        return Cost((moved,), saved=(Saved("dropout mask", size),))

    def forward(self, x_sBD: torch.Tensor, batch: Batch) -> torch.Tensor:
        probability = self.model.dropout
        if probability == 0.0 or not batch.train:
            return x_sBD
        first, length = self.context.sequence()
        hidden, key = x_sBD.shape[-1], (batch.seed, self.site)
        if self.model.fuses:
            return self.context.fused.drop(x_sBD, probability, key, batch.samples_B, first)
        counters = torch.arange(first * hidden, (first + length) * hidden, device=x_sBD.device)
        keep_BsD = self.context.keep_mask(probability, key, batch.samples_B, counters.view(length, hidden))
        return x_sBD * keep_BsD.transpose(0, 1) / (1.0 - probability)


def added(x_sBD: torch.Tensor | None, part_sBD: torch.Tensor) -> torch.Tensor:
    """The sum; the part alone where there is no residual stream: a tile is computed again for its graph
    without."""
    return part_sBD if x_sBD is None else x_sBD + part_sBD

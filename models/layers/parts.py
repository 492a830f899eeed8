"""Parts of layers: linears and tables cut over tp.

A linear counts its product, its bytes over tp, and, for a delayed weight gradient, the operand on its cut
side. The operand on the other side is of the residual stream, which several linears may share: their layer
counts it.

With model.lora_rank all of them are frozen, and a linear may have adapters (Hu et al. 2021), each of which
adds (alpha / rank) B A x to the rows of one target. A frozen linear without adapters keeps nothing for
backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from threed.base.later import torch
from threed.models.layers.base import Part
from threed.schema import ModelConfig
from threed.spec.kernels import FROZEN, Kernel, Moved, Product
from threed.spec.parameter import (
    SEQUENCE,
    TILES,
    WHOLE,
    Cost,
    Cut,
    Parameter,
    Rows,
    Saved,
    Share,
    Tile,
    Traffic,
    each_of,
)

if TYPE_CHECKING:
    from threed.tensor.context import Context

WORD = "embedding.word.weight"
# Kernels that sort the tokens of a batch, find where each ends, and add up their rows (tensor/pieces).
_SORTED = 8


def cut_over(axis: str, dim: int, tile: Tile, runs: int = 1) -> tuple[Cut, ...]:
    """The cuts of a parameter whose dim is cut over an axis, and before that into a layer's tiles."""
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

    @property
    def learns(self) -> bool:
        """Whether it is trained; else it is frozen."""
        return any(parameter.trains for parameter in self.held.values())

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


class Adapter(Held):
    """(alpha / rank) B A x, added to some rows of a linear. A is cut as the linear's inputs are, and B as its
    outputs. What is not cut has a part of its gradient on each rank, as each has a part of the product.

    PEFT's initial values: A uniform within +-1 / sqrt(inputs), B zero.
    """

    def __init__(self, linear: Linear, name: str, rows: Rows):
        weight, axis = linear.held["weight"], linear.axis
        self.model, self.axis, self.rows, self.name, self.of = linear.model, axis, rows, name, weight.name
        self.inputs, self.outputs = linear.inputs, rows.count(linear.outputs)
        self.column = weight.cuts[0].dim == 0  # whether the linear's outputs are cut, and not its inputs
        rank, cut, over = self.model.lora_rank or 0, cut_over(axis, int(not self.column), WHOLE), (axis,)
        self.held = {
            "A": Parameter(f"{name}.lora_A", (rank, self.inputs), () if self.column else cut,
                           uniform=self.inputs**-0.5, partial_over=over if self.column else ()),
            "B": Parameter(f"{name}.lora_B", (self.outputs, rank), cut if self.column else (),
                           partial_over=() if self.column else over)}

    def cost(self, share: Share) -> Cost:
        seq, ranks = share.seen(self.model.seq_len, self.axis), share.over(self.axis)
        rank, cuts = self.held["A"].shape[0], (1, ranks) if self.column else (ranks, 1)
        inputs, outputs = self.inputs // cuts[0], self.outputs // cuts[1]
        tokens, narrow = share.length(seq) * share.sequences, share.bytes(seq * rank)
        wide, copied = share.bytes(seq * outputs), not self.rows.whole
        moved = Moved("adapter", 3 * wide + 2 * narrow, 2 * wide * copied + 2 * narrow, (2, 1 + copied))
        # For weights' gradients: A x and its gradient, and the gradient of its rows. (That of a whole stream
        # is counted by the branch.)
        operands = 2 * narrow + (wide if self.column else 0)
        return Cost((Product(tokens, rank, inputs), Product(tokens, outputs, rank), moved),
                    (Saved(f"A x of {self.name}", narrow),), operands)

    def factors(self) -> tuple[Rows, float, torch.Tensor, torch.Tensor]:
        """As tensor.adapters.Factors."""
        return self.rows, self.model.lora_scale, self.compute.A, self.compute.B


class Linear(Held):
    """What Column and Row have in common."""

    model: ModelConfig
    axis: str  # the axis of the mesh over which it is cut
    offers: Mapping[str, Rows] = {}  # targets of model.lora_targets that it has, and their rows
    adapters: tuple[Adapter, ...] = ()

    def __init__(self, weight: Parameter, bias: Parameter | None):
        self.held = {"weight": weight} | ({"bias": bias} if bias is not None else {})
        self.outputs, self.inputs = (size // (weight.tile.count if dim == weight.cuts[0].dim else 1)
                                     for dim, size in enumerate(weight.shape))

    def offering(self, offers: Mapping[str, Rows]) -> Self:
        """The same, with adapters of those of these targets (name in model.lora_targets -> its rows) that the
        model asks for."""
        self.offers = offers
        layer = self.held["weight"].name.rpartition(".")[0].rpartition(".")[0]
        self.adapters = tuple(Adapter(self, f"{layer}.{target}", rows) for target, rows in offers.items()
                              if target in self.model.targets)
        return self

    def consisting(self, matrices: tuple[Rows, ...], heads: tuple[Rows, ...]) -> Self:
        """The same, whose weight consists of other matrices (Parameter.matrices, Parameter.heads)."""
        self.held["weight"] = replace(self.held["weight"], matrices=matrices, heads=heads)
        return self

    @property
    def keeps(self) -> bool:
        """Whether it keeps its input, and the gradient of its output, for gradients of weights."""
        return self.learns or bool(self.adapters)

    def parameters(self) -> list[Parameter]:
        return [*super().parameters(), *(each for adapter in self.adapters for each in adapter.parameters())]

    def modules(self) -> list[torch.nn.Module]:
        return [self.compute, *(adapter.compute for adapter in self.adapters)]

    def build(self, context: Context, weights: Mapping[str, torch.nn.Parameter]) -> Self:
        for adapter in self.adapters:
            adapter.build(context, weights)
        return super().build(context, weights)

    def forward(self, x: torch.Tensor, bias: bool = True) -> torch.Tensor:
        """`bias`: False: a piece behind it has the bias: adds up its gradient, and of a Row adds it."""
        return self.compute(x, [adapter.factors() for adapter in self.adapters], bias)

    @property
    def bias(self) -> torch.Tensor | None:
        """After `build`."""
        return self.compute.bias if "bias" in self.held else None

    @property
    def sums_bias(self) -> bool:
        """Whether its bias has a gradient."""
        return "bias" in self.held and self.learns

    def product(self, seq_len: int, share: Share, outputs: int, inputs: int) -> Product:
        """`outputs`, `inputs`: of this rank."""
        return Product(share.length(seq_len) * share.sequences, outputs, inputs, weight=self.learns or FROZEN)

    def added(self, share: Share) -> Cost:
        """The cost of its adapters."""
        return sum((adapter.cost(share) for adapter in self.adapters), Cost())


class Column(Linear):
    """y = x W^T + b, W cut by rows over an axis. Over tp: [s, B, inputs] -> [S, B, outputs / tp]. Another
    axis does not gather the sequence: [s, B, inputs] -> [s, B, outputs / its ranks]."""

    def __init__(self, model: ModelConfig, name: str, outputs: int, tile: Tile = WHOLE, runs: int = 1,
                 bias: bool | None = None, axis: str = "tp"):
        """`runs`: products of one input, whose rows follow each other. `bias`: None: as model.bias."""
        self.model, self.axis, cuts = model, axis, cut_over(axis, 0, tile, runs)
        has_bias = model.bias if bias is None else bias
        super().__init__(
            Parameter(f"{name}.weight", (outputs, model.hidden), cuts, model.init_std, tile=tile,
                      matrices=each_of(runs)),
            Parameter(f"{name}.bias", (outputs,), cuts, tile=tile) if has_bias else None)

    def cost(self, share: Share) -> Cost:
        seq, axis = share.seen(self.model.seq_len, self.axis), self.axis
        # The input's gradient is summed over the axis. Where its sequence is cut over it, it is gathered for
        # the product and once more for the weight's gradient, and the sum is scattered.
        sent = {("input", axis): 2}
        if axis in share.sequence:
            sent = {("forward", axis): 1, ("input", axis): 1, ("weight", axis): int(self.keeps)}
        stream, size = seq * self.model.hidden, share.bytes(seq * self.outputs, axis)
        kernels: list[Kernel] = [self.product(seq, share, self.outputs // share.over(axis), self.inputs),
                                 *self.of_bias(share)]
        return self.added(share) + Cost(
            tuple(kernels), operands=size if self.learns else 0,
            sent={where: share.sent(stream, axis, rings) for where, rings in sent.items()})

    def of_bias(self, share: Share) -> list[Moved]:
        """What its bias moves, where no piece has that."""
        size = share.bytes(share.seen(self.model.seq_len, self.axis) * self.outputs, self.axis)
        return [Moved("gradient of the bias", 0, size, (0, 1), columns=size)] if self.sums_bias else []

    def module(self, context: Context) -> torch.nn.Module:
        return context.column(self.inputs, self.outputs, "bias" in self.held, self.axis)


class Row(Linear):
    """y = x W^T + b, W cut by columns over an axis and the product summed over it. Over tp:
    [S, B, inputs / tp] -> [s, B, outputs]. Of several tiles the last has the bias."""

    def __init__(self, model: ModelConfig, name: str, inputs: int, std: float, tile: Tile = WHOLE,
                 axis: str = "tp"):
        self.model, self.axis = model, axis
        bias = Parameter(f"{name}.bias", (model.hidden,)) if model.bias and tile.last else None
        shape = model.hidden, inputs
        super().__init__(Parameter(f"{name}.weight", shape, cut_over(axis, 1, tile), std, tile=tile,
                                   matrices=each_of(1)), bias)

    def cost(self, share: Share) -> Cost:
        seq = share.seen(self.model.seq_len, self.axis)
        kernels: list[Kernel] = [
            self.product(seq, share, self.outputs, self.inputs // share.over(self.axis)),
            *self.of_bias(share)]
        operands = share.bytes(seq * self.inputs, self.axis) if self.keeps else 0
        return self.added(share) + Cost(tuple(kernels), operands=operands,
                                        sent=sums(share, seq * self.model.hidden, self.axis))

    def of_bias(self, share: Share) -> list[Moved]:
        """As Column's."""
        stream = share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE)
        learned = stream * self.learns
        return [Moved("bias", 2 * stream, learned, (1, int(self.learns)), columns=learned)
                ] if "bias" in self.held else []

    def module(self, context: Context) -> torch.nn.Module:
        return context.row(self.inputs, self.outputs, "bias" in self.held, self.axis)


def keeps(part: Part, kind: type[Linear]) -> bool:
    """Whether a body of a branch keeps what its linears of a kind need for gradients of weights: Column its
    input, Row the gradient of its output. (A body without any may compute what it likes.)"""
    linears = [each for each in every(part) if isinstance(each, kind)]
    return not linears or any(linear.keeps for linear in linears)


def every(part: Part) -> Iterator[Part]:
    """A part and all parts of its."""
    yield part
    for inner in part.parts():
        yield from every(inner)


def replaced(cost: Cost, kernels: Sequence[Kernel], pieces: Sequence[Kernel]) -> Cost:
    """A cost with pieces in place of some of its kernels."""
    rest = [*cost.kernels]
    for kernel in kernels:
        rest.remove(kernel)
    return replace(cost, kernels=(*rest, *pieces))


def sums(share: Share, stream: int, axis: str = "tp") -> dict[tuple[str, str], Traffic]:
    """What is sent where the residual stream is a sum over an axis: scattered where its sequence is cut over
    that, and its gradient gathered."""
    rings = {("forward", axis): 1, ("input", axis): 1} if axis in share.sequence else {("forward", axis): 2}
    return {where: share.sent(stream, axis, count) for where, count in rings.items()}


class LookupTable(Held):
    """Token ids [B, S] -> their rows [s, B, D], the vocabulary cut over tp. Of a tile: zeros for ids not in
    it."""

    def __init__(self, model: ModelConfig, weight: Parameter):
        self.model, self.held = model, {"weight": weight}

    def cost(self, share: Share) -> Cost:
        seen = share.bytes(share.seen(self.model.seq_len, "tp") * self.model.hidden)
        (weight,) = self.held.values()
        table = share.bytes(weight.numel, "tp") // share.sequences
        moved = [Moved("rows of the table", 2 * seen, 2 * seen + table, scattered=seen)]
        if share.over("tp") > 1 or weight.tile.count > 1:  # rows of other ranks and tiles are 0
            moved = [Moved("rows of the table", 4 * seen, 4 * seen + table, (3, 2), scattered=seen)]
        if self.model.fuses:
            # a row of the sum, in fp32, is read and written for each token, or each row of the table
            rows = 2 * min(seen // share.element, table // share.element) * 4
            moved = [moved[0]._replace(backward=0, kernels=(moved[0].kernels[0], 0), scattered=0),
                     Moved("gradient of the table", 0, seen + rows, (0, _SORTED), fused=True)]
        return Cost(tuple(moved), sent=sums(share, self.model.seq_len * self.model.hidden))

    def module(self, context: Context) -> torch.nn.Module:
        return context.table(self.model.padded_vocab, self.model.hidden, self.held["weight"].tile)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        return self.compute(tokens_BS)

"""What layers declare: their parameters, how these are cut, and the cost for a rank. Plain values, no torch.

A parameter is cut along some of its dims, over axes of the mesh, and also over the tiles of its layer. A cut
has equal runs, so that a checkpoint fits any mesh:

    dim of 1 run, over 2 ranks     | 0 0 0 | 1 1 1 |        each rank has one range
    dim of 2 runs, over 2 ranks    | 0 | 1 | 0 | 1 |        each has its part of each run (gate and up)

Inside a layer, and so in `shape`, the runs of a dim follow each other. Initial values, shards and checkpoints
use the shape `stored`, in which a dim of several runs is two dims: then every rank's part is a box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

from threed.base.quantity import ring
from threed.spec.kernels import FROZEN, Kernel, Product

NOT_COUNTED = -1  # a label that adds nothing to the loss
TILES = "tiles"  # stands for an axis in a Cut: the tiles of a layer


class Cut(NamedTuple):
    """Each rank of an axis has its part of each of the `runs` equal runs of a dim."""

    dim: int
    axis: str  # of the mesh, or TILES
    runs: int = 1


class Rows(NamedTuple):
    """Some of the rows of a matrix, which are cells of `runs` runs of `size` rows: of each cell the runs from
    `first` to `stop`. (Queries of a matrix whose cells are a key and value head with its queries.)"""

    first: int = 0
    stop: int = 1
    runs: int = 1
    size: int = 0  # 0: all rows are one cell

    @property
    def whole(self) -> bool:
        return self.stop - self.first == self.runs

    def count(self, rows: int) -> int:
        """How many they are, of all rows."""
        return rows // self.runs * (self.stop - self.first)

    def cells(self, rows: int) -> Iterator[tuple[int, int]]:
        """(first, stop) of those of each cell, of all rows."""
        size = self.size or rows // self.runs
        for cell in range(0, rows, self.runs * size):
            yield cell + self.first * size, cell + self.stop * size


@cache  # a model asks for as many in each block
def each_of(count: int) -> tuple[Rows, ...]:
    """All rows of a matrix, as so many equal runs apart."""
    return tuple(Rows(run, run + 1, count) for run in range(count))


class Tile(NamedTuple):
    """One of the equal parts of a layer that is cut into several units."""

    index: int = 0
    count: int = 1

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def of(self, name: str) -> str:
        return name if self.count == 1 else f"{name} {self.index + 1}/{self.count}"


WHOLE = Tile()


@dataclass(frozen=True)
class Parameter:
    """A layer's parameter, trained or frozen: its shape, how it is cut over axes, and its initial values."""

    name: str  # global: the same on every mesh
    shape: tuple[int, ...]  # of the whole parameter: all ranks and all tiles together
    cuts: tuple[Cut, ...] = ()  # outermost first
    # Initial values: normal with this std, or uniform within +-`uniform`, or else the constant `fill`.
    std: float = 0.0
    uniform: float = 0.0
    fill: float = 0.0
    unpadded: int | None = None  # length of dim 0 without vocabulary padding
    tile: Tile = WHOLE
    tied: bool = False  # two layers use it, and it is a parameter unit of its own
    # Axes over which its gradient must be summed: each rank holds all of it, and has a part of its gradient.
    # (An axis that cuts the sequence needs no name here.)
    partial_over: tuple[str, ...] = ()
    trains: bool = True  # False: it is frozen: it has no gradient and no state of the optimizer
    # Above 0: its gradient is a count, on average so much for each token of the global batch. It is stepped
    # by the rule `balance` (threed/optim), and is not in the gradient norm.
    counted: float = 0.0
    used: tuple[int, int] = (1, 1)  # (n, of m) equal parts of it that compute a token
    # Its matrices, which an optimizer of matrices turns: each some of its rows (all dims of `stored` but the
    # last are rows), and together all of them. None: it is stepped element by element. `heads`: the same,
    # where each head is a matrix; none: as `matrices`.
    matrices: tuple[Rows, ...] = ()
    heads: tuple[Rows, ...] = ()
    # seed -> all initial values, in fp32; None: as `std`, `uniform` and `fill` say.
    init: Callable[[int], Any] | None = field(default=None, compare=False, repr=False)

    @property
    def numel(self) -> int:
        """Elements of this tile, all ranks together."""
        return math.prod(self.shape) // self.tile.count

    @property
    def key(self) -> str:
        """The name with the tile's index. It is the same on every mesh, but it changes with the tiling."""
        return self.name if self.tile.count == 1 else f"{self.name}[{self.tile.index}]"

    @property
    def decay(self) -> bool:
        """Weight decay applies to matrices, not to biases and norms (as in Megatron-LM)."""
        return len(self.shape) > 1

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Axes of the mesh over which it is cut; ranks along other axes have copies."""
        return tuple(dict.fromkeys(cut.axis for cut in self.cuts if cut.axis != TILES))

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """The shape of the whole parameter, in which the runs of a dim are a dim of their own before it."""
        return tuple(size for dim, length in enumerate(self.shape) for size in self._runs(dim, length))

    def part(self, ranks: Mapping[str, int],
             place: Mapping[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) in `stored` of a rank's part of this tile. `ranks`: axis -> its size, 1 where an
        axis is missing; `place`: axis -> the rank's index."""
        offset, shape = [0] * len(self.stored), list(self.stored)
        for cut in self.cuts:
            dim = sum(len(self._runs(before, 0)) for before in range(cut.dim + 1)) - 1
            index, count = place.get(cut.axis, 0), ranks.get(cut.axis, 1)
            if cut.axis == TILES:
                index, count = self.tile
            shape[dim] //= count
            offset[dim] += index * shape[dim]
        return tuple(offset), tuple(shape)

    def local_shape(self, ranks: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of a rank's part of this tile, as in `stored`."""
        return self.part(ranks, {})[1]

    def module_shape(self, ranks: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of a rank's part inside a layer, where the runs of a dim follow each other."""
        sizes = iter(self.local_shape(ranks))
        return tuple(math.prod(next(sizes) for _ in self._runs(dim, 0)) for dim in range(len(self.shape)))

    def _runs(self, dim: int, length: int) -> tuple[int, ...]:
        """The shape of a dim with `length` elements: (runs, length of a run), or (length,) if it is one
        run."""
        runs = max((cut.runs for cut in self.cuts if cut.dim == dim), default=1)
        return (length,) if runs == 1 else (runs, length // runs)


SEQUENCE = "sequence"  # stands for all axes that cut the sequence of the residual stream
HEADS = "heads"  # stands for all axes that cut the heads of attention


@dataclass(frozen=True)
class Share:
    """A rank's share of the work. A layer's numbers are of one sequence and all ranks together. The methods
    turn them into one rank's tokens, bytes and traffic."""

    ranks: Mapping[str, int] = field(default_factory=dict)  # axis -> its size
    sequence: tuple[str, ...] = ()  # axes that cut the sequence of the residual stream
    sequences: int = 1  # of a micro-batch
    element: int = 4  # bytes of an element in the dtype of compute
    documents: bool = False  # whether attention stays inside documents, whose positions travel with the batch
    masked: bool = False  # whether some labels do not count
    tokens: int = 1  # ranks that share a sample, each with some of its tokens
    by_heads: bool = False  # in attention each of these has all tokens, and some of the heads

    def length(self, seq_len: int) -> int:
        """Tokens of a sequence that this rank has."""
        return seq_len // self.tokens

    def over(self, cut: str) -> int:
        """The ranks over which something is cut: those of an axis, or SEQUENCE, or HEADS, or one ('')."""
        if cut == SEQUENCE:
            return math.prod(self.over(axis) for axis in self.sequence)
        if cut == HEADS:
            return self.over("tp") * (self.tokens if self.by_heads else 1)
        return self.ranks.get(cut, 1)

    def seen(self, seq_len: int, axis: str) -> int:
        """Tokens of a sequence that a layer cut over an axis works on, all ranks of tokens together: all
        where the axis gathers them."""
        return seq_len if axis in self.sequence else seq_len // self.over(SEQUENCE)

    def bytes(self, elements: int, cut: str = "", element: int | None = None) -> int:
        """Bytes of a tensor with so many elements a sequence. `element`: bytes of an element, where it has
        another dtype than compute."""
        return elements * (element or self.element) // self.over(cut) // self.tokens * self.sequences

    def gathered(self, elements: int, axis: str, cut: str = "", element: int | None = None) -> Traffic:
        """What a rank sends in one ring over a tensor of so many elements a sequence that the axis makes
        whole."""
        size = elements * (element or self.element) // self.over(cut) * self.sequences
        return Traffic(ring(size, self.over(axis)), int(self.over(axis) > 1))

    def exchanged(self, elements: int, axis: str, cut: str = "") -> Traffic:
        """What a rank sends where it gives each rank along an axis an equal part of what it has of a tensor.
        """
        size = ring(self.bytes(elements, cut), self.over(axis))
        return Traffic(size, exchanged=size, exchanges=int(self.over(axis) > 1))

    def sent(self, elements: int, axis: str, rings: int, element: int | None = None) -> Traffic:
        """What a rank sends in so many rings over a whole tensor."""
        own = elements * (element or self.element) * self.sequences // self.tokens
        return Traffic(rings * ring(own, self.over(axis)), rings * (self.over(axis) > 1))


@dataclass(frozen=True)
class Traffic:
    """What a rank sends in collectives over an axis."""

    bytes: int = 0
    rings: int = 0  # an all-gather and a reduce-scatter are one ring, an all-reduce is two
    exchanged: int = 0  # of the bytes, those in all-to-alls
    exchanges: int = 0  # all-to-alls

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes + other.bytes, self.rings + other.rings, self.exchanged + other.exchanged,
                       self.exchanges + other.exchanges)


class Outflow(NamedTuple):
    """What a unit hands to the next one, where this is not the residual stream."""

    bytes: int
    grad_bytes: int  # of its gradient
    # Whether it is one flat buffer in the dtype of compute, as the residual stream is: it can be kept in the
    # arena, and on the host.
    flat: bool = True


class Saved(NamedTuple):
    """A tensor that is kept from forward to backward."""

    what: str
    bytes: int
    piece: str | None = None  # the activation piece that computes it again instead
    kept_by: str | None = None  # the one without which it is not kept


WITHOUT = "without "
_PHASES = ("forward", "once", "input", "weight")


@dataclass(frozen=True)
class Cost:
    """What a layer costs a rank for a micro-batch."""

    kernels: tuple[Kernel, ...] = ()
    saved: tuple[Saved, ...] = ()
    operands: int = 0  # bytes kept from the input half of backward to the weights' half
    # (phase: forward, input, weight, or once: in training alone, and not where forward is computed again;
    # axis) -> what is sent in it. A phase with the name of an activation piece is of its forward: it is sent
    # in the input half, too, where the piece is computed again. One with WITHOUT before the name is sent
    # there unless the piece is chosen.
    sent: Mapping[tuple[str, str], Traffic] = field(default_factory=dict)

    def __add__(self, other: Cost) -> Cost:
        sent = {where: self.sent.get(where, Traffic()) + other.sent.get(where, Traffic())
                for where in (*self.sent, *other.sent)}
        return Cost(self.kernels + other.kernels, self.saved + other.saved, self.operands + other.operands,
                    sent)

    @property
    def flops(self) -> int:
        """Of matrix products, in forward."""
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def frozen_flops(self) -> int:
        """Of those with a frozen weight, whose gradient is not computed."""
        return sum(kernel.flops for kernel in self.kernels
                   if isinstance(kernel, Product) and kernel.weight == FROZEN)

    def sent_by(self, again: tuple[str, ...] = ()) -> dict[tuple[str, str], Traffic]:
        """(phase, axis) -> what is sent in it, where the pieces `again` are chosen."""
        sent = {where: each for where, each in self.sent.items() if where[0] in _PHASES}
        for (piece, axis), each in self.sent.items():
            if piece in again or (piece.startswith(WITHOUT) and piece.removeprefix(WITHOUT) not in again):
                sent["input", axis] = sent.get(("input", axis), Traffic()) + each
        return sent

    def saved_bytes(self, again: tuple[str, ...] = ()) -> int:
        """Bytes saved from forward to backward, where the pieces `again` are chosen."""
        return sum(kept.bytes for kept in self.saved
                   if kept.piece not in again and (kept.kept_by is None or kept.kept_by in again))

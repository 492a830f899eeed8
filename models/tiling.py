"""Memory-centric tiling: layers are cut into tiles, so that only one tile needs to be gathered at a time.

`model.tile_linears: BYTES` bounds the bytes that one unit gathers of matrices that are cut over tp: those of
a branch (qkv and out, or up, gate and down), of the head, or of the embedding, for one tp rank in the dtype
of compute. A block above the limit is cut into its branches; a branch, head or embedding above it is cut into
the fewest equal tiles within the limit. A tile has whole cells (kv heads, numbers of the hidden layer, tokens
of the vocabulary) and has the same size on all ranks. Biases and norms do not count. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Protocol, Self, TypeVar, runtime_checkable

from threed.base.axes import axes_of
from threed.base.errors import InputError
from threed.base.mesh import FOLDS
from threed.base.quantity import BYTES, parse_bytes, show_bytes
from threed.base.remember import remembered
from threed.models.layers.base import Layer, Part
from threed.models.layers.handing import handing, makes
from threed.models.layers.overlapped import apart
from threed.models.model import layers
from threed.schema import Config, ModelConfig
from threed.spec.parameter import WHOLE, Parameter, Share, Tile


@runtime_checkable
class Tileable(Protocol):
    """A layer, or a part of one, whose matrices can be cut into equal tiles."""

    kind: str  # what it is called
    axis: str  # of the mesh, over which its matrices are cut
    cells: int  # the number of pieces that must stay whole
    cell: str  # the name of such a piece

    def parameters(self) -> list[Parameter]: ...
    def tiled(self, tile: Tile) -> Self: ...


@runtime_checkable
class Divisible(Protocol):
    """A layer that consists of tileable parts. `cut`: the smaller layers that compute the same."""

    def tileable(self) -> Sequence[Tileable]: ...
    def cut(self, limit: Limit) -> list[Layer]: ...


T = TypeVar("T", bound=Tileable)


def tile_of(layer: Layer) -> Tile:
    """Which tile it is of the layer that the model lists."""
    return getattr(layer, "tile", WHOLE)


class Limit:
    """The most bytes of matrices that a unit may gather on a rank."""

    def __init__(self, bytes: int, share: Share):
        self.bytes, self.share = bytes, share

    def size(self, part: Part | Tileable) -> int:
        matrices = (parameter for parameter in part.parameters() if parameter.decay)
        return sum(parameter.numel * self.share.element // math.prod(map(self.share.over, parameter.axes))
                   for parameter in matrices if parameter.axes)

    def cells(self, part: Tileable) -> int:
        """Cells of a part on one rank."""
        return part.cells // self.share.over(getattr(part, "cells_over", part.axis))

    def fits(self, part: Part | Tileable) -> bool:
        return self.size(part) <= self.bytes

    def count(self, part: Tileable) -> int:
        return _fewest(self.size(part), self.cells(part), self.bytes)

    def tiles(self, part: T) -> list[T]:
        count = self.count(part)
        return [part] if count == 1 else [part.tiled(Tile(index, count)) for index in range(count)]

    def cut(self, layer: Layer) -> list[Layer]:
        """The layer, or the smaller layers that compute the same."""
        if self.fits(layer):
            return [layer]
        if isinstance(layer, Divisible):
            return layer.cut(self)
        return [*self.tiles(layer)] if isinstance(layer, Tileable) else [layer]


def share_of(config: Config) -> Share:
    """A rank's share of a micro-batch."""
    parallel = config.parallel
    ranks = {axis: getattr(parallel, axis) for axis in (*axes_of("tokens"), *axes_of("parameters"), *FOLDS)}
    return Share(ranks, ("tp",) if parallel.sequence_parallel else (), config.train.micro_batch_size,
                 BYTES[config.precision.dtype], config.data.document_mask, config.masked,
                 config.token_ranks, config.by_heads)


def model_key(config: Config) -> object:
    """What the layers of a config, and how they are cut into units, depend on."""
    parallel = config.parallel
    return repr(config.model), repr(share_of(config)), parallel.layers_per_unit, parallel.cp_overlap


def layers_of(config: Config) -> list[Layer]:
    """The layers of a config, first to last: those of its model, cut into tiles."""
    return [layer for cut in cut_layers(config) for layer in cut]


def new_layers(config: Config) -> list[Layer]:
    """The same, as objects that nobody else has: `Part.build` binds weights to them."""
    return [layer for cut in _cut(config, layers(config.model)) for layer in cut]


@remembered(repr)
def _whole(model: ModelConfig) -> list[Layer]:
    return layers(model)


@remembered(lambda config: repr(config.model))
def folds_of(config: Config) -> tuple[str, ...]:
    """The axes of FOLDS over which parameters of a model are cut."""
    cut = {axis for layer in _whole(config.model) for each in layer.parameters() for axis in each.axes}
    return tuple(axis for axis in FOLDS if axis in cut)


@remembered(lambda config: repr(config.model))
def counts_rows(config: Config) -> bool:
    """Whether a parameter has a count as its gradient, which must be added up exactly."""
    return any(each.counted for layer in _whole(config.model) for each in layer.parameters())


@remembered(model_key)
def cut_layers(config: Config) -> list[list[Layer]]:
    """The tiles of each layer of the model. Raises InputError where a layer cannot be cut small enough, or
    must not be cut."""
    return _cut(config, _whole(config.model))


def _cut(config: Config, whole: Sequence[Layer]) -> list[list[Layer]]:
    parts = _tiles(config, whole)
    return [[part for tile in tiles for part in apart(tile)] for tiles in parts
            ] if config.parallel.cp_overlap else parts


def _tiles(config: Config, whole: Sequence[Layer]) -> list[list[Layer]]:
    if config.model.tile_linears is None:
        return [[layer] for layer in whole]
    limit = Limit(parse_bytes(config.model.tile_linears), share_of(config))
    _check(f"model.tile_linears={config.model.tile_linears}", limit, whole)
    return [limit.cut(layer) for layer in whole]


def _check(asked: str, limit: Limit, whole: Sequence[Layer]) -> None:
    parts = {part.kind: part for layer in whole for part in _tileable(layer) if not limit.count(part)
             or _tied(part)}
    for layer in whole:
        if not _tileable(layer) and not limit.fits(layer):
            raise InputError(f"{asked}: layer {layer.name} has {show_bytes(limit.size(layer))} a rank, and "
                             "cannot be cut into tiles: raise it to that, or leave it out")
    tied = next((part for part in parts.values() if _tied(part) and not limit.fits(part)), None)
    if tied is not None:
        raise InputError(f"{asked} would cut the word embedding of {show_bytes(limit.size(tied))}, which "
                         "embedding and head share whole; set model.tie_embeddings=false, or raise it")
    least = {kind: -(-limit.size(part) // limit.cells(part))
             for kind, part in parts.items() if not limit.count(part)}
    if least:
        worst = max(least, key=lambda kind: least[kind])
        ranks = parts[worst].cells // limit.share.over(parts[worst].axis) // limit.cells(parts[worst])
        each = " for each rank of cp" * (ranks > 1)
        raise InputError(f"{asked}: {worst} has {show_bytes(limit.size(parts[worst]))} a rank, and its "
                         f"smallest tile, one {parts[worst].cell}{each}, has {least[worst]} bytes "
                         f"({show_bytes(least[worst])}): raise it to that, or raise parallel.tp")


def _tileable(layer: Layer) -> Sequence[Tileable]:
    if isinstance(layer, Divisible):
        return layer.tileable()
    return [layer] if isinstance(layer, Tileable) else []


def _tied(part: Tileable) -> bool:
    return any(parameter.tied for parameter in part.parameters())


@cache
def _fewest(size: int, cells: int, limit: int) -> int:
    """The fewest tiles, a divisor of `cells`, of at most `limit` bytes each; 0 where there are none."""
    for count in range(max(1, -(-size // limit)) if limit > 0 else cells + 1, cells + 1):
        if cells % count == 0:
            return count
    return 0


@remembered(model_key)
def unit_layers(config: Config) -> tuple[list[Layer], list[tuple[int, int]]]:
    """The layers of a model, and for each unit (first layer, one past the last). The first and the last layer
    are units of their own; between them, `parallel.layers_per_unit` layers are a unit."""
    all_layers, per_unit = layers_of(config), config.parallel.layers_per_unit
    last = len(all_layers) - 1
    between = [(first, min(first + per_unit, last)) for first in range(1, last, per_unit)]
    return all_layers, [(0, 1), *between, (last, last + 1)]


def together(units: Sequence[Sequence[Layer]]) -> list[int]:
    """Lengths of the runs of units that must be on one stage: the tiles of a layer, and the units from the
    maker of a handed tensor to its last reader."""
    makers: dict[str, int] = {}
    joined = [tile_of(unit[0]).index > 0 for unit in units]  # to the unit before
    for index, unit in enumerate(units):
        for layer in unit:
            hands = handing(layer)
            mine = {*makes(layer, Share()), *(way.becomes for way in hands.travels.values())}
            counts = {name for way in hands.travels.values() for name in (way.gives, way.takes)} - mine
            for maker in (makers.get(name, index) for name in (*hands.reads, *counts)):
                joined[maker + 1:index + 1] = [True] * (index - maker)
            makers |= dict.fromkeys(mine, index)
    lengths: list[int] = []
    for with_before in joined:
        if not with_before:
            lengths.append(0)
        lengths[-1] += 1
    return lengths

"""Cuts: where layouts of one config cut its model, into stages and into tiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from threed.base.errors import InputError
from threed.base.mesh import fold_problem
from threed.base.quantity import BYTES
from threed.config.stages import stage_runs
from threed.layout_search.layout import Layout, config_of
from threed.models.kinds import layer_kinds
from threed.models.tiling import cut_layers, unit_layers
from threed.planner.facts import make_table, stage_sizes
from threed.schema import Config

T = TypeVar("T")
_FEW = 8  # layers of the largest model that may stand for another


class Few(NamedTuple):
    """A model of fewer layers, with units of all kinds of another."""

    layers: int  # its model.layers
    units: tuple[int, ...]  # of each unit of the other, one of its kind



class Cuts:
    """Of layouts of one config. It remembers what many of them share."""

    def __init__(self, config: Config):
        self.config = config
        self._known: dict[object, Any] = {}

    def once(self, key: object, make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def placed(self, layout: Layout) -> list[tuple[int, slice]]:
        """The position of each stage, and its units."""
        ends = self.stages(layout)
        assert ends is not None, layout
        return [(position, slice(*each)) for position, each in zip(layout.place, ends, strict=True)]

    def stages(self, layout: Layout) -> list[tuple[int, int]] | None:
        """The units of each stage: the first, and one past the last; None where the model has too few."""
        count = len(layout.place)
        return self.once(("stages", layout.of_model(), count), lambda: self._stages(layout, count))

    def units(self, layout: Layout) -> int:
        """Units between which stages can end."""
        own = layout.of_model()
        return self.once(("units", own), lambda: len(stage_runs(self.alone(own))))

    def largest(self, layout: Layout) -> int:
        """Elements of the largest parameter unit of one compute unit on a rank."""
        def most() -> int:
            units = make_table(self.alone(layout.of_model()), (0,)).parameters.values()
            return max(unit.numel for unit in units if unit.name != "tied embedding")

        return self.once(("largest", layout.of_model()), most)

    def few(self, layout: Layout) -> Few:
        """The smallest model with the kinds of units of a layout's."""
        own = layout.of_model()
        return self.once(("few", own, layout.by_number), lambda: _few(self.alone(own), layout.by_number))

    def fewest(self, layout: Layout) -> Config:
        """`alone`, with that model: a table of it is made soon."""
        config = self.alone(layout)
        config.model.layers = self.few(layout).layers
        return config

    def tiles(self, layout: Layout) -> tuple[str, ...]:
        """Limits for tiles of the largest parameter unit, a few and more of them, that the model can have."""
        def limits() -> tuple[str, ...]:
            size = self.largest(layout) * BYTES[self.config.precision.dtype]
            some = [f"{1 << (size // parts).bit_length() - 21}MiB" for parts in (2, 8) if size // parts >> 20]
            return tuple(limit for limit in some if self._can_cut(layout.with_tiles(limit)))

        return () if self.config.model.own_layers else self.once(("tiles", layout.of_model()), limits)

    def _can_cut(self, layout: Layout) -> bool:
        try:
            return any(len(cut) > 1 for cut in cut_layers(self.alone(layout.of_model())))
        except InputError:  # a tied embedding is larger, or a cell is
            return False

    def alone(self, layout: Layout) -> Config:
        """The config of a layout on one position; on more ranks of dp if its folds do not divide its own."""
        config = config_of(layout, self.config)
        config.parallel.stage_units, config.train.sample_every, config.offload.ratio = None, 0, 1.0
        if any(fold_problem(axis, size, config.axis_sizes, config.shard_size)
               for axis, size in config.fold_sizes.items()):
            config.parallel.dp = math.prod(config.fold_sizes.values())
        return config

    def _stages(self, layout: Layout, count: int) -> list[tuple[int, int]] | None:
        config, asked = self.alone(layout.of_model()), self.config.parallel.stage_units
        if count > self.units(layout) or (asked is not None and len(asked) != count):
            return None
        ends = [*itertools.accumulate(asked or stage_sizes(config, count), initial=0)]
        return [*itertools.pairwise(ends)]


def _few(config: Config, by_number: bool) -> Few:
    """`by_number`: units differ by where they are."""
    kinds, layers = _unit_kinds(config), config.model.layers
    smaller = () if config.model.own_layers or by_number else range(1, min(layers, _FEW))
    for count in smaller:
        config.model.layers = count
        some = _unit_kinds(config)
        if set(some) == set(kinds):
            return Few(count, tuple(map(some.index, kinds)))
    return Few(layers, tuple(range(len(kinds))))


def _unit_kinds(config: Config) -> list[str]:
    kinds = layer_kinds(config)
    return [repr(kinds[first:stop]) for first, stop in unit_layers(config)[1]]

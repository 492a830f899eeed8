"""Units: what the units of a model cost and hold on a rank, for the bound and the memory filter of a search.
Tables are made of few blocks: blocks that are alike are priced once."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import NamedTuple, TypeVar

from threed.base.errors import InputError
from threed.base.quantity import BYTES
from threed.config.stages import stage_runs
from threed.features.activation.plan import mark, worthwhile
from threed.layout_search.layout import copied
from threed.layout_search.merge import wait_s
from threed.models.model import own_parameters
from threed.models.tiling import cut_layers, tile_of
from threed.planner.facts import make_table, stage_sizes, unit_costs
from threed.prediction.analytic import cost
from threed.prediction.hardware import Hardware
from threed.program.entries import ComputeUnit
from threed.program.instruction import Instruction, Op, Slot
from threed.program.plan import Plan
from threed.program.table import Table
from threed.schema import ActivationConfig, Config, OffloadConfig, ZeroConfig

T = TypeVar("T")


class UnitCost(NamedTuple):
    """A compute unit: seconds and bytes of a micro-batch on a rank."""

    forward_s: float
    backward_s: float
    weight_s: float  # the half of backward that computes gradients of weights
    again_s: float  # of its RECOMPUTE, where it is computed again
    saved_bytes: int
    kept_bytes: int  # where it is computed again: of its input
    operand_bytes: int
    again: bool  # whether it is computed again in backward
    handed_bytes: int  # until backward: what it makes for later units, and what has come
    logits_bytes: int  # of the kernels that make its loss, which need temporaries of this size
    temporary_bytes: int = 0  # of its kernels, about
    # What exchanges add behind its forward, and before its backward (`wait_s`).
    forward_wait_s: float = 0.0
    backward_wait_s: float = 0.0


class MicroBatchCut(NamedTuple):
    """How a micro-batch is cut, and what is kept of it."""

    tp: int
    sequence_parallel: bool
    micro_batch_size: int
    policy: str
    every: int
    tiles: str | None = None  # most bytes of a tile
    ep: int = 1
    # The mesh, (axis order, pp, dp), where neighbours of tp or in a run of ep are not next to each other
    mesh: tuple[str, int, int] | None = None


class Units:
    """The units of a config's model, by cut. With `tiles`, of ranks of one `tp`."""

    def __init__(self, config: Config, hardware: Hardware, tiles: str | None = None, tp: int = 1):
        self.config, self.hardware = config, hardware
        self.full = _alone(config)
        self.full.model.tile_linears, self.full.parallel.tp = tiles, tp
        self.together = stage_runs(self.full)
        self.reduced, self.same = _reduced(self.full)
        self._priced: dict[MicroBatchCut, list[UnitCost]] = {}
        self._splits: dict[int, tuple[tuple[int, int], ...] | None] = {}
        self.act_bytes: dict[MicroBatchCut, int] = {}
        self._tiles: dict[int, tuple[str, ...]] = {}
        self._largest: dict[int, int] = {}

    def tiles(self, tp: int) -> tuple[str, ...]:
        """Limits for tiles of the largest unit, a few and more of them, that the model can have."""
        if tp not in self._tiles:
            self._tiles[tp] = () if self.config.model.own_layers else self._limits(tp)
        return self._tiles[tp]

    def _limits(self, tp: int) -> tuple[str, ...]:
        element = BYTES[self.config.precision.dtype]
        size = self.largest(tp) * element
        limits = [f"{1 << (size // parts).bit_length() - 21}MiB" for parts in (2, 8) if size // parts >> 20]
        config = copied(self.reduced)
        config.parallel.tp = tp
        return tuple(limit for limit in limits if _can_cut(config, limit))

    def largest(self, tp: int) -> int:
        """Elements of the largest parameter unit on a rank, of those that tiles can cut."""
        if tp not in self._largest:
            config = copied(self.reduced)
            config.parallel.tp = tp
            parameters = make_table(config, (0,)).parameters
            self._largest[tp] = max(part.numel for part in parameters.values()
                                    if part.name != "tied embedding")
        return self._largest[tp]

    def split(self, stages: int) -> tuple[tuple[int, int], ...] | None:
        """(first unit, one past the last) of each stage; None where the units cannot fill so many."""
        if stages not in self._splits:
            asked = self.config.parallel.stage_units
            if stages > len(self.together) or (asked is not None and len(asked) != stages):
                self._splits[stages] = None
            else:
                sizes = asked or stage_sizes(self.full, stages)
                ends = [sum(sizes[:index + 1]) for index in range(stages)]
                self._splits[stages] = tuple(zip([0, *ends[:-1]], ends, strict=True))
        return self._splits[stages]

    def of(self, cut: MicroBatchCut) -> list[UnitCost]:
        """All units, first to last."""
        if cut not in self._priced:
            self._priced[cut] = self._price(cut)
        return self._priced[cut]

    def table(self, config: Config) -> Table:
        """The table of a model with few blocks, under the layout of `config`, on one position."""
        few = copied(config)
        few.model, few.parallel.pp, few.parallel.stage_units = copy.copy(self.reduced.model), 1, None
        few.model.tile_linears = config.model.tile_linears
        few.offload.ratio = 1.0
        return make_table(few, (0,))

    def _price(self, cut: MicroBatchCut) -> list[UnitCost]:
        config = copied(self.reduced)
        parallel = config.parallel
        parallel.tp, parallel.dp, parallel.ep = cut.tp, self.full.dp * cut.ep, cut.ep  # ep divides dp x tp
        parallel.sequence_parallel = cut.sequence_parallel
        config.train.micro_batch_size = cut.micro_batch_size
        config.train.global_batch_size = cut.micro_batch_size * config.dp
        if cut.policy == "selective":
            config.activation = ActivationConfig("selective", pieces=self.config.activation.pieces)
        table = make_table(config, (0,))
        if cut.policy == "full":
            table = mark(table, worthwhile(table))
        if cut.mesh is not None:
            config = copied(config)
            config.parallel.axis_order, config.parallel.pp, config.parallel.dp = cut.mesh
        price = cost(Plan(table, {}, config), self.hardware)
        self.act_bytes[cut] = table.act_bytes

        def unit(index: int) -> UnitCost:
            each = table.units[index]
            forward_s, backward_s, weight_s, again_s = (price(0, Instruction(op, index, 0)) for op in (
                Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT, Op.RECOMPUTE))
            logits = each.saved_bytes - each.operand_bytes if index == table.last else 0
            waits = [wait_s(table, index, op, partial(price, 0), self.hardware.contention)
                     for op in (Op.FORWARD, Op.BACKWARD)]
            return UnitCost(forward_s, backward_s, weight_s, again_s, each.saved_bytes,
                            table.size(Slot("kept", index)), each.operand_bytes, each.recompute,
                            _handed_bytes(table, index), logits,
                            _temporary_bytes(each, table.elements.param), *waits)

        few = [unit(index) for index in range(len(table.units))]
        units = [few[kind] for kind in self.same]
        if cut.every > 1:
            units = [each._replace(again=each.again and u % cut.every == 0) for u, each in enumerate(units)]
        return units


def _handed_bytes(table: Table, index: int) -> int:
    unit = table.units[index]
    return sum(made.bytes for made in unit.makes if not made.leaves) + sum(
        table.size(Slot(read.name, read.unit)) for read in unit.reads
        if read.came and (unit.recompute or not read.spent))


def _temporary_bytes(unit: ComputeUnit, element: int) -> int:
    """About what the kernels of a unit need: a third of its operands. Of experts, which compute the rows that
    came in fp32, ten times what is saved of 16 bits: a third more than torch measures, for layouts within 1%
    of the memory take long to time, and the full plan drops some of them. `element`: bytes of a number of
    what is saved."""
    experts = any(read.came for read in unit.reads) and unit.operand_bytes > 0
    return 20 * unit.saved_bytes // element if experts else unit.operand_bytes // 3


def _alone(config: Config) -> Config:
    """The config on one rank, or on as few as its folds divide."""
    alone = copied(config)
    alone.parallel.dp, alone.parallel.pp, alone.parallel.tp = math.prod(config.fold_sizes.values()), 1, 1
    alone.parallel.sequence_parallel, alone.parallel.axis_order = False, "pp-dp-tp"
    alone.parallel.schedule, alone.parallel.stage_units = "1f1b", None
    alone.parallel.virtual_stages = alone.parallel.activation_limit = None
    alone.zero, alone.activation, alone.offload = ZeroConfig(1), ActivationConfig(), OffloadConfig()
    alone.train.micro_batch_size = 1
    return alone


def _reduced(full: Config) -> tuple[Config, list[int]]:
    """A config with few blocks, among them one of each kind, and for each unit of the full model the unit of
    it that is the same. Where more than half of the blocks would be needed, the full model."""
    kinds = _kinds(full)
    if not full.model.own_layers and full.parallel.layers_per_unit == 1:
        few, most = copied(full), full.model.layers // 2
        few.model.layers = 0
        while few.model.layers < most:  # each time half as many again, so that all together are few, too
            few.model.layers = min(few.model.layers + max(1, few.model.layers // 2), most)
            ours = _kinds(few)
            at = {kind: unit for unit, kind in reversed([*enumerate(ours)])}
            if at.keys() == {*kinds}:
                return few, [at[kind] for kind in kinds]
    return full, list(range(len(kinds)))


def _kinds(config: Config) -> list[object]:
    """Of each unit: equal for units that are alike."""
    costs, parts = unit_costs(config), _ends_apart(cut_layers(config))
    layers = [(end, layer) for end, rows in enumerate(parts) for row in rows for layer in row]
    if len(layers) != len(costs):  # layers_per_unit
        return [*range(len(costs))]
    return [(end, type(layer), tile_of(layer), tuple([(p.shape, p.cuts) for p in own_parameters(layer)]),
             sum(cost)) for (end, layer), cost in zip(layers, costs, strict=True)]


def _can_cut(config: Config, tiles: str) -> bool:
    config.model.tile_linears = tiles
    try:
        return any(len(cut) > 1 for cut in cut_layers(config))
    except InputError:  # a tied embedding is larger, or a cell is
        return False


def _ends_apart(layers: list[T]) -> tuple[list[T], list[T], list[T]]:
    """The first, those between, and the last."""
    return layers[:1], layers[1:-1], layers[-1:]

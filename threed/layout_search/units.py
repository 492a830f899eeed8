"""Units: what the units of a model cost a rank, by how a micro-batch is cut and what is kept. Blocks that are
alike are priced once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, TypeVar

from threed.base.errors import InputError
from threed.base.mesh import Mesh
from threed.base.quantity import BYTES
from threed.features.activation.plan import mark, worthwhile
from threed.models.tiling import cut_layers, together, unit_layers
from threed.planner.facts import layouts, make_table, unit_costs, unit_parameters
from threed.prediction.analytic import cost
from threed.prediction.hardware import Hardware
from threed.program.instruction import Instruction, Op, Slot
from threed.program.plan import Plan
from threed.schedules.split import split_stages
from threed.schema import Config, ZeroConfig

T = TypeVar("T")


class UnitCost(NamedTuple):
    """A compute unit: seconds and bytes of a micro-batch on a rank."""

    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    sent_s: tuple[float, float]  # of these, what collectives over tp add to forward and to backward
    saved_bytes: int
    kept_bytes: int  # where it is computed again: of its input
    operand_bytes: int
    again: bool  # whether it is computed again in backward
    handed_bytes: int
    logits_bytes: int  # of the kernels that make its loss, which need temporaries of this size


class MicroBatchCut(NamedTuple):
    """How a micro-batch is cut, and what is kept of it."""

    tp: int
    stride: int  # from a rank of tp to the next
    sequence_parallel: bool
    micro_batch_size: int
    policy: str
    every: int
    tiles: str | None = None  # most bytes of a tile


class ShardSize(NamedTuple):
    """A parameter unit's elements on a rank."""

    numel: int
    copied: int  # of which each tp rank has a copy
    apart: int  # of these, those of whose gradient each tp rank has a part even where it has all tokens


class Units:
    """The units of a config's model, by cut; and their parameters. With `tiles`, of ranks of one `tp`."""

    def __init__(self, config: Config, hardware: Hardware, tiles: str | None = None, tp: int = 1):
        self.config, self.hardware = config, hardware
        full = _alone(config)
        full.model.tile_linears, full.parallel.tp = tiles, tp
        self.costs = [sum(parts) for parts in unit_costs(full)]
        layers, runs = unit_layers(full)
        self.together = together([layers[first:stop] for first, stop in runs])
        self.reduced, self.same = _reduced(full, self.costs)
        # Parameter units by compute unit; the tied embedding has a number of its own, -1.
        shares = unit_parameters(self.reduced)
        self.tied = len(unit_layers(self.reduced)[1]) in shares
        self._priced: dict[MicroBatchCut, list[UnitCost]] = {}
        self._parts: dict[tuple[int, int], dict[int, ShardSize]] = {}
        self._splits: dict[int, tuple[tuple[int, int], ...] | None] = {}
        self.act_bytes: dict[MicroBatchCut, int] = {}

    def tiles(self, tp: int) -> tuple[str, ...]:
        """Limits for tiles of the largest unit, a few and more of them, that the model can have."""
        element = BYTES[self.config.precision.dtype]
        size = self.largest(tp) * element
        limits = [f"{1 << (size // parts).bit_length() - 21}MiB" for parts in (2, 8) if size // parts >> 20]
        config = copy.deepcopy(self.reduced)
        config.parallel.tp = tp
        return tuple(limit for limit in limits if _can_cut(config, limit))

    def largest(self, tp: int) -> int:
        """Elements of the largest parameter unit on a rank, of those that tiles can cut."""
        return max(part.numel for unit, part in self.parts(tp, 1).items() if unit >= 0)

    def split(self, stages: int) -> tuple[tuple[int, int], ...] | None:
        """(first unit, one past the last) of each stage; None where the units cannot fill so many."""
        if stages not in self._splits:
            asked = self.config.parallel.stage_units
            if stages > len(self.together) or (asked is not None and len(asked) != stages):
                self._splits[stages] = None
            else:
                sizes = asked or split_stages(self.costs, self.together, stages)
                ends = [sum(sizes[:index + 1]) for index in range(stages)]
                self._splits[stages] = tuple(zip([0, *ends[:-1]], ends, strict=True))
        return self._splits[stages]

    def of(self, cut: MicroBatchCut) -> list[UnitCost]:
        """All units, first to last."""
        if cut not in self._priced:
            self._priced[cut] = self._price(cut)
        return self._priced[cut]

    def parts(self, tp: int, shards: int) -> dict[int, ShardSize]:
        """Compute unit -> its parameters, of all ranks of a tp group; -1: the tied embedding."""
        if (tp, shards) not in self._parts:
            config = copy.deepcopy(self.reduced)
            config.parallel.tp, config.parallel.dp = tp, shards
            config.zero = ZeroConfig(1)
            last = len(set(self.same))
            few: dict[int, ShardSize] = {}
            for index, laid in layouts(config).items():
                few[-1 if index == last else index] = ShardSize(
                    laid.numel, *(sum(each.stop - each.start for each in laid.partial(("tp",), sequence))
                                  for sequence in (("tp",), ())))
            parts = {unit: few[kind] for unit, kind in enumerate(self.same) if kind in few}
            self._parts[tp, shards] = parts | ({-1: few[-1]} if -1 in few else {})
        return self._parts[tp, shards]

    def _price(self, cut: MicroBatchCut) -> list[UnitCost]:
        config = copy.deepcopy(self.reduced)
        parallel, activation = config.parallel, config.activation
        parallel.tp, parallel.dp, parallel.axis_order = cut.tp, cut.stride, "pp-tp-dp"
        parallel.sequence_parallel = cut.sequence_parallel
        config.train.micro_batch_size = cut.micro_batch_size
        config.train.global_batch_size = cut.micro_batch_size * cut.stride
        activation.policy = cut.policy
        if cut.policy != "selective":
            activation.pieces = None
        table = make_table(config, (0,))
        marked = worthwhile(table) if cut.policy == "full" else []
        table = mark(table, marked)
        plan = Plan(table, {}, config)
        free = replace(self.hardware, node_gbps=1e12, adapter_gbps=1e12, node_us=0.0, adapter_us=0.0)
        price, computed = cost(plan, self.hardware), cost(plan, free)
        self.act_bytes[cut] = table.act_bytes

        def unit(index: int) -> UnitCost:
            each = table.units[index]
            ops = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
            forward_s, backward_s, input_s, weight_s = (price(0, Instruction(op, index, 0)) for op in ops)
            alone = [computed(0, Instruction(op, index, 0)) for op in ops[:2]]
            logits = each.saved_bytes - each.operand_bytes if each.loss else 0
            return UnitCost(forward_s, backward_s, input_s, weight_s,
                            (forward_s - alone[0], backward_s - alone[1]), each.saved_bytes,
                            table.size(Slot("kept", index)), each.operand_bytes, each.recompute,
                            sum(handed.bytes for handed in each.makes), logits)

        few = [unit(index) for index in range(len(table.units))]
        units = [few[kind] for kind in self.same]
        if cut.every > 1:
            units = [each._replace(again=each.again and u % cut.every == 0) for u, each in enumerate(units)]
        return units


def _alone(config: Config) -> Config:
    """The config on one rank."""
    alone = copy.deepcopy(config)
    alone.parallel.dp = alone.parallel.pp = alone.parallel.tp = 1
    alone.parallel.sequence_parallel, alone.parallel.axis_order = False, "pp-dp-tp"
    alone.parallel.schedule, alone.parallel.stage_units = "1f1b", None
    alone.parallel.virtual_stages = alone.parallel.activation_limit = None
    alone.zero = ZeroConfig(1)
    alone.activation.policy, alone.activation.every = "none", None
    alone.activation.partition = alone.activation.contiguous = False
    alone.activation.offload, alone.activation.budget = "none", None
    alone.train.micro_batch_size = 1
    return alone


def _reduced(full: Config, costs: list[float]) -> tuple[Config, list[int]]:
    """A config with few blocks, and for each unit of the full model the unit of it that is the same. Where
    the blocks differ, the full model."""
    few = copy.deepcopy(full)
    few.model.layers = 1
    ours = [sum(parts) for parts in unit_costs(few)]
    shapes: Callable[[object], object] = lambda layer: (  # noqa: E731
        type(layer), layer.tile,  # pyright: ignore
        [(p.shape, p.cuts) for p in layer.own_parameters()])  # pyright: ignore
    head, block, tail = ([shapes(tile) for layer in layers for tile in layer]
                         for layers in _ends_apart(cut_layers(few)))
    first, blocks, last = ([shapes(tile) for layer in layers for tile in layer]
                           for layers in _ends_apart(cut_layers(full)))
    count, begin, end = full.model.layers, len(head), len(head) + len(block)
    same = [*range(begin), *[*range(begin, end)] * count, *range(end, len(ours))]
    alike = (full.parallel.layers_per_unit == 1 and (first, blocks, last) == (head, block * count, tail)
             and costs == [ours[unit] for unit in same])
    return (few, same) if alike else (full, list(range(len(costs))))


def _can_cut(config: Config, tiles: str) -> bool:
    config.model.tile_linears = tiles
    try:
        return any(len(cut) > 1 for cut in cut_layers(config))
    except InputError:  # a tied embedding is larger, or a cell is
        return False


def _ends_apart(layers: list[T]) -> tuple[list[T], list[T], list[T]]:
    """The first, those between, and the last."""
    return layers[:1], layers[1:-1], layers[-1:]


class Strides:
    """Where the ranks of an axis are: its size, and from one to the next."""

    def __init__(self, order: str, sizes: dict[str, int]):
        self.sizes, self.strides = sizes, {}
        stride = 1
        for axis in reversed(order.split("-")):
            self.strides[axis] = stride
            stride *= sizes[axis]
        self.size = stride

    @classmethod
    def of(cls, mesh: Mesh) -> Strides:
        return cls("-".join(mesh.order), mesh.sizes)

    def ranks(self, axis: str, count: int | None = None, times: int = 1) -> range:
        """Of rank 0's group: `count` ranks (None: all) along an axis, `times` apart."""
        stride = self.strides[axis] * times
        return range(0, (self.sizes[axis] if count is None else count) * stride, stride)

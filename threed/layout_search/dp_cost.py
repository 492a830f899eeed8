"""Traffic over dp: what it costs to gather, to reduce and to step the parameters of a unit, and the memory
that they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from threed.base.mesh import Mesh
from threed.base.quantity import BYTES, ring
from threed.features.pipeline.parts import settings
from threed.features.zero.plan import Sums, reductions
from threed.layout_search.layout import Layout
from threed.layout_search.units import ShardSize, Strides
from threed.optim.registry import OPTIMIZERS
from threed.prediction.hardware import GroupPlace, Hardware
from threed.prediction.prices import Prices, Travel
from threed.program.entries import ParameterUnit
from threed.program.instruction import Instruction, Op, Tier
from threed.program.settings import Elements, UpdateSettings, ZeroSettings
from threed.program.table import Table
from threed.program.traffic import sent_by
from threed.schema import Config


class Toll(NamedTuple):
    """Seconds and bytes of a parameter unit on a rank."""

    gather_s: float
    reduce_s: float  # on the lane of dp, over the ranks that share a copy
    copy_s: float  # after the last of them, over the copies
    sum_s: float  # over tp, on the lane of computation
    tie_s: float
    norm_s: float  # of its gradient
    step_s: float  # on the device, or on the host
    down_s: float  # of its gradient to the host
    up_s: float  # of its parameters from there
    numel: int
    shard_numel: int


class Message(NamedTuple):
    """Seconds of a message from a stage to the next, or back; and of what it takes from computation where tp
    ranks send a part each."""

    sent_s: float = 0.0
    split_s: float = 0.0  # where it leaves
    join_s: float = 0.0  # where it comes


def moved(messages: Sequence[Message], stage: int) -> tuple[float, float]:
    """What messages add to a stage's forward, and to its backward. `messages`: from each stage to the next.
    """
    before, after = messages[stage - 1] if stage else Message(), messages[stage]
    return before.join_s + after.split_s, after.join_s + before.split_s


class Tolls:
    """Tolls of parameter units under a layout."""

    def __init__(self, config: Config, hardware: Hardware, layout: Layout):
        precision, self.layout, self.hardware = config.precision, layout, hardware
        element = BYTES[precision.dtype]
        reduced = layout.reduce_dtype or precision.reduce_dtype
        self.elements = Elements(element, *(4 if dtype == "fp32" else element for dtype in
                                            (precision.grad_dtype, reduced)))
        self.update = UpdateSettings(OPTIMIZERS[config.optimizer.name].buffers,
                                     element < 4 and precision.master == "fp32")
        self.host_s = hardware.host_us * 1e-6 * hardware.waits
        self.travel, self.prices = Travel(hardware), Prices(hardware, element)
        self.strides = Strides(layout.axis_order, {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp})
        self.places = self._places()
        mesh = Mesh(tuple(layout.axis_order.split("-")), tp=layout.tp, pp=layout.pp, dp=layout.dp)
        self.parts = settings(config, mesh, layout.sequence_parallel)
        self._known: dict[tuple[ShardSize, int], Toll] = {}

    def _places(self) -> dict[str, GroupPlace]:
        layout, strides, node = self.layout, self.strides, self.hardware.node_ranks
        ranks = {"tp": strides.ranks("tp"), "dp": strides.ranks("dp"), "world": range(strides.size),
                 "shard": strides.ranks("dp", layout.shard_size),
                 "replica": strides.ranks("dp", layout.dp // layout.shard_size, layout.shard_size),
                 "tie": strides.ranks("pp", min(2, layout.pp), max(1, layout.pp - 1))}
        return {name: GroupPlace(each, node) for name, each in ranks.items()}

    def of(self, part: ShardSize, positions: int = 1) -> Toll:
        """`positions`: how many hold it, 2 for a tied embedding at both ends."""
        if (part, positions) not in self._known:
            self._known[part, positions] = self._price(part, positions)
        return self._known[part, positions]

    def _price(self, part: ShardSize, positions: int) -> Toll:
        layout, elements = self.layout, self.elements
        shards, group = layout.shard_size, "shard" if layout.shard_size < layout.dp else "dp"
        summed = part.copied if layout.sequence_parallel else part.apart
        partial = {"tp": (layout.tp, summed)} if summed and layout.tp > 1 else {}
        kept = part.numel // (shards if layout.stage >= 1 else 1)
        chain = reductions(part.numel, shards, group,
                           Sums(partial, kept, layout.dp // shards, positions), elements)
        unit = ParameterUnit("", (0,), part.numel, 0, group, shards, chain)
        table = Table((), {0: unit}, (0,), 1, 0, elements, ZeroSettings(layout.stage), update=self.update)

        def sent(instruction: Instruction) -> float:
            size = sum(sent_by(table, instruction).values())
            return self.travel.ring(size, self.places[instruction.group])

        hardware = self.hardware
        costs = {step.group: sent(Instruction(Op.REDUCE, 0, group=step.group)) for step in chain}
        away = layout.offload_optimizer
        size = kept * (2 * table.state_bytes(Tier.HOST) + elements.grad + elements.param)

        def moved(element: int) -> float:
            seconds = kept * element * 8 / (hardware.link_gbps * 1e9) + hardware.kernel_us * 1e-6
            return seconds if away else 0.0

        return Toll(sent(Instruction(Op.GATHER, 0, group=group)) if layout.stage >= 1 else 0.0,
                    costs[group], costs.get("replica", 0.0), costs.get("tp", 0.0), costs.get("tie", 0.0),
                    self.prices.update(kept * elements.grad, away),
                    self.prices.update(size, away) + self.host_s,
                    moved(elements.grad), moved(elements.param), part.numel, kept)

    def clip_s(self) -> float:
        return (self.travel.all_reduce(8, self.places["world"]) + self.hardware.kernel_us * 1e-6
                + self.host_s)

    def messages(self, place: tuple[int, ...], act_bytes: int) -> tuple[Message, ...]:
        """From each stage to the next; takes no time inside a position, and from the last stage."""
        stride, node = self.strides.strides["pp"], self.hardware.node_ranks
        nodes = [position * stride // node for position in range(max(place) + 1)]
        part, gathered = act_bytes // self.parts.parts, ring(act_bytes, self.parts.parts)
        found = []
        for here, there in zip(place, place[1:], strict=False):
            cut = here != there and self.parts.cuts(act_bytes, here, there)
            seconds = self.travel.message(part if cut else act_bytes, nodes[here] != nodes[there])
            found.append(Message(
                0.0 if here == there else self.host_s + seconds,
                self.host_s + self.prices.moved(2 * part) if cut else 0.0,
                self.host_s + self.travel.ring(gathered, self.places["tp"]) if cut else 0.0))
        return *found, Message()

    def communicators(self, place: tuple[int, ...]) -> int:
        """The most of any rank."""
        layout, copies = self.layout, self.layout.shard_size < self.layout.dp
        groups = [layout.tp > 1, layout.dp > 1, copies and layout.shard_size > 1, copies, layout.pp > 1,
                  self.strides.size > 1]
        ends = {(*sorted((here, there)), kind, here < there) for here, there
                in zip(place, place[1:], strict=False) if here != there for kind in ("act", "grad")}
        return sum(groups) + max((sum(position in end[:2] for end in ends)
                                  for position in range(max(place) + 1)), default=0)

    def host_bytes(self, tolls: Sequence[Toll]) -> int:
        """Bytes of a position's rank on the host: optimizer state, gradients."""
        each = self.table.state_bytes(Tier.HOST) + self.elements.grad
        return sum(toll.shard_numel for toll in tolls) * each if self.layout.offload_optimizer else 0

    def states(self, tolls: Sequence[Toll], window: int) -> int:
        """Bytes that a position with these parameter units holds all the time. `window`: units that are
        gathered at a time, under ZeRO-3."""
        layout, elements = self.layout, self.elements
        whole, shard = sum(toll.numel for toll in tolls), sum(toll.shard_numel for toll in tolls)
        state = 0 if layout.offload_optimizer else self.table.state_bytes(Tier.DEVICE)
        held = ((whole if layout.stage < 3 else shard) * elements.param
                + (whole if layout.stage < 2 else shard) * elements.grad + shard * state)
        if layout.stage >= 2:
            every = layout.reduce_every == "step"
            held += _most(tolls, len(tolls) if every else 2) * elements.grad
        if layout.stage == 3:
            held += _most(tolls, window) * elements.param
        if layout.dp > 1:
            times = 1 if elements.reduce == elements.grad else 2
            held += max((toll.numel for toll in tolls), default=0) * elements.reduce * times
        return held

    @property
    def table(self) -> Table:
        return Table((), {}, (0,), 1, 0, self.elements, update=self.update)


def _most(tolls: Sequence[Toll], count: int) -> int:
    """Elements of buffers for so many units at a time: of each size its own, or all of the largest."""
    sizes: dict[int, int] = {}
    for toll in tolls:
        sizes[toll.numel] = sizes.get(toll.numel, 0) + 1
    apart = sum(numel * min(count, units) for numel, units in sizes.items())
    return min(apart, max(sizes, default=0) * min(count, len(tolls)))

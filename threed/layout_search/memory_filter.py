"""The memory filter: what a layout holds, without its plan.

It is an estimate, not a second plan: parameters, gradients and optimizer states are sizes of the table's own
parameter units; of activations, a position keeps as many micro-batches as the schedule's order has between
forward and backward. Neglected: most temporaries, and buffers of values between tiers. The full plan has the
last word about the layouts that are proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import add, mul, sub
from typing import Any, NamedTuple

from threed.base.quantity import BYTES, parse_bytes
from threed.layout_search.bounds import Bounds, place_of
from threed.layout_search.layout import Layout, config_of
from threed.layout_search.short_plan import FORWARDS_FIRST, steady_count
from threed.layout_search.units import UnitCost
from threed.planner.facts import make_mesh
from threed.prediction.host import HostUse, RankBytes, fullest
from threed.prediction.peak import groups
from threed.program.instruction import Tier
from threed.program.summary import gradient_bytes, parameter_bytes
from threed.schedules.orders import SCHEDULES
from threed.schema import Config


class PartBytes(NamedTuple):
    """A parameter unit on a rank."""

    numel: int
    fixed: int  # bytes on the device all the time
    host: int  # on the host
    trains: bool
    pooled: bool  # whether its whole gradient is in a buffer that others use, too
    gathered: bool  # whether it is gathered in a buffer
    staged: bool  # whether its gradient arrives in a buffer


class UnitParts(NamedTuple):
    """Parameter units of a layout."""

    of_kind: list[list[PartBytes]]  # kind of compute unit -> its own
    tied: PartBytes | None


class MemoryFilter:
    """Of layouts of the config that `bounds` are of. It remembers their parts."""

    def __init__(self, bounds: Bounds):
        self.bounds, self.config, self.hardware = bounds, bounds.config, bounds.hardware
        self._parts: dict[object, UnitParts] = {}
        self._known: dict[object, Any] = {}
        self._communicators: dict[object, int] = {}

    def bytes(self, layout: Layout) -> int:
        """Of the fullest rank, with temporaries, CUDA and NCCL."""
        peak = max(map(add, self._fixed(layout), self._kept(layout)))
        return peak + (self.taken(layout) if self.config.run.device != "cpu" else 0)

    def with_pairs(self, layout: Layout, peaks: Sequence[int]) -> int:
        """Of the fullest rank with parallel.pair, where without it positions have these peaks."""
        paired, plain = self._kept(layout._replace(pair=True)), self._kept(layout)
        return max(map(add, peaks, map(sub, paired, plain)))

    def host_use(self, layout: Layout) -> HostUse:
        """What is off the device, of the ranks of the fullest node."""
        rows = [RankBytes(sum(part.host for part in parts), 0) for parts in self._held(layout)]
        return fullest(make_mesh(config_of(layout, self.config)), self.hardware.node_ranks, rows)

    def taken(self, layout: Layout) -> int:
        """Bytes for CUDA, and for the communicators of a rank, the most of any position."""
        place = place_of(layout.schedule, layout.pp, layout.virtual_stages)
        key = (layout.axis_order, layout.tp, layout.pp, layout.dp, layout.ep, layout.shard_size,
               layout.stage > 0, place)
        if key not in self._communicators:
            mesh = make_mesh(config_of(layout, self.config))
            ends = {(*sorted((here, there)), kind, here < there) for here, there
                    in zip(place, place[1:], strict=False) if here != there for kind in ("act", "grad")}
            of_kind = {position: groups(mesh, position) for position in {0, layout.pp // 2, layout.pp - 1}}
            self._communicators[key] = max(  # but for the first and the last, positions have the same groups
                of_kind.get(position, of_kind[layout.pp // 2]) + sum(position in end[:2] for end in ends)
                for position in range(layout.pp))
        return self.hardware.taken_bytes(self._communicators[key])

    def _unit_parts(self, layout: Layout) -> UnitParts:
        key = (layout.tp, layout.dp, layout.ep, layout.sequence_parallel, layout.stage, layout.shard_size,
               layout.reduce_every, layout.offload_optimizer, layout.reduce_dtype, layout.tile_linears)
        if key not in self._parts:
            config = config_of(layout, self.config)
            table = self.bounds.units(layout.tile_linears, layout.tp).table(config)
            ratio = config.offload.ratio

            def part(p: int) -> PartBytes:
                held, shards = table.parameters[p], table.shards
                fixed, host = parameter_bytes(table, p), 0
                if held.trains:
                    away = ratio if held.state_home != Tier.DEVICE else 0.0
                    each = shards.state_bytes(Tier.HOST, p) + shards.streams(p) * table.elements.grad
                    host = round(away * shards.numel(p) * each) * (held.state_home == Tier.HOST)
                    fixed += gradient_bytes(table, p) + round(
                        (1 - away) * shards.numel(p) * shards.state_bytes(Tier.DEVICE, p))
                pooled, gathered = held.trains and not shards.in_place(p), not held.whole and shards.is_cut(p)
                return PartBytes(held.numel, fixed, host, held.trains, pooled, gathered,
                                 any(step.staged and step.ranks > 1 for step in held.reductions))

            tied = [p for p, held in table.parameters.items() if held.name == "tied embedding"]
            self._parts[key] = UnitParts([[part(p) for p in unit.parameters if p not in tied]
                                          for unit in table.units], part(tied[0]) if tied else None)
        return self._parts[key]

    def _held(self, layout: Layout) -> list[tuple[PartBytes, ...]]:
        """Parameter units of each position."""
        model, parts = self.bounds.units(layout.tile_linears, layout.tp), self._unit_parts(layout)
        place = place_of(layout.schedule, layout.pp, layout.virtual_stages)
        split = model.split(len(place))
        assert split is not None, layout
        rows: list[list[PartBytes]] = [[] for _ in range(layout.pp)]
        for position, (first, stop) in zip(place, split, strict=True):
            for unit in range(first, stop):
                rows[position] += parts.of_kind[model.same[unit]]
        for position in {place[0], place[-1]} if parts.tied is not None else ():
            rows[position] += [parts.tied]  # pyright: ignore
        return [*map(tuple, rows)]

    def _fixed(self, layout: Layout) -> list[int]:
        """By position: parameters, gradients, optimizer states, buffers."""
        key = (layout.tp, layout.dp, layout.ep, layout.sequence_parallel, layout.stage, layout.shard_size,
               layout.reduce_every, layout.residency, layout.offload_optimizer, layout.reduce_dtype,
               layout.tile_linears, place_of(layout.schedule, layout.pp, layout.virtual_stages))
        if key not in self._known:
            config, model = config_of(layout, self.config), self.bounds.units(layout.tile_linears, layout.tp)
            ahead = 1 if config.zero.prefetch is None else config.zero.prefetch
            split = model.split(layout.pp * layout.virtual_stages)
            assert split is not None, layout
            sizes = {"stage": max(stop - first for first, stop in split), "step": len(model.same)}
            asked = layout.residency or 1
            window = asked if isinstance(asked, int) else sizes[asked]
            held = self._held(layout)  # by most positions, the same
            sizes_of = {parts: _fixed_bytes(layout, config, parts, window + ahead) for parts in {*held}}
            self._known[key] = [sizes_of[parts] for parts in held]
        return self._known[key]

    def _kept(self, layout: Layout) -> list[int]:
        """By position: activations and temporaries."""
        m = self.bounds.microbatches(layout)
        key = (self.bounds.cut(layout), layout.schedule, layout.pp, layout.virtual_stages, m,
               layout.offload_activations, layout.pair)
        if key not in self._known:
            kept = live(layout.schedule, layout.pp, m, layout.virtual_stages, layout.pair)
            self._known[key] = [self._kept_at(layout, position, kept[position])
                                for position in range(layout.pp)]
        return self._known[key]

    def _kept_at(self, layout: Layout, position: int, kept: Sequence[Live]) -> int:
        """The highest of two: when the loss is made, or a forward ends; when a unit has been computed again.
        (Temporaries: logits once more, or about a third of the operands; and some of the residual stream.
        Where backward is split, the gradient of the logits is there before the logits go.)"""
        model, cut = self.bounds.units(layout.tile_linears, layout.tp), self.bounds.cut(layout)
        split = model.split(layout.pp * layout.virtual_stages)
        place = place_of(layout.schedule, layout.pp, layout.virtual_stages)
        assert split is not None, layout
        every = model.of(cut)
        if at_once(layout.schedule, layout.pp, self.bounds.microbatches(layout), layout.virtual_stages,
                   layout.pair):
            every = [*every[:-1], every[-1]._replace(again=False)]
        mine = [every[first:stop] for (first, stop), where in zip(split, place, strict=True)
                if where == position]
        saved = [sum(_kept_bytes(unit, layout) + unit.handed_bytes for unit in stage) for stage in mine]
        operands = [sum(unit.operand_bytes for unit in stage) for stage in mine]
        peak = max(sum(map(mul, (*row.saved, *row.operands), (*saved, *operands))) for row in kept)
        if layout.policy == "budget":
            peak = min(peak, parse_bytes(self.config.activation.budget or 0))
        units = [unit for stage in mine for unit in stage]
        halves = any(map(any, (row.operands for row in kept)))
        logits = max(max(unit.logits_bytes, halves * bool(unit.logits_bytes) * unit.operand_bytes)
                     for unit in units)
        beside = [unit.temporary_bytes for unit in units if not unit.logits_bytes]
        # Its saved tensors are gone when other units of its micro-batch are computed again.
        gone = sum(unit.saved_bytes for unit in units if unit.logits_bytes and not unit.again)
        again = max((unit.saved_bytes + unit.temporary_bytes - gone * (not unit.logits_bytes)
                     for unit in units if unit.again), default=0)
        return peak + max(logits, again, max(beside, default=0)) + 3 * model.act_bytes[cut]


def _kept_bytes(unit: UnitCost, layout: Layout) -> int:
    """Bytes that a unit keeps of a micro-batch on the device from its forward to its backward."""
    if not unit.again:
        return unit.saved_bytes
    return 0 if layout.offload_activations else unit.kept_bytes


def _fixed_bytes(layout: Layout, config: Config, parts: Sequence[PartBytes], window: int) -> int:
    """Of a position with these parameter units. `window`: units that are gathered at a time."""
    element, grad, reduce = (BYTES[dtype] for dtype in (
        config.precision.dtype, config.precision.grad_dtype, config.precision.reduce_dtype))
    trained = [part.numel for part in parts if part.trains]
    size = sum(part.fixed for part in parts)
    size += _most([part.numel for part in parts if part.gathered], window) * element
    pooled = [part.numel for part in parts if part.pooled]
    size += _most(pooled, len(pooled) if layout.reduce_every == "step" else 2) * grad
    if any(part.staged for part in parts):
        size += max(trained, default=0) * reduce * (1 if reduce == grad else 2)
    return size


def _most(sizes: Sequence[int], count: int) -> int:
    """Elements of buffers for so many units at a time: of each size its own, or all of the largest."""
    counts: dict[int, int] = {}
    for numel in sizes:
        counts[numel] = counts.get(numel, 0) + 1
    apart = sum(numel * min(count, units) for numel, units in counts.items())
    return min(apart, max(counts, default=0) * min(count, len(sizes)))


# ---------------------------------------------------------------- of schedules


class Live(NamedTuple):
    """What a position keeps at a time, by its stages: micro-batches from forward to backward, and from the
    input half of backward to the weights' half."""

    saved: tuple[int, ...]
    operands: tuple[int, ...]


@lru_cache(512)
def live(name: str, p: int, m: int, v: int, pair: bool = False) -> tuple[tuple[Live, ...], ...]:
    """By position: what it keeps at the times of most memory, none of which is below another. `pair`: in the
    order for parallel.pair."""
    if name in FORWARDS_FIRST:
        return tuple((Live((m,) * v, (0,) * v),) for _ in range(p))
    place, result = place_of(name, p, v), []
    for position, tasks in enumerate(SCHEDULES[name].order(p, steady_count(name, p, m), v, pair)):
        mine = (stage for stage, where in enumerate(place) if where == position)
        chunk = {stage: at for at, stage in enumerate(mine)}
        saved, operands, seen = [0] * v, [0] * v, set()
        for task in tasks:
            at = chunk[task.stage]
            saved[at] += task.kind == "F"
            seen.add((*saved, *operands))
            # Unit by unit, operands take the place of what was saved.
            saved[at] -= task.kind in "BI"
            operands[at] += (task.kind == "I") - (task.kind == "W")
            seen.add((*saved, *operands))
        result.append(tuple(Live(each[:v], each[v:]) for each in _highest(seen)))
    return tuple(result)


def _highest(rows: set[tuple[int, ...]]) -> Sequence[tuple[int, ...]]:
    kept: list[tuple[int, ...]] = []
    for row in sorted(rows, key=lambda row: (-sum(row), row)):
        if not any(all(a <= b for a, b in zip(row, other, strict=True)) for other in kept):
            kept.append(row)
    return kept


@lru_cache(512)
def at_once(name: str, p: int, m: int, v: int, pair: bool = False) -> bool:
    """Whether the last unit's backward follows its forward, so that to recompute it would save nothing."""
    if name == "dualpipe-v":  # for some micro-batches only
        return False
    if name in FORWARDS_FIRST:
        return m == 1
    tasks = SCHEDULES[name].order(p, steady_count(name, p, m), v, pair)[place_of(name, p, v)[-1]]
    index = next(at for at, task in enumerate(tasks) if task[:2] == ("F", p * v - 1))
    return index + 1 < len(tasks) and tasks[index + 1][1:] == (p * v - 1, tasks[index][2])

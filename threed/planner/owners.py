"""Owners: which rank turns which matrix, and what is sent for it. No torch.

The matrices of a position go to its ranks by longest processing time (Graham 1969): the next largest to the
rank that has least to do.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from threed.base.axes import axes_of
from threed.base.mesh import FOLDS, OWNERS, Mesh
from threed.base.quantity import BYTES
from threed.base.remember import remembered
from threed.features.zero.matrices import Member, UnitMatrices, members
from threed.features.zero.shard import FlatLayout
from threed.optim.registry import turning
from threed.planner.unit_kinds import depends_on
from threed.program.entries import Matrix, ParameterUnit, Turning
from threed.schema import Config


def with_owners(config: Config, mesh: Mesh, layouts: Mapping[int, FlatLayout],
                units: Mapping[int, ParameterUnit]) -> dict[int, ParameterUnit]:
    """Parameter units, of which those that the config's optimizer steps say who turns their matrices."""
    if turning(config.optimizer.name) is None:
        return dict(units)
    together: dict[tuple[int, str], list[int]] = defaultdict(list)  # position, group -> units
    for number, unit in units.items():
        if unit.trains and not unit.optimizer:
            group = FOLDS[unit.fold].group(mesh) if unit.fold else OWNERS
            together[unit.positions[0], group].append(number)
    done = dict(units)
    for (_, group), numbers in together.items():
        dealt = _dealt(config, mesh, group, {number: layouts[number] for number in numbers})
        done |= {number: replace(units[number], turning=each) for number, each in dealt.items()}
    return done


class _Held(NamedTuple):
    """Matrix -> elements of each rank."""

    sends: list[Counter[int]]
    gets: list[Counter[int]]


def _about(config: Config, mesh: Mesh, group: str, layouts: Mapping[int, FlatLayout]) -> object:
    """What a deal depends on: on the ranks of a position, not on how many positions there are."""
    inner = tuple((axis, mesh.sizes[axis]) for axis in mesh.order if axis not in axes_of("stages"))
    return (depends_on(config), inner, mesh.shard_size, tuple(mesh.folds.items()), repr(config.optimizer),
            group, tuple(layouts))


@remembered(_about)
def _dealt(config: Config, mesh: Mesh, group: str,
           layouts: Mapping[int, FlatLayout]) -> dict[int, Turning]:
    optimizer = turning(config.optimizer.name)
    assert optimizer is not None
    shard_group = mesh.shard_group if group == OWNERS else group
    ranks, heads = members(mesh, group, shard_group, 0), config.optimizer.matrices == "heads"
    units = {number: UnitMatrices(laid, ranks[0].place, heads) for number, laid in layouts.items()}
    work = {(number, index): optimizer.flops(*each.shape, config.optimizer)
            for number, unit in units.items() for index, each in enumerate(unit.whole)}
    free = [(0, rank) for rank in range(len(ranks))]
    owner: dict[tuple[int, int], int] = {}
    for which in sorted(work, key=lambda which: (-work[which], which)):
        load, rank = heapq.heappop(free)
        owner[which] = rank
        heapq.heappush(free, (load + work[which], rank))
    elements = {(number, index): math.prod(each.shape)
                for number, unit in units.items() for index, each in enumerate(unit.whole)}
    owned, done = Counter[int](), Counter[int]()
    for which, rank in owner.items():
        owned[rank] += elements[which]
        done[rank] += work[which]
    busiest = max(done.values()) * len(ranks) / sum(done.values())
    dealt, known = {}, dict[object, _Held]()
    for number, unit in units.items():
        alike = tuple((placed.start, replace(placed.parameter, name="", std=0.0, init=None))
                      for placed in unit.layout.placed)
        if (key := (alike, unit.layout.numel)) not in known:
            known[key] = _held(unit, ranks, config.zero.stage >= 1)
        held = known[key]
        matrices = tuple(Matrix(unit.layout.placed[each.placed].parameter.name, each.index, each.shape,
                                owner[number, index], work[number, index])
                         for index, each in enumerate(unit.whole))
        sent, returned = (sum(count for rank, counted in enumerate(of) for index, count in counted.items()
                              if owner[number, index] != rank) for of in held)
        mine = sum(elements[number, index] for index in range(len(unit.whole)))
        share = -(-mine * max(owned.values()) // sum(elements.values()))
        dealt[number] = Turning(group, len(ranks), matrices, BYTES[config.optimizer.turn_dtype], sent,
                                returned, share, round(busiest, 4))
    return dealt


def _held(unit: UnitMatrices, ranks: Sequence[Member], sharded: bool) -> _Held:
    held = _Held([], [])
    for member in ranks:
        for into, pieces in ((held.sends, unit.sends(member)), (held.gets, unit.owned(member, sharded))):
            counted = Counter[int]()
            for piece in pieces:
                counted[piece.matrix] += piece.numel
            into.append(counted)
    return held

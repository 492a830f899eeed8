"""Merged tables: units of a stage that are alike become fewer, which cost as much.

Units that hand tensors to each other are a **group**, such as those of a block with experts. A **run** is the
same groups over and over: all blocks of a stage, or where every second one has experts, all pairs of them.
Of two members of a run, the first units become one, the second ones, and so on:

    routes experts collect  routes experts collect   ->   2 routes  2 experts  2 collect
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from threed.program.entries import ComputeUnit, Handed, ParameterUnit
from threed.program.table import Table
from threed.spec.kernels import Kernel, Moved

_MOST_GROUPS = 8  # of a member of a run


def merged(table: Table, ends: bool = True) -> Table:
    """A table with fewer units, which cost the same. `ends`: whether the first and the last member of a run
    stay alone, and pairs of the others become one: what the step's start and end wait for is as large as in
    the real plan. Else all of them become one."""
    if table.activation.offload or table.activation.partition or (ends and _often(table)):
        return table  # what is kept moves unit by unit; or the size of each unit counts
    groups = _groups(table)
    rows = [[[*chain(*groups[at:at + size])] for at in range(first, stop, size)]
            for first, stop, size in runs([_kind(table, group) for group in groups])]
    units = [row for run in rows for chunk in (_pairs(run) if ends else _whole(table, run))
             for row in zip(*chunk, strict=True)]
    # Parameter units that become one have the number of the first of them; numbers keep their order.
    same = {held[0]: held for row in units
            for held in zip(*(table.units[unit].parameters for unit in row), strict=True)}
    unit_of, number = ({first: at for at, first in enumerate(firsts)}
                       for firsts in ((row[0] for row in units), sorted(same)))
    return replace(table, units=tuple(_sum_of(table, row, number, unit_of) for row in units),
                   parameters={number[first]: _all_of(table, same[first]) for first in sorted(same)})


def runs(kinds: Sequence[object]) -> Iterator[tuple[int, int, int]]:
    """The runs of a list: (first, one past the last, length of a member). Of runs that begin at one place the
    longest counts, and of equally long ones that with the shortest members; else an item is its own run."""
    numbers: dict[object, int] = {}
    row, first = [numbers.setdefault(kind, len(numbers)) for kind in kinds], 0
    while first < len(row):
        last, each = first + 1, 1
        for size in range(1, min(_MOST_GROUPS, (len(row) - first) // 2) + 1):
            stop = first + size
            while row[stop:stop + size] == row[first:first + size]:
                stop += size
            if stop > max(last, first + size):
                last, each = stop, size
        yield first, last, each
        first = last


def _often(table: Table) -> bool:
    """Whether there is traffic over dp in every micro-batch."""
    zero = table.zero
    return (zero.stage == 3 and zero.residency != "step") or (
        zero.stage >= 2 and zero.reduce_every < table.num_microbatches)


def _groups(table: Table) -> list[list[int]]:
    """Units from the maker of a tensor to its last reader; others alone."""
    groups: list[list[int]] = []
    for index, unit in enumerate(table.units):
        first = min((read.unit for read in unit.reads), default=index)
        group = [index]
        while groups and groups[-1][-1] >= first:
            group = groups.pop() + group
        groups.append(group)
    return groups


def _pairs(run: list[list[int]]) -> list[list[list[int]]]:
    """The first, pairs of those between, and the last. Of members of several units none is merged: their
    parameters are gathered and reduced in turn."""
    if len(run) < 4 or len(run[0]) > 1:
        return [[member] for member in run]
    middle = run[1:-1]
    return [run[:1], *(middle[at:at + 2] for at in range(0, len(middle), 2)), run[-1:]]


def _whole(table: Table, run: list[list[int]]) -> list[list[list[int]]]:
    """All. But where they are computed again, the last one is before its gradient comes, the others after."""
    again = any(table.units[unit].recompute for unit in run[0])
    return [run[:-1], run[-1:]] if again and len(run) > 1 else [run]


def _kind(table: Table, group: Sequence[int]) -> object:
    """Equal for groups that may become one."""
    return tuple([_unit_kind(table, index, group[0]) for index in group])


def _unit_kind(table: Table, index: int, first: int) -> object:
    unit = table.units[index]
    held = [table.parameters[p] for p in unit.parameters]
    if index in (0, table.last) or any(len(each.positions) > 1 for each in held):
        return index
    return (unit.stage, _unnamed(unit.kernels), unit.saved_bytes, unit.operand_bytes,
            repr((unit.traffic, unit.rings)), unit.recompute, unit.adds, unit.output, _unnamed(unit.again),
            unit.loss, unit.makes, tuple([read._replace(unit=read.unit - first) for read in unit.reads]),
            tuple(replace(each, name="", padding=0) for each in held))


def _unnamed(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    return tuple([kernel._replace(what="") if isinstance(kernel, Moved) else kernel for kernel in kernels])


def _all_of(table: Table, same: Sequence[int]) -> ParameterUnit:
    first, count = table.parameters[same[0]], len(same)
    return replace(first, numel=count * first.numel, padding=count * first.padding, reductions=tuple(
        step._replace(numel=count * step.numel) for step in first.reductions)) if count > 1 else first


def _sum_of(table: Table, row: Sequence[int], number: dict[int, int],
            unit_of: dict[int, int]) -> ComputeUnit:
    first, count = table.units[row[0]], len(row)
    traffic, rings = ({phase: {axis: count * each for axis, each in sent.items()}
                       for phase, sent in of.items()} for of in (first.traffic, first.rings))

    def handed(each: Handed) -> Handed:
        trip = each.trip
        if trip is not None:
            trip = trip._replace(bytes=count * trip.bytes, times=count, counts=tuple(
                (name, unit_of[row[0]] - unit_of[row[0] - before]) for name, before in trip.counts))
        return each._replace(bytes=count * each.bytes, trip=trip)

    return replace(first, makes=tuple(map(handed, first.makes)),
                   parameters=tuple(number[p] for p in first.parameters), traffic=traffic, rings=rings,
                   kernels=count * _unnamed(first.kernels), again=count * _unnamed(first.again),
                   saved_bytes=count * first.saved_bytes, operand_bytes=count * first.operand_bytes,
                   reads=tuple(read._replace(unit=unit_of[read.unit]) for read in first.reads))

"""Merged tables: units of a stage that are alike become fewer, which take as long.

Units that hand tensors to each other are a **group**, such as those of a block with experts. A **run** is the
same groups over and over: all blocks of a stage, or where every second one has experts, all pairs of them.
Of two members of a run, the first groups become one unit, the second ones, and so on:

    routes experts collect  routes experts collect   ->   one unit, that waits for what these exchange
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from threed.base.mesh import FOLDS
from threed.prediction.analytic import cost
from threed.prediction.hardware import Hardware
from threed.program.entries import ComputeUnit, ParameterUnit, gradient_kind
from threed.program.instruction import COMPUTE, Instruction, Op, Slot
from threed.program.plan import Plan
from threed.program.table import Table
from threed.program.trips import back
from threed.program.walk import Cost
from threed.spec.kernels import Kernel, Moved

_MOST_GROUPS = 8  # of a member of a run
Group = Sequence[int]  # units, one behind the other
Same = Sequence[Group]  # groups that are alike


class Merged(NamedTuple):
    """A table with fewer units, and the table that it stands for."""

    table: Table
    whole: Table
    parts: Sequence[Same]  # of each unit of `table`, what it is made of; none where the two are the same

    def cost(self, plan: Plan, hardware: Hardware, free: Collection[Op] = (),
             change: Callable[[Table], Table] = lambda table: table) -> Cost:
        """Seconds of an instruction of a plan of `table`: a unit takes as long as its parts one after the
        other. `free`: ops that take no time inside units. `change`: what makes tables of other prices."""
        plan, whole = replace(plan, table=change(plan.table)), change(self.whole)
        outside, inside = cost(plan, hardware), cost(Plan(whole, {}, plan.config), hardware)
        known: dict[tuple[Op, int], float] = {}

        def price(item: Instruction) -> float:
            return 0.0 if (Op.EXCHANGE if item.of_slot else item.op) in free else inside(0, item)

        def seconds(position: int, item: Instruction) -> float:
            if item.op not in COMPUTE or not self.parts:
                return outside(position, item)
            key = item.op, item.unit
            if key not in known:
                groups = self.parts[item.unit]
                known[key] = len(groups) * _takes(whole, groups[0], item.op, price, hardware.contention)
            return known[key]

        return seconds


def merged(table: Table, ends: bool = True) -> Merged:
    """A table with fewer units, which cost the same. `ends`: whether the first and the last member of a run
    stay alone, and pairs of the others become one: what the step's start and end wait for is as large as in
    the real plan. Else all of them become one."""
    if table.activation.offload or table.activation.partition or table.pair or (ends and _often(table)):
        # What is kept moves, and pairs are made, unit by unit; or the size of each unit counts
        return Merged(table, table, ())
    groups, parts = _groups(table), list[Same]()
    for first, stop, size in runs([_kind(table, group) for group in groups]):
        run = [groups[at:at + size] for at in range(first, stop, size)]
        for chunk in _pairs(run) if ends else _whole(table, run):
            # With the gradients of a position's first stage a step ends: units of a block there stay apart.
            apart = ends and chunk[0] is run[0] and table.units[run[0][0][0]].stage < table.num_positions
            for row in zip(*chunk, strict=True):
                together = len(row[0]) == 1 or (not apart and _is_one(table, row[0], ends))
                parts += [row] if together else [[[unit]] for unit in chain(*row)]
    # Parameter units that become one have the number of the first of them; numbers keep their order.
    same = {held[0]: held for row in parts
            for held in zip(*(_held(table, group) for group in row), strict=True)}
    unit_of, number = ({first: at for at, first in enumerate(firsts)}
                       for firsts in ((row[0][0] for row in parts), sorted(same)))
    less = replace(table, units=tuple(_sum_of(table, row, number, unit_of) for row in parts),
                   parameters={number[first]: _all_of(table, same[first]) for first in sorted(same)})
    return Merged(less, table, parts)


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


def wait_s(table: Table, u: int, op: Op, price: Callable[[Instruction], float], contention: float) -> float:
    """How many seconds an exchange adds to computation behind a unit's FORWARD, or before its `op` of
    backward: nothing is computed while what it hands on travels, or more slowly (`Hardware.contention`). An
    exchange stands directly behind what makes its tensor, and what reads that is in the same stage: only what
    lies between the two, and what is computed again for the first one's backward, can run meanwhile. Of
    several that read, the one that waits longest counts: what an earlier one reads has travelled before."""
    trips = [(_reader(table, u, made.becomes), made) for made in table.units[u].makes if made.over in FOLDS]
    longest = 0.0
    for reader in {at for at, _ in trips} - {u}:
        until = [made for at, made in trips if at <= reader]
        meanwhile = sum(price(Instruction(op, other, 0)) for other in range(u + 1, reader))
        if op == Op.FORWARD:
            sent = sum(price(Instruction(Op(made.by), u, 0, made.name, group=made.over)) for made in until)
        else:
            sent = sum(price(Instruction(back(made.by), u, 0, gradient_kind(made.becomes), group=made.over))
                       for made in until if made.grad)
            meanwhile += sum(_again_s(table, other, price) for other in range(u, reader))
        longest = max(longest, sent - meanwhile, contention * min(sent, meanwhile))
    return longest


def _reader(table: Table, maker: int, name: str) -> int:
    """The first unit that reads what comes of a unit's tensor; its maker, where it is only a count of others.
    """
    return next((at for at in range(maker + 1, len(table.units)) for read in table.units[at].reads
                 if read.unit == maker and read.name == name), maker)


def _again_s(table: Table, u: int, price: Callable[[Instruction], float]) -> float:
    return price(Instruction(Op.RECOMPUTE, u, 0)) if table.units[u].recompute else 0.0


def _takes(table: Table, group: Group, op: Op, price: Callable[[Instruction], float],
           contention: float) -> float:
    """Seconds of an op of a group, with what it waits for; backward with what is computed again for it."""
    total = sum(price(Instruction(op, u, 0)) for u in group)
    if len(group) > 1 and op != Op.BACKWARD_WEIGHT:
        total += sum(wait_s(table, u, op, price, contention) for u in group)
        total += sum(_again_s(table, u, price) for u in group) * (op != Op.FORWARD)
    return total


def _often(table: Table) -> bool:
    """Whether there is traffic over dp in every micro-batch."""
    zero = table.zero
    return (zero.stage == 3 and zero.residency != "step") or (
        zero.stage >= 2 and zero.reduce_every < table.num_microbatches)


def _groups(table: Table) -> list[Group]:
    """Units from the maker of a tensor to its last reader; others alone."""
    groups: list[Group] = []
    for index, unit in enumerate(table.units):
        first = min((read.unit for read in unit.reads), default=index)
        group = [index]
        while groups and groups[-1][-1] >= first:
            group = [*groups.pop(), *group]
        groups.append(group)
    return groups


def _is_one(table: Table, group: Group, ends: bool) -> bool:
    """Whether the units of a group may become one: they wait for exchanges alone, and a gradient that comes
    is used at once. `ends`: those that exchange nothing, such as tiles, stay as they are."""
    over = [made.over for u in group for made in table.units[u].makes if made.over]
    return (bool(over) or not ends) and all(group in FOLDS for group in over) and not (
        table.units[group[-1]].recompute)


def _pairs(run: list[list[Group]]) -> list[list[list[Group]]]:
    """The first, pairs of those between, and the last. Of members of several groups none is merged: their
    parameters are gathered and reduced in turn."""
    if len(run) < 4 or len(run[0]) > 1:
        return [[member] for member in run]
    middle = run[1:-1]
    return [run[:1], *(middle[at:at + 2] for at in range(0, len(middle), 2)), run[-1:]]


def _whole(table: Table, run: list[list[Group]]) -> list[list[list[Group]]]:
    """All. But where they are computed again, the last one is before its gradient comes, the others after."""
    again = table.units[run[0][-1][-1]].recompute
    return [run[:-1], run[-1:]] if again and len(run) > 1 else [run]


def _kind(table: Table, group: Group) -> object:
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


def _held(table: Table, group: Group) -> list[int]:
    """The parameter units of a group."""
    return [*dict.fromkeys(chain(*(table.units[unit].parameters for unit in group)))]


def _all_of(table: Table, same: Sequence[int]) -> ParameterUnit:
    first, count = table.parameters[same[0]], len(same)
    return replace(first, numel=count * first.numel, padding=count * first.padding, reductions=tuple(
        step._replace(numel=count * step.numel) for step in first.reductions)) if count > 1 else first


def _sum_of(table: Table, same: Same, number: dict[int, int], unit_of: dict[int, int]) -> ComputeUnit:
    """What `Merged.cost` looks up is left out."""
    units, count = [table.units[u] for u in same[0]], len(same)
    saved = [table.size(Slot("kept", u)) if unit.recompute else unit.saved_bytes
            for u, unit in zip(same[0], units, strict=True)]
    first, alone = units[0], len(units) == 1
    return replace(
        first, parameters=tuple(number[p] for p in _held(table, same[0])), output=units[-1].output,
        kernels=count * tuple(chain(*(unit.kernels for unit in units))),
        saved_bytes=count * (first.saved_bytes if alone else sum(saved)),
        operand_bytes=count * sum(unit.operand_bytes for unit in units),
        recompute=first.recompute and alone, adds=first.adds and alone, makes=first.makes if alone else (),
        reads=tuple(read._replace(unit=unit_of[read.unit]) for read in first.reads) if alone else ())

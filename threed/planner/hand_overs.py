"""Hand-overs: which tensors layers hand to layers of other units, and which travel to other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from threed.base.errors import InputError
from threed.base.mesh import GROUPS
from threed.models.layers.base import Layer
from threed.models.layers.handing import Handing, handing, makes
from threed.program.entries import Handed, Read, Trip, gradient_kind
from threed.program.instruction import KINDS
from threed.spec.parameter import Share
from threed.spec.travel import Exchanged, Gathered


class Made(NamedTuple):
    """A tensor that a layer makes, or what it becomes."""

    unit: int
    layer: str  # its name
    dtype: str | None  # if no gradient belongs to it
    way: Gathered | Exchanged | None = None  # how it travels
    source: str = ""  # of what has come: the name of what left
    counts: tuple[tuple[str, int], ...] = ()  # as a Trip's


class HandOver(NamedTuple):
    """Of one unit."""

    makes: tuple[str, ...]  # names of the tensors that it makes for later units
    reads: tuple[Read, ...]
    trips: Mapping[str, Trip]  # of `makes`, those that travel; over one rank


def hand_overs(units: Sequence[Sequence[Layer]]) -> list[HandOver]:
    """The tensors that units make for later units, and those of earlier units that they read. (Tensors that
    layers of one unit hand to each other do not count.)"""
    made: dict[str, Made] = {}  # by its name, what was made last
    of_unit = [dict[str, Made]() for _ in units]
    reads = [dict[str, int]() for _ in units]  # name -> its maker
    readers: dict[tuple[str, int], set[int]] = defaultdict(set)  # (name, maker) -> units
    spent = [_spent([handing(layer) for layer in unit]) for unit in units]
    for index, unit in enumerate(units):
        for layer, hands in ((layer, handing(layer)) for layer in unit):
            for name in hands.reads:
                _check_read(layer, name, index, made)
                readers[name, made[name].unit].add(index)
            _check_spent(layer, made)
            reads[index] |= {name: made[name].unit for name in _with_counts(hands.reads, made)
                             if made[name].unit != index}
            of_unit[index] |= (new := _makes(layer, index))
            made |= new
            for name, way in hands.travels.items():
                _check_way(layer, name, way, made)
                counts = tuple((count, index - made[count].unit) for count in (way.gives, way.takes) if count)
                of_unit[index][name] = made[name] = made[name]._replace(counts=counts)
    for name in made:
        if taken := {name, gradient_kind(name)} & KINDS or {gradient_kind(name)} & made.keys():
            raise InputError(f"layers hand on a tensor called '{name}', but the slots of that tensor and of "
                             f"its gradient cannot be called '{taken.pop()}', which is the name of another "
                             "slot: give the tensor another name")
    last = {read: index for index, mine in enumerate(reads) for read in mine.items()}
    for name, each in ((name, each) for mine in of_unit for name, each in mine.items() if each.source):
        if (name, each.unit) not in last:
            raise InputError(f"layer {each.layer} sends '{each.source}', which becomes '{name}', but no "
                             "later layer reads that: name it in the `reads` of the layer that needs it")
        if each.dtype is None and (count := len(readers[name, each.unit])) > 1:
            raise InputError(f"{count} layers read '{name}', which layer {each.layer} sends: the backward of "
                             "the one that reads it frees it; let that one hand it on")
    return [_hand_over(index, of_unit, reads[index], last, spent[index]) for index in range(len(units))]


def _hand_over(unit: int, of_unit: Sequence[Mapping[str, Made]], reads: Mapping[str, int],
               last: Mapping[tuple[str, int], int], spent: Collection[str]) -> HandOver:
    """`last`: (name, maker) -> the last unit that reads it. `spent`: names of what its forward uses up."""
    mine = of_unit[unit]
    makes = {name for name, each in mine.items()
             if each.way is not None or (not each.source and (name, unit) in last)}
    about = {name: of_unit[maker][name] for name, maker in reads.items()}
    return HandOver(
        tuple(sorted(makes)),
        tuple(Read(name, maker, last[name, maker] == unit, about[name].dtype is None,
                   bool(about[name].source) and about[name].dtype is None, name in spent)
              for name, maker in reads.items()),
        {name: Trip(each.way.becomes, each.way.over, each.way.by, 1, 0, each.counts)
         for name, each in mine.items() if each.way is not None})


def with_ranks(makes: Sequence[Handed], ways: Mapping[str, Gathered | Exchanged],
               ranks: Mapping[str, int]) -> tuple[Handed, ...]:
    """The same on a mesh. `ranks`: group -> its ranks."""
    return tuple(each if each.trip is None else each._replace(trip=each.trip._replace(
        ranks=ranks[each.trip.over],
        bytes=each.trip.bytes or ways[each.name].bytes(each.bytes, ranks[each.trip.over])))
        for each in makes)


def _spent(unit: Sequence[Handing]) -> set[str]:
    """Names of what a unit's forward uses up."""
    return ({name for hands in unit for name in hands.spent}
            - {name for hands in unit for name in hands.reads if name not in hands.spent})


def _makes(layer: Layer, unit: int) -> dict[str, Made]:
    """All that a layer makes, and what it becomes."""
    hands, sizes = handing(layer), makes(layer, Share())
    come = {way.becomes for way in hands.travels.values()}
    made = {name: Made(unit, layer.name, hands.without_grad.get(name)) for name in sizes if name not in come}
    for name, way in hands.travels.items():
        if way.becomes in {*hands.travels, *hands.without_grad}:
            raise InputError(f"layer {layer.name}: '{name}' becomes '{way.becomes}', which is the name of "
                             "another tensor of this layer: give what comes a name of its own")
        if name not in made:
            raise InputError(f"layer {layer.name}: '{name}' travels, but `makes` does not name it")
        if sizes.get(way.becomes, 1) < 1:
            raise InputError(f"layer {layer.name}: `makes` says {sizes[way.becomes]} bytes of "
                             f"'{way.becomes}', which comes from other ranks: they must be above 0")
        made[name] = made[name]._replace(way=way)
        made[way.becomes] = Made(unit, layer.name, made[name].dtype, source=name)
    return made


def _with_counts(names: Sequence[str], made: Mapping[str, Made]) -> list[str]:
    """Names, and those of what says how many rows of them have travelled, which stays as long. What has no
    gradient stays until then on both sides."""
    found: list[str] = []
    left = [*names]
    while left:
        if (name := left.pop(0)) in found:
            continue
        found.append(name)
        if source := made[name].source:
            way = made[source].way
            assert way is not None
            left += [each for each in (way.gives, way.takes) if each]
            left += [source] if made[source].dtype is not None else []
    return found


def _check_read(layer: Layer, name: str, unit: int, made: Mapping[str, Made]) -> None:
    if name not in made:
        raise InputError(f"layer {layer.name} reads '{name}', which no layer before it makes")
    dtype, way = made[name].dtype, made[name].way
    if handing(layer).without_grad.get(name) != dtype:
        has = "has a gradient" if dtype is None else f"is made without a gradient, in {dtype}"
        raise InputError(f"layer {layer.name} reads '{name}', which {has}: its `without_grad` must say the "
                         "same as that of the layer that makes it")
    if way is not None and dtype is None:
        raise InputError(f"layer {layer.name} reads '{name}', which leaves for other ranks: let it read "
                         f"'{way.becomes}', what it becomes")
    if made[name].source and made[name].unit == unit:
        raise InputError(f"layers {made[name].layer} and {layer.name} are one unit, and '{name}' cannot "
                         "travel between them: set parallel.layers_per_unit=1")


def _check_spent(layer: Layer, made: Mapping[str, Made]) -> None:
    hands = handing(layer)
    for name in hands.spent:
        if name not in hands.reads or not made[name].source or made[name].dtype is not None:
            raise InputError(f"layer {layer.name}: `spent` names '{name}', but it may name only what the "
                             "layer reads, what has travelled, and what has a gradient")


def _check_way(layer: Layer, name: str, way: Gathered | Exchanged, made: Mapping[str, Made]) -> None:
    row, who = GROUPS.get(way.over), f"layer {layer.name}: '{name}' travels over '{way.over}'"
    if row is None or row.across_positions or not row.lane:
        inside = [group for group, each in GROUPS.items() if not each.across_positions and each.lane]
        raise InputError(f"{who}, which is no group inside a pipeline position; there are "
                         f"{', '.join(inside)}")
    if {way.gives, way.takes} & {name, way.becomes}:
        raise InputError(f"{who} by counts that it is itself: make them a tensor of their own")
    if bool(way.gives) != bool(way.takes):
        raise InputError(f"{who}: `gives` and `takes` name the rows for each rank and of each; give both, or "
                         "neither where all ranks get equally many")
    for count in (way.gives, way.takes) if way.gives else ():
        if count not in made or made[count].dtype != "int64":
            what = "is not int64 without a gradient" if count in made else "no layer up to it makes"
            raise InputError(f"{who} by the counts '{count}', which {what}: make it, and name it in "
                             "`without_grad` as int64")

"""Hand-overs: which tensors layers hand to layers of other units, and which travel to other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from threed.base.errors import InputError
from threed.base.mesh import GROUPS
from threed.models.layers.base import Layer
from threed.models.layers.handing import Handing, handing, makes
from threed.program.entries import MadeTensor, ReadTensor, gradient_kind
from threed.program.instruction import SlotKind
from threed.spec.parameter import Share
from threed.spec.travel import Exchanged, Gathered


class _Maker(NamedTuple):
    """What makes a tensor, or sends what becomes it."""

    unit: int
    layer: Layer
    hands: Handing

    def source(self, name: str) -> str:
        """The name of the tensor that becomes this one; empty where it has not travelled."""
        return next((sent for sent, way in self.hands.travels.items() if way.becomes == name), "")

    def dtype(self, name: str) -> str | None:
        """The dtype of a tensor that has no gradient; None for a tensor that has one."""
        return self.hands.without_grad.get(self.source(name) or name)

    def again(self, name: str) -> str:
        """The source of what comes twice; empty where it comes once, or is of this rank."""
        return source if (source := self.source(name)) and self.hands.travels[source].again else ""


def hand_overs(units: Sequence[Sequence[Layer]], share: Share, ranks: Mapping[str, int],
               ) -> list[tuple[tuple[MadeTensor, ...], tuple[ReadTensor, ...]]]:
    """Of each unit, the tensors that it makes for later units, and those of earlier units that it reads.
    (Tensors that layers of one unit hand to each other do not count.) `ranks`: group -> its ranks."""
    made: dict[str, _Maker] = {}  # by its name, what was made last
    of_unit = [dict[str, _Maker]() for _ in units]
    counts: dict[tuple[str, int], tuple[tuple[str, int], ...]] = {}  # (name, maker) -> MadeTensor.counts
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
                counts[name, index] = tuple((count, index - made[count].unit)
                                            for count in (way.gives, way.takes) if count)
    for name in made:
        if taken := {name, gradient_kind(name)} & {*SlotKind} or {gradient_kind(name)} & made.keys():
            raise InputError(f"layers hand on a tensor called '{name}', but the slots of that tensor and of "
                             f"its gradient cannot be called '{taken.pop()}', which is the name of another "
                             "slot: give the tensor another name")
    last = {read: index for index, mine in enumerate(reads) for read in mine.items()}
    for name, maker in ((name, maker) for mine in of_unit for name, maker in mine.items()):
        if not (source := maker.source(name)):
            continue
        if (name, maker.unit) not in last:
            raise InputError(f"layer {maker.layer.name} sends '{source}', which becomes '{name}', but no "
                             "later layer reads that: name it in the `reads` of the layer that needs it")
        if maker.dtype(name) is None and (count := len(readers[name, maker.unit])) > 1:
            raise InputError(f"{count} layers read '{name}', which layer {maker.layer.name} sends: the "
                             "backward of the one that reads it frees it; let that one hand it on")
    about = [{name: of_unit[maker][name] for name, maker in mine.items()} for mine in reads]
    return [(tuple(_made(unit, share, ranks, mine, counts, last)),
             tuple(_read(name, maker, last[name, maker.unit] == index, name in spent[index])
                   for name, maker in about[index].items()))
            for index, (unit, mine) in enumerate(zip(units, of_unit, strict=True))]


def _made(unit: Sequence[Layer], share: Share, ranks: Mapping[str, int], makers: Mapping[str, _Maker],
          counts: Mapping[tuple[str, int], tuple[tuple[str, int], ...]],
          read: Collection[tuple[str, int]]) -> Iterator[MadeTensor]:
    """The tensors that a unit makes for later units. `read`: (name, maker) of all that units read."""
    sizes = {name: size for layer in unit for name, size in makes(layer, share).items()}
    for name, maker in sorted(makers.items()):
        grad, way = maker.dtype(name) is None, maker.hands.travels.get(name)
        if way is not None:
            arriving = sizes.get(way.becomes, 0) or way.bytes(sizes[name], ranks[way.over])
            yield MadeTensor(name, sizes[name], grad, way.becomes, way.over, way.by, ranks[way.over],
                             arriving, counts[name, maker.unit], way.again)
        elif not maker.source(name) and (name, maker.unit) in read:
            yield MadeTensor(name, sizes[name], grad)


def _read(name: str, maker: _Maker, last: bool, spent: bool) -> ReadTensor:
    grad = maker.dtype(name) is None
    return ReadTensor(name, maker.unit, last, grad, grad and maker.source(name) != "", spent,
                      maker.again(name))


def _spent(unit: Sequence[Handing]) -> set[str]:
    """Names of what a unit's forward uses up."""
    return ({name for hands in unit for name in hands.spent}
            - {name for hands in unit for name in hands.reads if name not in hands.spent})


def _makes(layer: Layer, unit: int) -> dict[str, _Maker]:
    """All that a layer makes, and what it becomes."""
    hands, sizes = handing(layer), makes(layer, Share())
    come = {way.becomes for way in hands.travels.values()}
    made = {name: _Maker(unit, layer, hands) for name in sizes if name not in come}
    for name, way in hands.travels.items():
        if way.becomes in {*hands.travels, *hands.without_grad}:
            raise InputError(f"layer {layer.name}: '{name}' becomes '{way.becomes}', which is the name of "
                             "another tensor of this layer: give what comes a name of its own")
        if name not in made:
            raise InputError(f"layer {layer.name}: '{name}' travels, but `makes` does not name it")
        if sizes.get(way.becomes, 1) < 1:
            raise InputError(f"layer {layer.name}: `makes` says {sizes[way.becomes]} bytes of "
                             f"'{way.becomes}', which comes from other ranks: they must be above 0")
        made[way.becomes] = _Maker(unit, layer, hands)
    return made


def _with_counts(names: Sequence[str], made: Mapping[str, _Maker]) -> list[str]:
    """Names, and those of what says how many rows of them have travelled, which stays as long. What has no
    gradient stays until then on both sides."""
    found: list[str] = []
    left = [*names]
    while left:
        if (name := left.pop(0)) in found:
            continue
        found.append(name)
        if source := made[name].source(name):
            way = made[name].hands.travels[source]
            left += [each for each in (way.gives, way.takes) if each]
            left += [source] if made[name].dtype(name) is not None else []
    return found


def _check_read(layer: Layer, name: str, unit: int, made: Mapping[str, _Maker]) -> None:
    if name not in made:
        raise InputError(f"layer {layer.name} reads '{name}', which no layer before it makes")
    dtype, way = made[name].dtype(name), made[name].hands.travels.get(name)
    if handing(layer).without_grad.get(name) != dtype:
        has = "has a gradient" if dtype is None else f"is made without a gradient, in {dtype}"
        raise InputError(f"layer {layer.name} reads '{name}', which {has}: its `without_grad` must say the "
                         "same as that of the layer that makes it")
    if way is not None and dtype is None:
        raise InputError(f"layer {layer.name} reads '{name}', which leaves for other ranks: let it read "
                         f"'{way.becomes}', what it becomes")
    if made[name].source(name) and made[name].unit == unit:
        raise InputError(f"layers {made[name].layer.name} and {layer.name} are one unit, and '{name}' cannot "
                         "travel between them: set parallel.layers_per_unit=1")


def _check_spent(layer: Layer, made: Mapping[str, _Maker]) -> None:
    hands = handing(layer)
    for name in hands.spent:
        if name not in hands.reads or not made[name].source(name) or made[name].dtype(name) is not None:
            raise InputError(f"layer {layer.name}: `spent` names '{name}', but it may name only what the "
                             "layer reads, what has travelled, and what has a gradient")
        if made[name].again(name):
            raise InputError(f"layer {layer.name}: `spent` names '{name}', which comes again for backward: "
                             "leave it out, or `again` in the `travels` of the layer that sends it")


def _check_way(layer: Layer, name: str, way: Gathered | Exchanged, made: Mapping[str, _Maker]) -> None:
    row, who = GROUPS.get(way.over), f"layer {layer.name}: '{name}' travels over '{way.over}'"
    if row is None or row.across_positions or not row.lane:
        inside = [group for group, each in GROUPS.items() if not each.across_positions and each.lane]
        raise InputError(f"{who}, which is no group inside a pipeline position; there are "
                         f"{', '.join(inside)}")
    if {way.gives, way.takes} & {name, way.becomes}:
        raise InputError(f"{who} by counts that it is itself: make them a tensor of their own")
    if way.again and name in handing(layer).without_grad:
        raise InputError(f"{who} twice, and has no gradient: it stays until backward anyway; leave out "
                         "`again`")
    if bool(way.gives) != bool(way.takes):
        raise InputError(f"{who}: `gives` and `takes` name the rows for each rank and of each; give both, or "
                         "neither where all ranks get equally many")
    for count in (way.gives, way.takes) if way.gives else ():
        if count not in made or made[count].dtype(count) != "int64":
            what = "is not int64 without a gradient" if count in made else "no layer up to it makes"
            raise InputError(f"{who} by the counts '{count}', which {what}: make it, and name it in "
                             "`without_grad` as int64")

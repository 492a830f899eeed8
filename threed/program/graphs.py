"""CUDA graphs: which instructions of a program share a graph, and in which memory. No torch.

A graph reads and writes fixed addresses. A **pass** is what one stage computes of one micro-batch, forward
and backward. Each pass has a **set** of buffers, in which its graphs keep all that they make; no two passes
that are alive at the same time have the same set, so a stage has as many sets as passes are alive at a time.

Passes are of one **variant** if they run the same instructions in the same order, with the same buffers of
the pools for gathered parameters and gradients, begin the same gradients anew, and still need the same of
what they have made before each instruction: what nobody needed any more when a graph was recorded may be
where that graph writes. Passes of one set and variant replay the same graphs. The variants of a set share its
memory, of which nothing is needed when a pass ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from threed.program.access import Effects
from threed.program.analysis import Analysis
from threed.program.instruction import (
    COMPUTE,
    PARAMETER_KINDS,
    Instruction,
    Op,
    Slot,
    SlotKind,
    Tier,
)
from threed.program.order import Users
from threed.program.seam import seam_of
from threed.program.table import Table

PROGRAM = "train"  # it runs step after step; the other programs run without graphs


class GraphKey(NamedTuple):
    """What a graph is of."""

    op: Op
    unit: int
    stage: int
    set: int
    variant: int

    @property
    def pool(self) -> tuple[int, int, int]:
        """Graphs of one may read each other's outputs in place."""
        return self.stage, self.set, self.variant


class Turn(NamedTuple):
    """A compute instruction in its pass."""

    key: GraphKey
    params: tuple[int, ...]  # parameter units that it reads
    grads: tuple[int, ...]  # parameter units to whose gradients it adds


class Graphs(NamedTuple):
    turns: Mapping[int, Turn]  # by index in the program
    peaks: Mapping[tuple[int, int], int]  # (stage, set) -> the most bytes that it must hold
    beside: int  # the most bytes of activations that are in no set: messages that came, and what is kept

    @property
    def count(self) -> int:
        return len({turn.key for turn in self.turns.values()})

    @property
    def sets(self) -> int:
        """Bytes of all sets."""
        return sum(self.peaks.values())


def graphs(analysis: Analysis, position: int,
           transient: Callable[[Instruction], int] | None = None) -> Graphs:
    """The graphs of a position's train step. `transient`: bytes that an instruction holds beside its
    slots."""
    passes, ends, beside = _passes(analysis, position)
    free_at: dict[int, list[int]] = {}  # stage -> for each of its sets, the end of the last pass that had it
    variants: dict[Any, int] = {}
    used: set[tuple[int, int]] = set()  # (set, variant)
    turns: dict[int, Turn] = {}
    peaks: dict[tuple[int, int], int] = {}
    for (stage, microbatch), steps in passes.items():
        variant = variants.setdefault((stage, *(step.alike for step in steps)), len(variants))
        sets = free_at.setdefault(stage, [])
        free = [number for number, end in enumerate(sets) if end < steps[0].index]
        # first a set in which the graphs of this variant are
        number = min(free, key=lambda each: ((each, variant) not in used, each), default=len(sets))
        if number == len(sets):
            sets.append(0)
        sets[number] = ends[stage, microbatch]
        used.add((number, variant))
        turns |= {step.index: Turn(GraphKey(step.item.op, step.item.unit, stage, number, variant),
                                   step.params, step.grads) for step in steps}
        peak = _peak(steps, analysis.table, transient or (lambda _: 0))
        peaks[stage, number] = max(peaks.get((stage, number), 0), peak)
    return Graphs(turns, peaks, beside)


class _Step(NamedTuple):
    """A compute instruction of a pass."""

    index: int
    item: Instruction
    effect: Effects
    params: tuple[int, ...]
    grads: tuple[int, ...]
    alike: tuple[Any, ...]  # equal for instructions that may replay the same graph
    gone: tuple[Slot, ...]  # of what the pass has made: what has travelled since its last instruction


def _passes(analysis: Analysis, position: int) -> tuple[dict[tuple[int, int], list[_Step]],
                                                        dict[tuple[int, int], int], int]:
    """(stage, micro-batch) -> its compute instructions; and the last instruction that uses what they make.
    Then the most bytes of what is alive beside that."""
    table, links = analysis.table, analysis.links_at(PROGRAM, position)
    start = seam_of(table, position, PROGRAM)
    users = Users(table, start, analysis.buffers(position))
    passes: dict[tuple[int, int], list[_Step]] = {}
    ends: dict[tuple[int, int], int] = {}
    maker: dict[Slot, tuple[int, int]] = {}
    alive: defaultdict[tuple[int, int], set[Slot]] = defaultdict(set)  # what each pass has made
    gone: defaultdict[tuple[int, int], list[Slot]] = defaultdict(list)
    travels = table.handed
    begun = {slot for slot in start if slot.kind == SlotKind.WEIGHT_GRAD}  # gradients that have been added to
    outside: dict[Slot, int] = {}
    most = 0
    for index, (item, effect) in enumerate(zip(links.program, links.effects, strict=True)):
        params = [slot for slot in effect.reads if slot.kind == SlotKind.PARAM]
        memory = [users.buffers.get(slot) for slot in params]
        users.occupy(index, effect)
        if item.op in COMPUTE:
            which = table.units[item.unit].stage, item.microbatch
            grads = [slot for slot in effect.adds if slot.kind == SlotKind.WEIGHT_GRAD]
            memory += [users.buffers.get(slot) for slot in grads]
            needed = frozenset((slot.kind, slot.unit) for slot in alive[which])
            alike = item.op, item.unit, item.keep, needed, *memory, *(slot in begun for slot in grads)
            step = _Step(index, item, effect, _units(params), _units(grads), alike,
                         tuple(gone.pop(which, ())))
            passes.setdefault(which, []).append(step)
            ends[which] = index
            maker |= dict.fromkeys(_made(effect, table), which)
            alive[which].update(_made(effect, table))
            begun.update(grads)
        outside |= {slot: table.size(slot) for slot in (*effect.writes, *effect.adds)
                    if slot not in maker and slot.kind not in PARAMETER_KINDS and slot.tier == Tier.DEVICE}
        most = max(most, sum(outside.values()))
        for slot in (*effect.reads, *effect.frees):
            if slot in maker:
                ends[maker[slot]] = index
        for slot in effect.frees:
            outside.pop(slot, None)
            if slot in maker:
                alive[maker[slot]].discard(slot)
            if slot.kind in travels and item.op not in COMPUTE:
                gone[table.units[slot.unit].stage, slot.microbatch].append(slot)
        begun.difference_update(effect.frees)
    return passes, ends, most


def _units(slots: Sequence[Slot]) -> tuple[int, ...]:
    return tuple(slot.unit for slot in slots)


def _made(effect: Effects, table: Table) -> list[Slot]:
    """What an instruction makes in its set. What goes to the host, or to an arena, is copied out of it."""
    settings = table.activation
    copied = settings.offload or settings.contiguous
    elsewhere = (SlotKind.LOSS, SlotKind.KEPT) if copied else (SlotKind.LOSS,)
    return [slot for slot in (*effect.writes, *effect.adds)
            if slot.kind not in PARAMETER_KINDS and slot.kind not in elsewhere]


def _peak(steps: Sequence[_Step], table: Table, transient: Callable[[Instruction], int]) -> int:
    """The most bytes that a pass holds in its set."""
    alive: dict[Slot, int] = {}
    handed = table.handed
    peak = 0
    for step in steps:
        for slot in step.gone:
            alive.pop(slot, None)
        # What other ranks sent stays in the set until it is freed.
        alive |= {slot: table.size(slot) for slot in step.effect.reads
                  if slot not in alive and slot.kind in handed}
        # What comes from elsewhere is copied to its place in the set. (`saved` has the input of its unit.)
        copied = sum(table.size(slot) for slot in step.effect.reads
                     if slot not in alive and (slot.kind == SlotKind.GRAD or step.item.keep != "all")
                     and slot.kind not in PARAMETER_KINDS)
        alive |= {slot: table.size(slot) for slot in _made(step.effect, table)}
        peak = max(peak, sum(alive.values()) + copied + transient(step.item))
        for slot in step.effect.frees:
            alive.pop(slot, None)
    return peak

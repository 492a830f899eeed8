"""Links: what the slots of one program say of the order of its instructions, and the bytes that they take.

The slots of a micro-batch are used by the instructions of that micro-batch alone: in program order these are
its **strand**. What happens to its slots follows from the forms of its strand, and most micro-batches have
equal ones, so each kind of strand is followed once. The other slots (parameters, gradients) are **shared**:
they are followed through the whole program.

    program   F u1 m0   F u2 m0   F u1 m1   B u2 m0   B u1 m0   F u2 m1   B u2 m1   B u1 m1
    m0        F u1      F u2                B u2      B u1
    m1                            F u1                          F u2      B u2      B u1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from threed.program.access import Effects
from threed.program.forms import Form, Forms
from threed.program.instruction import Instruction, Slot
from threed.program.table import Table

Program = Sequence[Instruction]
Pair = tuple[int, int]  # (an instruction, a later one that uses what it has made)
Step = tuple[int, Effects]  # an index, and what happens there


class Strand(NamedTuple):
    """The micro-batches whose instructions have the same forms."""

    forms: tuple[Form, ...]
    indices: list[tuple[int, ...]]  # of each form, in the program: an index a micro-batch
    pairs: list[Pair]  # of places in `forms`


@dataclass
class Links:
    """The result of `link` for one program."""

    program: Program
    forms: list[Form]  # of each instruction
    strands: list[Strand]
    shared: list[Pair]  # of indices of the program
    alive: set[Slot]  # at the end
    faults: list[tuple[int, str]]  # (index, reason): reads of dead slots, double writes, ...

    def pairs(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Runs of pairs of instructions, of which the second uses the result of the first: all first ones,
        and all second ones."""
        yield [first for first, _ in self.shared], [then for _, then in self.shared]
        for strand in self.strands:
            for first, then in strand.pairs:
                yield strand.indices[first], strand.indices[then]

    @cached_property
    def effects(self) -> list[Effects]:
        """Of each instruction."""
        return [form.effect.of(item.microbatch) for item, form in zip(self.program, self.forms, strict=True)]

    @cached_property
    def producers(self) -> list[list[int]]:
        """For each instruction: the earlier instructions whose results it uses."""
        producers: list[list[int]] = [[] for _ in self.program]
        for firsts, thens in self.pairs():
            for first, then in zip(firsts, thens, strict=True):
                producers[then].append(first)
        return producers

    def split(self, mine: Callable[[Slot], bool] | None = None) -> tuple[list[list[Step]], list[Step]]:
        """What happens to slots of each strand (places in it), and to shared slots. `mine`: slots that are
        followed in their strand; others are shared, although they may be of a micro-batch."""
        parts = {form: (form.own, form.shared) if mine is None else form.effect.parts(mine)
                 for form in dict.fromkeys(self.forms)}
        strands = [[(place, own) for place, form in enumerate(strand.forms)
                    if (own := parts[form][0]) is not None] for strand in self.strands]
        shared = [(index, rest) for index, form in enumerate(self.forms)
                  if (rest := parts[form][1]) is not None]
        if mine is not None:
            shared = [(index, rest.of(self.program[index].microbatch)) for index, rest in shared]
        return strands, shared


def link(program: Program, table: Table, position: int, start: set[Slot]) -> Links:
    """Follow the slots of a program from those alive at its start, none of which is of a micro-batch."""
    known = Forms(table)
    try:
        forms, unknown = known.of(program, position), []
    except KeyError:
        forms, unknown = _known_forms(program, known, position)
    links = Links(program, forms, _strands(program, forms), [], set(), unknown)
    of_strands, shared = links.split()
    followed = follow(shared, start)
    within = [follow(steps, ()) for steps in of_strands]
    if unknown or followed.faults or any(each.faults for each in within):  # find them in program order
        followed = follow(enumerate(links.effects), start)
        return replace(links, shared=followed.pairs, alive=followed.alive,
                       faults=sorted(unknown + followed.faults, key=lambda fault: fault[0]))
    left = {slot._replace(microbatch=program[first].microbatch)
            for each, strand in zip(within, links.strands, strict=True) if each.alive
            for first in strand.indices[0] for slot in each.alive}
    strands = [strand._replace(pairs=each.pairs) for strand, each in zip(links.strands, within, strict=True)]
    return replace(links, strands=strands, shared=followed.pairs, alive=followed.alive | left)


def joined(before: Links, after: Links) -> Links:
    """The links of two programs one after the other, but for the pairs of shared slots."""
    count = len(before.program)
    moved = [strand._replace(indices=[tuple([index + count for index in row]) for row in strand.indices])
             for strand in after.strands]
    return Links((*before.program, *after.program), before.forms + after.forms, before.strands + moved, [],
                 after.alive, [])


def _known_forms(program: Program, known: Forms, position: int) -> tuple[list[Form], list[tuple[int, str]]]:
    """The forms of a program, and a fault for each instruction that has none."""
    forms, faults = [], []
    for index, item in enumerate(program):
        try:
            forms.append(known.form(item, position))
        except KeyError as error:
            faults.append((index, f"names something that does not exist: {error.args[0]}"))
            forms.append(Form(item, Effects("compute"), None, None))
    return forms, faults


def _strands(program: Program, forms: Sequence[Form]) -> list[Strand]:
    of: defaultdict[int, list[int]] = defaultdict(list)  # micro-batch -> its instructions
    for index, (item, form) in enumerate(zip(program, forms, strict=True)):
        if form.own is not None:
            of[item.microbatch].append(index)
    alike: defaultdict[tuple[Form, ...], list[list[int]]] = defaultdict(list)
    for indices in of.values():
        alike[tuple([forms[index] for index in indices])].append(indices)
    return [Strand(kinds, list(zip(*rows, strict=True)), []) for kinds, rows in alike.items()]


class Followed(NamedTuple):
    pairs: list[Pair]
    alive: set[Slot]  # at the end
    faults: list[tuple[int, str]]


def follow(steps: Iterable[Step], start: Iterable[Slot]) -> Followed:
    """Follow slots from those alive at the start."""
    made_by: dict[Slot, list[int]] = {slot: [] for slot in start}
    sealed: set[Slot] = set()
    pairs, faults = [], []
    for index, effect in steps:
        needs: list[int] = []
        for slot in effect.reads:
            if slot not in made_by:
                faults.append((index, f"reads '{slot}', which is not alive"))
            needs += made_by.get(slot, ())
            sealed.add(slot)
        for slot in effect.updates:
            if slot not in made_by:
                faults.append((index, f"updates '{slot}', which is not alive"))
            needs += made_by.get(slot, ())
            made_by[slot] = [index]
        for slot in effect.writes:
            if slot in made_by:
                faults.append((index, f"writes '{slot}', which is already alive"))
            made_by[slot] = [index]
        for slot in effect.adds:
            if slot in sealed:
                faults.append((index, f"adds to '{slot}' after it was used"))
            made_by.setdefault(slot, []).append(index)
        for slot in effect.frees:
            if slot not in made_by:
                if slot not in effect.reads:
                    faults.append((index, f"frees '{slot}', which is not alive"))
                continue
            del made_by[slot]
            sealed.discard(slot)
        pairs += [(need, index) for need in needs]
    return Followed(pairs, set(made_by), faults)


# ---------------------------------------------------------------- memory


Change = tuple[int, Iterable[int], bool]  # bytes, the instructions that change them, whether behind it


class Memory(NamedTuple):
    """Bytes alive on one rank over a program."""

    length: int  # of the program
    changes: dict[str, list[Change]]  # by kind of slot

    @property
    def by_kind(self) -> dict[str, list[int]]:
        """The bytes of each kind of slot, as from `total`."""
        return {kind: self.total(kind) for kind in self.changes}

    def total(self, *kinds: str) -> list[int]:
        """Bytes of slots of these kinds together (without arguments, of all kinds): [index] -> after that
        instruction's writes."""
        row = [0] * (self.length + 1)
        for kind in self.changes.keys() & kinds if kinds else self.changes:
            for size, indices, behind in self.changes[kind]:
                for index in indices:
                    row[index + behind] += size
        return list(accumulate(row[:-1]))

    def peak(self, *kinds: str) -> int:
        """The most bytes that slots of these kinds (without arguments, of all kinds) take together."""
        return max(self.total(*kinds), default=0)


def memory(program: Program, table: Table, links: Links, start: set[Slot]) -> Memory:
    """Follow the bytes of a program in issue order. What is freed is gone at the next instruction."""
    changes: defaultdict[str, list[Change]] = defaultdict(list)
    for slot in start:
        changes[slot.name].append((table.size(slot), (0,), False))
    of_strands, shared = links.split()
    for kind, size, index, freed in _sizes(shared, table, start):
        changes[kind].append((size, (index,), freed))
    for strand, steps in zip(links.strands, of_strands, strict=True):
        for kind, size, place, freed in _sizes(steps, table, ()):
            changes[kind].append((size, strand.indices[place], freed))
    return Memory(len(program), dict(changes))


def _sizes(steps: Iterable[Step], table: Table,
           start: Iterable[Slot]) -> Iterator[tuple[str, int, int, bool]]:
    """(kind of slot, bytes, index, whether they are freed there) of all slots that become alive or dead."""
    sizes = {slot: table.size(slot) for slot in start}
    for index, effect in steps:
        for slot in (*effect.writes, *effect.adds):
            if slot not in sizes:
                sizes[slot] = table.size(slot)
                yield slot.name, sizes[slot], index, False
        for slot in effect.frees:
            yield slot.name, -sizes.pop(slot, 0), index, True

"""Order: for which earlier instructions of other lanes each instruction waits. No torch.

An instruction waits for those whose results it uses, and for those that still use the memory into which it
writes. The engine waits for these and for nothing else, and the simulator lets the same overlap.

A slot that has memory of its own has the same for the whole run: its next value waits for the users of its
last one. A slot of a pool gets the buffer that was given back first: it waits for the users of the slot that
had it. Memory from the device's allocator may have been used by any computation before: a copy into it waits
for that.

Waits that follow from others are left out: a lane runs its jobs in order, and each instruction has waited for
whatever the instructions that it waits for have waited for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from threed.program.access import Effects
from threed.program.buffers import Buffers, pool_of, size_in
from threed.program.forms import Form
from threed.program.instruction import CARRIED, MESSAGES, Op, Slot, SlotKind, Tier
from threed.program.link import Links, Pair, Step, follow
from threed.program.table import Table


class Order(NamedTuple):
    """What the engine of a position must know of a program before it runs."""

    effects: list[Effects]
    waits: list[list[int]]  # for each instruction: the earlier ones of other lanes for which it waits
    jobs: frozenset[int]  # instructions that run on a lane beside the computation; messages run by themselves
    awaited: frozenset[int]  # instructions for which some other waits
    first: frozenset[int]  # the first job of each lane
    last: list[int]  # the last job of each lane: with them the program ends
    copies: dict[Slot, int]  # copy for a checkpoint -> its job, which may outlast the program

    @classmethod
    def of(cls, links: Links) -> Order:
        """The order of a program. `links`: as `run_links` returns them."""
        program, effects = links.program, links.effects
        jobs = [index for index, item in enumerate(program) if effects[index].lane != "compute"
                and item.op not in MESSAGES]
        copies = {slot: index for index in jobs for slot in effects[index].updates
                  if slot.kind == SlotKind.SNAPSHOT}
        ends = sorted({*jobs}.difference(copies.values()))
        last = {effects[index].lane: index for index in ends}
        first = {effects[index].lane: index for index in reversed(jobs)}
        awaited = frozenset(need for needs in links.producers for need in needs)
        return cls(effects, links.producers, frozenset(jobs), awaited, frozenset(first.values()),
                   sorted(last.values()), copies)


def run_links(links: Links, table: Table, start: set[Slot], pools: Buffers) -> Links:
    """Links of which the producers are all instructions that are waited for."""
    pairs = [(need, index) for index, needs in enumerate(waits(links, table, start, pools)) for need in needs]
    return replace(links, strands=[strand._replace(pairs=[]) for strand in links.strands], shared=pairs)


def simulated(links: Links, table: Table, start: set[Slot], pools: Buffers) -> Links:
    """Links of which the producers are those that are waited for, and a few of which nobody needs to know
    because others are waited for: what is alike for all micro-batches is found once. A walk is the same."""
    in_turn = pools.kept or pools.host_kept  # slots of different micro-batches take a buffer in turn
    of_strands, shared = links.split(
        (lambda slot: slot.microbatch >= 0 and pool_of(slot, table) is None) if in_turn else None)
    strands = []
    for strand, steps in zip(links.strands, of_strands, strict=True):
        found = strand.pairs, Users(table, set(), pools).follow(steps)
        strands.append(strand._replace(pairs=[*chain(*(_across(pairs, strand.forms) for pairs in found))]))
    steps = [*_ends_of_runs(shared)]
    found = (follow(steps, start).pairs, Users(table, start, pools).follow(steps), _by_allocator(links.forms))
    return replace(links, strands=strands,
                   shared=[*chain(*(_across(pairs, links.forms) for pairs in found))])


def _ends_of_runs(steps: Iterable[Step]) -> Iterator[Step]:
    """Steps without computations that use what one before and one after them use, where nothing changes
    in between: the order of the lane covers them."""
    run: dict[int, list[Step]] = {}  # since the last change: the first and the last that do the same
    for step in steps:
        effect = step[1]
        if effect.lane == "compute" and not (effect.writes or effect.updates or effect.frees):
            run[id(effect)] = [*run.get(id(effect), ())[:1], step]
            continue
        yield from sorted(each for ends in run.values() for each in ends)
        run.clear()
        yield step
    yield from sorted(each for ends in run.values() for each in ends)


def _across(pairs: Iterable[Pair], forms: Sequence[Form]) -> Iterator[Pair]:
    """Pairs, in the order of their second ones, without those that the order within lanes gives."""
    waited: dict[tuple[str, str], int] = {}  # (lane, other) -> the latest of the other that it has waited for
    for first, then in pairs:
        of_first, of_then = lanes = forms[first].effect.lane, forms[then].effect.lane
        # A message is sent from where the computation is, after what is computed before it.
        message = forms[then].item.op in MESSAGES
        if of_first not in (of_then, "compute" if message else of_then) and first > waited.get(lanes, -1):
            waited[lanes] = first
            yield first, then


def waits(links: Links, table: Table, start: set[Slot], pools: Buffers) -> list[list[int]]:
    """The instructions of other lanes for which each instruction waits."""
    memory = Users(table, start, pools)
    known = _Known([effect.lane for effect in links.effects])
    needs: list[set[int]] = [{*producers, *memory.occupy(index, effect)}
                             for index, (producers, effect) in enumerate(zip(links.producers, links.effects))]
    for need, index in _by_allocator(links.forms):
        needs[index].add(need)
    return [known.add(index, needs[index], item.op in MESSAGES) for index, item in enumerate(links.program)]


def _by_allocator(forms: Sequence[Form]) -> Iterator[Pair]:
    """Memory from the device's allocator may have been used by any computation before: a kept input comes
    back, and a tensor travels, after that. And kept inputs leave one at a time: behind a slow link they would
    pile up, in memory that no plan counts."""
    moves = {form for form in dict.fromkeys(forms)
             if (form.effect.lane in ("d2h", "h2d") and form.item.kind in (SlotKind.KEPT, SlotKind.KEPT_PART))
             or (form.item.op == Op.FETCH and form.item.kind in CARRIED)
             or ((form.item.of_slot or form.item.op == Op.EXCHANGE) and form.effect.lane != "compute")}
    computed = -1  # the latest instruction of the compute lane
    leaving = [-1, -1]  # the last two that take a kept input to the host
    for index, form in enumerate(forms) if moves else ():
        if form in moves and form.item.op != Op.OFFLOAD:
            if computed >= 0:
                yield computed, index
        elif form in moves:
            leaving = [leaving[-1], index]
        elif form.effect.lane == "compute":
            if leaving[0] >= 0:
                yield leaving[0], index
            computed = index


class PoolBuffer(NamedTuple):
    """A buffer of a pool."""

    pool: str
    numel: int
    number: int  # among those of its size, as they are when a program begins


class Users:
    """Which instructions still use a piece of memory when it gets its next value, and which buffer of a pool
    each slot has."""

    def __init__(self, table: Table, start: set[Slot], pools: Buffers):
        self.table = table
        counts = {name: sizes for name in pools.pools() if (sizes := getattr(pools, name))}
        self.sizes = {name: sorted(sizes) for name, sizes in counts.items()}
        # (pool, size) -> the free buffers, in the order of the pool, and the users of each
        self.free: dict[tuple[str, int], deque[tuple[PoolBuffer, list[int]]]] = {
            (name, numel): deque((PoolBuffer(name, numel, number), []) for number in range(count))
            for name, sizes in counts.items() for numel, count in sizes.items()}
        self.buffers: dict[Slot, PoolBuffer] = {}
        self.users: dict[Slot, list[int]] = {}  # of a slot's value, or of its last one
        self.alive = set(start)
        for slot in start:
            if (key := self._pool(slot)) is not None:
                self.buffers[slot], _ = self.free[key].popleft()

    def occupy(self, index: int, effect: Effects) -> list[int]:
        """Follow one instruction; returns the earlier ones that use what it writes."""
        before: list[int] = []
        users = self.users
        for slot in effect.updates:
            before += users.get(self._own(slot), ())
            before += users.pop(slot, ())  # if this is a part: its own readers
        for slot in (*effect.writes, *effect.adds):
            if slot not in self.alive and (key := self._pool(slot)) is not None:
                self.buffers[slot], last = self.free[key].popleft()
                before += last
            before += users.get(self._own(slot), ())
        changed = (*effect.updates, *effect.writes, *effect.adds)
        self.alive.update(changed)
        users.update((self._own(slot), [index]) for slot in changed)  # which has waited for the others
        for slot in effect.reads:  # a part may be read while GATHER writes the others
            users.setdefault(slot, []).append(index)
        for slot in effect.frees:
            self.alive.discard(slot)
            if effect.reads:  # RELEASE, which reads nothing, uses no memory either
                users.setdefault(self._own(slot), []).append(index)
            if (buffer := self.buffers.pop(slot, None)) is not None:
                self.free[buffer.pool, buffer.numel].append((buffer, users.pop(slot, [])))
        return before

    def follow(self, steps: Iterable[Step]) -> Iterator[Pair]:
        """Pairs of an instruction and of a later one that writes what it uses."""
        for index, effect in steps:
            for user in self.occupy(index, effect):
                yield user, index

    def _own(self, slot: Slot) -> Slot:
        """The slot whose memory this one's is a part of: a shard of parameters that stay whole, and a
        gradient that waits for its STEP where it is. Weights that the host has stepped are where they live on
        the device if the two have one memory."""
        table = self.table
        if slot.kind == SlotKind.PARAM_SHARD and (home := table.shards.weight(slot.unit)).tier == Tier.DEVICE:
            return home._replace(kind=SlotKind.PARAM) if table.parameters[slot.unit].whole else home
        if slot.kind == SlotKind.PREVIOUS_GRAD and slot.tier == table.shards.gradient(slot.unit).tier:
            inside = table.shards.in_place(slot.unit)
            return slot._replace(kind=SlotKind.WEIGHT_GRAD if inside else SlotKind.GRAD_SHARD)
        return slot

    def _pool(self, slot: Slot) -> tuple[str, int] | None:
        """The pool of a slot and the size of its buffers; None where the slot has memory of its own."""
        name = pool_of(slot, self.table) if self.sizes else None
        if name is None:
            return None
        sizes = self.sizes[name]
        return name, sizes[bisect_left(sizes, size_in(slot, name, self.table))]


class _Known:
    """What each lane has waited for so far."""

    def __init__(self, lanes: Sequence[str]):
        self.lanes = lanes
        self.of: dict[str, dict[str, int]] = {}  # lane -> lane -> the latest of it that has ended
        self.at: list[dict[str, int]] = []  # the same, when each instruction began
        self.received: set[int] = set()

    def add(self, index: int, needs: Iterable[int], message: bool) -> list[int]:
        """What the next instruction must wait for, of what it needs. A message is sent from where the
        computation is, after what is computed before it."""
        lane = "compute" if message else self.lanes[index]
        known = self.of.get(lane, _NOTHING)
        latest: dict[str, int] = {}
        waited = []
        for need in needs:
            other = self.lanes[need]
            if other.startswith("recv"):  # each message has a handle of its own
                if need not in self.received:
                    self.received.add(need)
                    waited.append(need)
            elif other != lane and need > max(latest.get(other, -1), known.get(other, -1)):
                latest[other] = need
        for need in sorted(latest.values(), reverse=True):
            other = self.lanes[need]
            if need > known.get(other, -1):
                waited.append(need)
                before = {**self.at[need], other: need}
                known = known | {each: at for each, at in before.items() if at > known.get(each, -1)}
        if not message:
            self.of[lane] = known
        self.at.append(known)
        return sorted(waited)


_NOTHING: dict[str, int] = {}

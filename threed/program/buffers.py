"""Buffers are allocated once and reused: how many of each size a position needs. No torch.

Values that live for only a part of the step take their buffers from pools: gathered parameters (ZeRO-3),
gradients that are reduced during backward (ZeRO-2 and 3), kept inputs, and values on their way between tiers.
A buffer has the size of its value, so units of one size share buffers. Gathered parameters and gradients may
also use a larger buffer than they need, where this takes less memory than buffers of their own: tiles of a
layer differ by a norm or a bias, and are not all alive at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from threed.base.quantity import ALIGNMENT, round_up
from threed.program.instruction import CARRIED, Op, Slot, SlotKind, Tier
from threed.program.link import Links, Program
from threed.program.table import Table
from threed.program.turning import travels

PIECE = 1 << 22  # elements of a gradient that are added at a time to a sum on the host
Sizes = dict[int, int]  # elements of a buffer (or bytes, as it says) -> how many of that size


class Buffers(NamedTuple):
    params: Sizes  # gathered parameters
    grads: Sizes  # gradients before their reduction
    pshards: Sizes  # this rank's part of parameters that live on another tier
    gshards: Sizes  # this rank's part of gradients that go to the host after each reduction
    kept: Sizes  # the arena of kept inputs
    host_kept: Sizes  # kept inputs on the host
    host_weights: Sizes  # parameters on their way between the host and another tier
    host_states: Sizes  # optimizer state on its way between the host and the disk (bytes)
    host_grads: Sizes  # this rank's part of gradients on their way to the host's step
    host_matrices: Sizes  # what the host has begun to step, and what was turned, on their way (bytes)
    staging: int  # bytes of the one buffer in which gradients arrive, or are cast
    adding: int  # elements of a buffer of the host in which a piece arrives, to be added to a sum there
    packing: int  # bytes of a buffer of the host in which an update of matrices is made, before it is packed

    @classmethod
    def pools(cls) -> list[str]:
        """The names of those that have sizes: not of the buffers of which there is one."""
        return [name for name in cls._fields if name not in ("staging", "adding", "packing")]

    def bytes(self, table: Table) -> int:
        """Bytes on the device, without the arena, whose content counts as activations."""
        return (sum(map(_elements, (self.params, self.pshards))) * table.elements.param
                + sum(map(_elements, (self.grads, self.gshards))) * table.elements.grad + self.staging)

    def host_bytes(self, table: Table) -> int:
        elements = _elements(self.host_kept) + _elements(self.host_weights)
        grads = _elements(self.host_grads) + self.adding
        return (elements * table.elements.param + grads * table.elements.grad
                + _elements(self.host_states) + _elements(self.host_matrices) + self.packing)


def _elements(sizes: Sizes) -> int:
    return sum(numel * count for numel, count in sizes.items())


def count_buffers(table: Table, position: int, links: Sequence[Links]) -> Buffers:
    """The buffers that a rank of a position needs over all programs of a plan. `links`: of each program."""
    held = table.stepped(position)
    # the sets of sizes that are alive together
    taken: dict[str, set[tuple[tuple[int, int], ...]]] = {"params": set(), "grads": set()}
    most: dict[str, Counter[int]] = {name: Counter() for name in Buffers.pools()}
    for linked in links:
        alive: dict[str, Counter[int]] = {name: Counter() for name in most}
        inside: set[tuple[Slot, int]] = set()  # a slot of a form, micro-batch
        for microbatch, (comes, goes) in _pooled(linked, table):
            for slot, name, size in comes:
                own = slot, microbatch if slot.microbatch >= 0 else -1
                if own not in inside:
                    inside.add(own)
                    alive[name][size] += 1
                    if name in taken:
                        taken[name].add(tuple(alive[name].items()))
                    else:
                        most[name][size] = max(most[name][size], alive[name][size])
            for slot, name, size in goes:
                own = slot, microbatch if slot.microbatch >= 0 else -1
                if own in inside:
                    inside.discard(own)
                    alive[name][size] -= 1
    # One more gradient of a size than are alive: the next is added up while the last is still on its way.
    units = {name: Counter(size_in(Slot(kind, unit), name, table) for unit in some)
             for name, kind, some in (("params", SlotKind.PARAM, table.held(position)),
                                      ("grads", SlotKind.WEIGHT_GRAD, held))}
    parts = Counter(table.shards.numel(unit) for unit in held)
    for name in ("gshards", "host_grads"):
        most[name] = Counter({numel: min(count + 1, parts[numel]) for numel, count in most[name].items()})
    shared = {name: shared_sizes(times, units[name], spare=name == "grads") for name, times in taken.items()}
    return Buffers(**{name: dict(sizes) for name, sizes in most.items()} | shared,
                   staging=staging_bytes(table, held), adding=_adding(table, links),
                   packing=max((table.size(slot) for unit in held
                                if travels(slot := Slot(SlotKind.UPDATE, unit), table)), default=0))


_Pooled = tuple[Slot, str, int]  # a slot, its pool and the size of its buffer


def _pooled(links: Links, table: Table) -> Iterator[tuple[int, tuple[list[_Pooled], list[_Pooled]]]]:
    """The micro-batch of an instruction, and the slots of its form in pools that become alive, or dead."""
    def pooled(*slots: Slot) -> list[_Pooled]:
        return [(slot, name, size_in(slot, name, table)) for slot in slots
                if (name := pool_of(slot, table)) is not None]

    parts = {}
    for form in dict.fromkeys(links.forms):
        effect = form.effect
        if any(part := (pooled(*effect.writes, *effect.adds), pooled(*effect.frees))):
            parts[form] = part
    for item, form in zip(links.program, links.forms, strict=True) if parts else ():
        if (part := parts.get(form)) is not None:
            yield item.microbatch, part


def shared_sizes(taken: Collection[tuple[tuple[int, int], ...]], units: Counter[int], spare: bool) -> Sizes:
    """The buffers that take the least memory: each run of neighbouring sizes uses buffers of its largest
    size, as many as are in use at a time. `taken`: (size, how many) at each time. `units`: size -> units of
    that size; no more buffers are needed."""
    sizes = sorted({numel for time in taken for numel, _ in time})
    best: list[tuple[int, Sizes]] = [(0, {})]  # of the smallest sizes: elements, buffers
    for stop in range(1, len(sizes) + 1):
        options = []
        for start in range(stop - 1, -1, -1):
            among = sizes[start:stop]
            count = max(sum(count for numel, count in time if numel in among) for time in taken)
            count = min(count + spare, sum(units[numel] for numel in among))
            elements, rest = best[start]
            options.append((elements + count * among[-1], {**rest, among[-1]: count}))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]


def pool_of(slot: Slot, table: Table) -> str | None:
    """The pool of a slot; None where the slot has memory of its own."""
    kind, on_host = slot.kind, slot.tier == Tier.HOST
    if kind in (SlotKind.KEPT, SlotKind.KEPT_PART):
        if not table.keeps_stream(slot.unit):
            return None
        settings = table.activation
        input_kind = SlotKind.KEPT_PART if settings.partition else SlotKind.KEPT
        arena = settings.contiguous and not settings.offload and kind == input_kind
        return "host_kept" if on_host else "kept" if arena else None
    if slot.tier == Tier.DISK:
        return None
    if kind == SlotKind.PARAM and not on_host and not table.parameters[slot.unit].whole:
        return "params"
    if kind == SlotKind.WEIGHT_GRAD and not table.shards.in_place(slot.unit):
        return "grads"
    if kind in (SlotKind.GRAD_SHARD, SlotKind.PREVIOUS_GRAD):
        streams = table.shards.streams(slot.unit)
        return (None if streams else "host_grads") if on_host else "gshards" if streams else None
    if kind in (SlotKind.PARAM, SlotKind.PARAM_SHARD) and slot != table.shards.weight(slot.unit):
        return "host_weights" if on_host else "pshards" if kind == SlotKind.PARAM_SHARD else None
    if on_host and kind in CARRIED:
        return "host_matrices"
    comes = kind == SlotKind.STATE and on_host and slot != table.shards.state(slot.unit)
    return "host_states" if comes else None


def size_in(slot: Slot, name: str, table: Table) -> int:
    """Elements of a slot's buffer in a pool (bytes, of optimizer state and of matrices)."""
    if name == "host_matrices":
        return table.size(slot)
    if name == "host_states":
        return round_up(table.size(slot), ALIGNMENT)
    if name == "host_weights":
        return round_up(table.size(slot), ALIGNMENT) // table.elements.param
    if name == "grads":
        return table.parameters[slot.unit].numel
    if name in ("params", "pshards"):
        numel = table.parameters[slot.unit].numel if name == "params" else table.shards.numel(slot.unit)
        return _in_pool(numel, slot.unit, table)
    if name in ("kept", "host_kept"):
        return table.size(slot) // table.elements.param
    return table.shards.numel(slot.unit)


def _in_pool(numel: int, unit: int, table: Table) -> int:
    """Elements, of those of a pool of weights, for so many weights of a parameter unit."""
    return numel * table.shards.param_bytes(unit) // table.elements.param


def staging_bytes(table: Table, held: Collection[int]) -> int:
    """Bytes of the staging buffer of parameter units that train: every part of a gradient arrives before the
    sum is taken, and a gradient that travels in another dtype is cast first."""
    if not any(step.staged and step.ranks > 1 for unit in held for step in table.shards.reductions(unit)):
        return 0
    times = 1 if table.elements.reduce == table.elements.grad else 2
    return max((table.parameters[unit].numel for unit in held), default=0) * table.elements.reduce * times


def _adding(table: Table, links: Sequence[Links]) -> int:
    """Elements of the buffer in which a gradient arrives, a piece at a time, to be added to what the host has
    of it from earlier in the step: 0 where every gradient goes to the host once."""
    sizes = (table.shards.numel(unit) for linked in links
             for unit, count in lowered(table, linked.program).items() if count > 1)
    return 2 * min(PIECE, max(sizes, default=0))  # one is added while the next arrives


def lowered(table: Table, program: Program) -> Counter[int]:
    """Parameter unit -> how often a reduced part of its gradient goes to the host in a program, of units
    whose parts are added up there."""
    if not any(map(table.shards.streams, table.parameters)):  # a program is long
        return Counter()
    return Counter(item.unit for item in program
                   if item.op == Op.OFFLOAD and item.kind == SlotKind.GRAD_SHARD
                   and table.shards.streams(item.unit))

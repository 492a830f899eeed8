"""Shards: what a rank has of each parameter unit: a shard of the weights, of the optimizer's state and of the
reduced gradient. Their slots, their bytes, and the tiers on which they live."""

from __future__ import annotations

from dataclasses import dataclass

from threed.base.quantity import BYTES
from threed.optim.base import Buffer
from threed.optim.registry import any_called
from threed.program.entries import ParameterUnit, Reduction
from threed.program.instruction import OF_MATRICES, Slot, SlotKind, Tier
from threed.program.settings import Elements, UpdateSettings, ZeroSettings


@dataclass(frozen=True)
class Shards:
    """Of a Table. Each `unit` is the number of a parameter unit."""

    units: dict[int, ParameterUnit]
    elements: Elements
    zero: ZeroSettings
    update: UpdateSettings
    num_microbatches: int

    def reductions(self, unit: int) -> tuple[Reduction, ...]:
        """The reductions of the gradient, in order; none for a unit that does not exist."""
        return self.units[unit].reductions if unit in self.units else ()

    def is_cut(self, unit: int) -> bool:
        """Whether the weights are cut over the shard group, and gathered."""
        held = self.units[unit]
        return self.zero.sharded and (held.trains or not held.whole)

    def numel(self, unit: int) -> int:
        """Elements that a rank steps, or keeps of a frozen unit."""
        held = self.units[unit]
        return held.numel // (held.shards if self.is_cut(unit) else 1)

    def param_bytes(self, unit: int) -> int:
        """Bytes of an element, as compute reads it."""
        return BYTES.get(self.units[unit].dtype, self.elements.param)

    def buffers(self, unit: int) -> tuple[Buffer, ...]:
        """The tensors of the optimizer."""
        own = self.units[unit].optimizer
        return any_called(own).buffers if own else self.update.buffers

    def kept_kinds(self, unit: int) -> int:
        """Tensors that a checkpoint saves for a parameter: its weight and the optimizer's buffers."""
        return 1 + len(self.buffers(unit))

    def has_master(self, home: Tier, unit: int) -> bool:
        """Whether STEP, on a tier, updates an fp32 copy of the weights."""
        return home != Tier.DEVICE or (self.update.master and self.param_bytes(unit) < 4)

    def state_bytes(self, home: Tier, unit: int) -> int:
        """Bytes of optimizer state for an element, on a tier: the buffers, and the fp32 master where this is
        a separate copy."""
        master = 4 if self.has_master(home, unit) else 0
        return sum(BYTES[buffer.dtype] for buffer in self.buffers(unit)) + master

    def weight(self, unit: int) -> Slot:
        """The slot of the weights that stays from step to step, and that STEP updates."""
        kind = SlotKind.PARAM_SHARD if self.is_cut(unit) else SlotKind.PARAM
        return Slot(kind, unit, tier=self.units[unit].weight_home)

    def state(self, unit: int) -> Slot:
        """The slot of the optimizer's state."""
        return Slot(SlotKind.STATE, unit, tier=self.units[unit].state_home)

    def gradient(self, unit: int) -> Slot:
        """The reduced gradient, as CLIP reads it."""
        return Slot(SlotKind.GRAD_SHARD, unit, tier=Tier.HOST if self.streams(unit) else Tier.DEVICE)

    def away(self, unit: int) -> bool:
        """Whether the optimizer's state is off the device: the host steps the unit."""
        return self.units[unit].state_home != Tier.DEVICE

    def streams(self, unit: int) -> bool:
        """Whether each reduced part of a gradient goes to the host at once and is added up there. (A gradient
        that is still to be summed over other groups is added up on the device.)"""
        held = self.units[unit]
        return (self.zero.streams and self.away(unit) and self.zero.stage >= 2
                and held.reductions[-1].group == held.shard_group)

    def adds_on_host(self, unit: int) -> bool:
        """Whether several parts of a gradient go to the host, which adds them up."""
        return self.streams(unit) and self.zero.reduce_every < self.num_microbatches

    def in_place(self, unit: int) -> bool:
        """Whether the reduced gradient is a part of the whole one, which has memory of its own and is reduced
        once a step. From ZeRO-2 on a part is smaller than the whole, and gets its own memory, unless one rank
        keeps all of it."""
        held = self.units[unit]
        return self.zero.stage < 2 or (self.away(unit) and held.shards == 1 and not self.streams(unit))

    def size(self, slot: Slot) -> int:
        """Bytes of a slot of a parameter unit on one rank."""
        unit = self.units[slot.unit]
        if slot.kind == SlotKind.PARAM:
            return unit.numel * self.param_bytes(slot.unit)
        if slot.kind == SlotKind.PARAM_SHARD:  # that of a unit that stays whole is a part of its buffer
            inside = unit.whole and slot.tier == Tier.DEVICE
            return 0 if inside else self.numel(slot.unit) * self.param_bytes(slot.unit)
        if slot.kind == SlotKind.STATE:
            return self.numel(slot.unit) * self.state_bytes(slot.tier, slot.unit)
        if slot.kind == SlotKind.WEIGHT_GRAD:
            return unit.numel * self.elements.grad
        # A snapshot is fp32; at every ZeRO stage, each rank of one shard group copies its part of it.
        if slot.kind == SlotKind.SNAPSHOT:
            return unit.numel // unit.shards * 4 * self.kept_kinds(slot.unit)
        if unit.turning is not None and slot.kind in OF_MATRICES:
            elements = {SlotKind.UPDATE: unit.numel // unit.shards, SlotKind.DIRECTION: self.numel(slot.unit)}
            return elements.get(SlotKind(slot.kind), unit.turning.owned) * unit.turning.element
        return self.numel(slot.unit) * self.elements.grad

"""The handlers of OFFLOAD and FETCH: copies between the device, the host and the disk, beside computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from threed.comm.group import Comm
from threed.comm.lanes import Job, copy
from threed.devices import device_of
from threed.program.buffers import Buffers
from threed.program.instruction import Instruction, Op, Slot, Tier
from threed.program.slots import Slots
from threed.program.table import Table
from threed.tensor.pool import Pool


class Offloaded(Protocol):
    """The part of a parameter unit's interface that moves data between tiers. zero.state.UnitState implements
    and documents it."""

    def lower_gradient(self) -> Job: ...
    def raise_weights(self, slot: Slot, brought: torch.Tensor | None) -> tuple[torch.Tensor, Job]: ...
    def write_state(self) -> Job: ...
    def write_weights(self, buffer: torch.Tensor) -> Job: ...
    def room_for_state(self) -> torch.Tensor: ...
    def room_for_weights(self) -> torch.Tensor: ...
    def read(self, name: str, into: torch.Tensor) -> None: ...
    def take_snapshot(self, waiting: bool) -> Job | None: ...


class OffloadRun:
    def __init__(self, comm: Comm, table: Table, buffers: Buffers, dtype: torch.dtype,
                 states: Mapping[int, Offloaded]):
        self.comm, self.table, self.states = comm, table, states
        self.kept = Pool(buffers.host_kept, dtype, torch.device("cpu"),
                         pinned=device_of(comm.device).asynchronous)
        self.handlers: dict[Op, Callable[[Instruction, Slots], Job | None]] = {Op.OFFLOAD: self.offload,
                                                                               Op.FETCH: self.fetch}

    def offload(self, instruction: Instruction, slots: Slots) -> Job | None:
        here = instruction.slot
        if here.kind in ("kept", "kpart"):
            return self._keep_on_host(here, slots)
        state = self.states[here.unit]
        if here.kind == "snapshot":
            return state.take_snapshot(instruction.age == "prev")
        slots.put(here.below, True)
        if here.kind == "gshard":
            return state.lower_gradient()
        return state.write_state() if here.kind == "state" else state.write_weights(slots.get(here))

    def fetch(self, instruction: Instruction, slots: Slots) -> Job:
        here = instruction.slot
        if here.kind in ("kept", "kpart"):
            return self._bring_back(here, slots)
        state = self.states[here.unit]
        if here.tier == Tier.DEVICE:
            brought = None if here.below == self.table.weight(here.unit) else slots.get(here.below)
            value, job = state.raise_weights(here, brought)
            slots.put(here, value)
            return job
        name = "state" if here.kind == "state" else "weights"
        buffer = state.room_for_state() if name == "state" else state.room_for_weights()
        slots.put(here, buffer)
        return lambda: state.read(name, buffer)

    def _keep_on_host(self, here: Slot, slots: Slots) -> Job:
        value = slots.get(here)
        away = self.kept.take(value.numel()).view(value.shape)
        slots.put(here.below, away)
        return lambda: copy(away, value)

    def _bring_back(self, here: Slot, slots: Slots) -> Job:
        away = slots.get(here.below)
        value = torch.empty(away.shape, dtype=away.dtype, device=self.comm.device)
        self.kept.give(away)
        slots.put(here, value)
        return lambda: copy(value, away)

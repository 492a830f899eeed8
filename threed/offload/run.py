"""The handlers of OFFLOAD and FETCH: copies between the device, the host and the disk, beside computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from threed.comm import Comm
from threed.lanes import Handle, Lane, copy
from threed.pool import Pool
from threed.program.buffers import Buffers
from threed.program.instruction import Instruction, Op, Slot, Tier
from threed.program.table import Table
from threed.slots import Slots


class Offloaded(Protocol):
    """The part of a parameter unit's interface that moves data between tiers. zero.state.UnitState implements
    and documents it."""

    def lower_gradient(self, lane: Lane) -> Handle: ...
    def raise_weights(self, slot: Slot, brought: torch.Tensor | None,
                      lane: Lane) -> tuple[torch.Tensor, Handle]: ...
    def write_state(self, lane: Lane) -> Handle: ...
    def write_weights(self, buffer: torch.Tensor, lane: Lane) -> Handle: ...
    def room_for_state(self) -> torch.Tensor: ...
    def room_for_weights(self) -> torch.Tensor: ...
    def read(self, name: str, into: torch.Tensor) -> None: ...
    def take_snapshot(self, waiting: bool, lane: Lane) -> Handle | None: ...


class OffloadRun:
    def __init__(self, comm: Comm, table: Table, buffers: Buffers, dtype: torch.dtype,
                 states: Mapping[int, Offloaded]):
        self.comm, self.table, self.states = comm, table, states
        self.kept = Pool(buffers.host_kept, dtype, torch.device("cpu"), pinned=comm.device.type == "cuda")
        self._leaving = Handle(None)
        self.handlers: dict[Op, Callable[[Instruction, Slots], None]] = {Op.OFFLOAD: self.offload,
                                                                         Op.FETCH: self.fetch}

    def offload(self, instruction: Instruction, slots: Slots) -> None:
        here, lane = instruction.slot, self.comm.lane
        if here.kind in ("kept", "kpart"):
            self._keep_on_host(here, slots)
            return
        state = self.states[here.unit]
        if here.kind == "snapshot":
            on_device = self.table.state(here.unit).tier == Tier.DEVICE
            handle = state.take_snapshot(instruction.age == "prev",
                                         lane("d2h") if on_device else self.comm.host_lane())
            if handle is not None:  # None: another rank has the same values, and writes them
                slots.put(here.below, True, handle)
        elif here.kind == "gshard":
            slots.put(here.below, True, state.lower_gradient(lane("d2h")))
        elif here.kind == "state":
            slots.put(here.below, True, state.write_state(lane("write")))
        else:
            slots.put(here.below, True, state.write_weights(slots.get(here), lane("write")))

    def fetch(self, instruction: Instruction, slots: Slots) -> None:
        here = instruction.slot
        if here.kind in ("kept", "kpart"):
            self._bring_back(here, slots)
            return
        state = self.states[here.unit]
        if here.tier == Tier.DEVICE:
            brought = None if here.below == self.table.weight(here.unit) else slots.get(here.below)
            slots.put(here, *state.raise_weights(here, brought, self.comm.lane("h2d")))
            return
        name = "state" if here.kind == "state" else "weights"
        buffer = state.room_for_state() if name == "state" else state.room_for_weights()
        # On the host lane, since the buffer's old content may still be on its way to the device.
        slots.put(here, buffer, self.comm.host_lane("read").submit(lambda: state.read(name, buffer)))

    def _keep_on_host(self, here: Slot, slots: Slots) -> None:
        value = slots.get(here)
        # One at a time: behind a slow link tensors would pile up on the device, in memory that no plan
        # counts.
        self._leaving.wait()
        away = self.kept.take(value.numel()).view(value.shape)
        self._leaving = self.comm.lane("d2h").submit(lambda: copy(away, value))
        slots.put(here.below, away, self._leaving)

    def _bring_back(self, here: Slot, slots: Slots) -> None:
        away = slots.get(here.below)
        value = torch.empty(away.shape, dtype=away.dtype, device=self.comm.device)
        handle = self.comm.lane("h2d").submit(lambda: copy(value, away))
        self.kept.give(away, handle)
        slots.put(here, value, handle)

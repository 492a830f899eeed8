"""The handlers of OFFLOAD and FETCH: copies between the device, the host and the disk, beside computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from threed.comm.group import Comm
from threed.comm.lanes import Job, copy
from threed.devices import device_of
from threed.program.buffers import Buffers
from threed.program.instruction import CARRIED, Instruction, Op, Slot, SlotKind, Tier
from threed.program.slots import Slots
from threed.program.table import Table
from threed.tensor.pool import Pool


class OffloadedWeights(Protocol):
    """zero.weights.Weights."""

    def fetch(self) -> tuple[torch.Tensor, Job]: ...
    def refresh(self) -> tuple[torch.Tensor, Job]: ...
    def stage(self) -> tuple[torch.Tensor, Job]: ...
    def offload(self) -> Job: ...


class OffloadedGradient(Protocol):
    """zero.gradient.Gradient."""

    def offload(self) -> Job | None: ...


class OffloadedState(Protocol):
    """zero.optimizer_state.OptimizerState."""

    def fetch(self) -> tuple[torch.Tensor, Job]: ...
    def offload(self) -> Job: ...


class Offloaded(Protocol):
    """The parts of a parameter unit that move between tiers. zero.units.UnitState implements and documents
    them."""

    @property
    def weights(self) -> OffloadedWeights: ...
    @property
    def gradient(self) -> OffloadedGradient: ...
    @property
    def optimizer_state(self) -> OffloadedState: ...
    def take_snapshot(self) -> Job | None: ...


class OffloadRun:
    def __init__(self, comm: Comm, table: Table, buffers: Buffers, dtype: torch.dtype,
                 states: Mapping[int, Offloaded], matrices: Pool):
        """`matrices`: zero.storage.Storage.host_matrices."""
        self.comm, self.table, self.states, self.matrices = comm, table, states, matrices
        self.kept = Pool(buffers.host_kept, dtype, torch.device("cpu"),
                         pin=device_of(comm.device).asynchronous)

    def handlers(self) -> dict[Op, Callable[[Instruction, Slots], Job | None]]:
        return {Op.OFFLOAD: self.offload, Op.FETCH: self.fetch}

    def offload(self, instruction: Instruction, slots: Slots) -> Job | None:
        here = instruction.slot
        if (pool := self._pool(here)) is not None:
            return self._take_down(here, slots, pool)
        state = self.states[here.unit]
        if here.kind == SlotKind.SNAPSHOT:
            return state.take_snapshot()
        slots.put(here.below, True)
        if here.kind in (SlotKind.GRAD_SHARD, SlotKind.PREVIOUS_GRAD):
            return state.gradient.offload()
        return state.optimizer_state.offload() if here.kind == SlotKind.STATE else state.weights.offload()

    def fetch(self, instruction: Instruction, slots: Slots) -> Job:
        here = instruction.slot
        if (pool := self._pool(here)) is not None:
            return self._take_up(here, slots, pool)
        state = self.states[here.unit]
        if here.kind == SlotKind.STATE:
            value, job = state.optimizer_state.fetch()
        elif here.tier == Tier.HOST:
            value, job = state.weights.stage()
        elif here == self.table.shards.weight(here.unit):
            value, job = state.weights.refresh()
        else:
            value, job = state.weights.fetch()
        slots.put(here, value)
        return job

    def _pool(self, here: Slot) -> Pool | None:
        """The buffers of the host for what has no memory of its own on the device."""
        if here.kind in (SlotKind.KEPT, SlotKind.KEPT_PART):
            return self.kept
        return self.matrices if here.kind in CARRIED else None

    def _take_down(self, here: Slot, slots: Slots, pool: Pool) -> Job:
        value = slots.get(here)
        away = pool.take(value.numel(), value.dtype).view(value.shape)
        slots.put(here.below, away)
        return lambda: copy(away, value)

    def _take_up(self, here: Slot, slots: Slots, pool: Pool) -> Job:
        away = slots.get(here.below)
        value = torch.empty(away.shape, dtype=away.dtype, device=self.comm.device)
        pool.give(away)
        slots.put(here, value)
        return lambda: copy(value, away)

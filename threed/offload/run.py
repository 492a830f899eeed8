"""What OFFLOAD and FETCH do to tensors: copies between the device, the host and the disk, beside the computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from threed.comm import Comm, Handle
from threed.pool import Pool
from threed.program.buffers import Buffers
from threed.program.instruction import Instruction, Op, Slot, below, tier
from threed.program.table import Table
from threed.slots import Slots


class OffloadRun:
    def __init__(self, comm: Comm, table: Table, buffers: Buffers, dtype: torch.dtype, states: dict[int, Any]):
        """`states`: of parameter units (zero.state.UnitState)."""
        self.comm, self.table, self.states = comm, table, states
        self.kept = Pool(buffers.host_kept, dtype, torch.device("cpu"), pinned=comm.device.type == "cuda")
        self._leaving = Handle(None)
        self.handlers: dict[Op, Callable[[Instruction, Slots], None]] = {Op.OFFLOAD: self.offload, Op.FETCH: self.fetch}

    def offload(self, instruction: Instruction, slots: Slots) -> None:
        kind = instruction.group
        here = Slot(kind, instruction.unit, instruction.microbatch)
        if kind in ("kept", "kpart"):
            value = slots.get(here)
            self._leaving.wait()  # one at a time: behind a slow link they would pile up on the device, which no plan counts
            there = self.kept.take(value.numel()).view(value.shape)
            self._leaving = self._copy("d2h", there, value)
            slots.put(below(here), there, self._leaving)
        elif kind == "snapshot":
            state, waiting = self.states[instruction.unit], instruction.keep == "later"
            if state.snapshot is not None:  # else another rank has the same, and writes it
                state.begin_snapshot()
                submit = self.comm.lane("d2h").submit if state.unit.state_home == "device" else self.comm.host
                slots.put(below(here), True, submit(lambda: state.take_snapshot(waiting)))
        elif kind == "gshard":
            self._gradient_down(instruction.unit, slots)
        else:
            self._to_disk(here, slots)

    def fetch(self, instruction: Instruction, slots: Slots) -> None:
        kind = instruction.group
        here = Slot(kind, instruction.unit, instruction.microbatch)
        if kind in ("kept", "kpart"):
            there = slots.get(below(here))
            value = torch.empty(there.shape, dtype=there.dtype, device=self.comm.device)
            handle = self._copy("h2d", value, there)
            self.kept.give(there, handle)
            slots.put(here, value, handle)
        elif tier(kind) == "host":
            self._from_disk(here, slots)
        else:
            self._weights_up(here, slots)

    def _copy(self, lane: str, into: torch.Tensor, of: torch.Tensor) -> Handle:
        return self.comm.lane(lane).submit(lambda: copy(into, of))

    def _gradient_down(self, unit: int, slots: Slots) -> None:
        """A gradient of this step is added to what has come down before."""
        state = self.states[unit]
        gshard, host, add = state.gshard, state.host_grad, state.came_down
        if add and self.comm.device.type == "cuda":  # the sum is taken on the device, which the first part visits again
            handle = self.comm.lane("d2h").submit(lambda: copy(host, gshard + host.to(gshard.device, non_blocking=True)))
        else:
            handle = self.comm.lane("d2h").submit(lambda: host.add_(gshard)) if add else self._copy("d2h", host, gshard)
        state.came_down = True
        if self.table.streams(unit):
            state.storage.gshards.give(gshard, handle)
            state.gshard = None
        slots.put(Slot("host_gshard", unit), True, handle)

    def _weights_up(self, here: Slot, slots: Slots) -> None:
        """This rank's part of a unit's parameters, from the host: to where it lives, or for a GATHER."""
        state = self.states[here.unit]
        there = slots.get(below(here)) if below(here) != self.table.weight(here.unit) else state.pshard
        if here == self.table.weight(here.unit):
            value = state.pshard if here.kind == "pshard" else state.param
        else:
            value = state.storage.pshards.take(state.count)
        handle = self._copy("h2d", value, there[:state.count])
        if there is not state.pshard:
            state.storage.host_weights.give(there, handle)
        slots.put(here, value, handle)

    def _to_disk(self, here: Slot, slots: Slots) -> None:
        state = self.states[here.unit]
        if here.kind == "host_state":
            buffer, pool, name = state.bound, state.storage.host_states, f"p{here.unit}.state"
        else:
            buffer, pool, name = slots.get(here), state.storage.host_weights, f"p{here.unit}.weights"
        handle = self.comm.lane("write").submit(lambda: state.storage.disk.write(name, buffer.view(torch.uint8)))
        pool.give(buffer, handle)
        if here.kind == "host_state":
            state.bind(None)
        slots.put(below(here), True, handle)

    def _from_disk(self, here: Slot, slots: Slots) -> None:
        state = self.states[here.unit]
        if here.kind == "host_state":
            buffer = state.storage.host_states.take(state.file_bytes(self.table.state_bytes("host")))
            state.bind(buffer)
            name = f"p{here.unit}.state"
        else:
            itemsize = self.table.param_bytes
            buffer = state.storage.host_weights.take(state.file_bytes(itemsize) // itemsize)
            name = f"p{here.unit}.weights"
        # What was in the buffer may still be on its way to the device.
        handle = self.comm.host(lambda: state.storage.disk.read(name, buffer.view(torch.uint8)), "read")
        slots.put(here, buffer, handle)


def copy(into: torch.Tensor, of: torch.Tensor) -> None:
    """A copy by the lane that runs this. The device's memory is not used for anything else before it is done."""
    into.copy_(of, non_blocking=True)
    for tensor in (into, of):
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())

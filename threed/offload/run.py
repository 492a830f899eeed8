"""What OFFLOAD and FETCH do to tensors: copies between the device and the host, beside the computation."""

from __future__ import annotations

from collections.abc import Callable

import torch

from threed.comm import Comm, Handle
from threed.pool import Pool
from threed.program.buffers import Buffers
from threed.program.instruction import Instruction, Op, Slot
from threed.slots import Slots


class OffloadRun:
    def __init__(self, comm: Comm, buffers: Buffers, dtype: torch.dtype):
        self.comm = comm
        self.host = Pool(buffers.host_kept, dtype, torch.device("cpu"), pinned=comm.device.type == "cuda")
        self._leaving = Handle(None)
        self.handlers: dict[Op, Callable[[Instruction, Slots], None]] = {Op.OFFLOAD: self.offload, Op.FETCH: self.fetch}

    def offload(self, instruction: Instruction, slots: Slots) -> None:
        _, unit, microbatch, kind, *_ = instruction
        here = slots.get(Slot(kind, unit, microbatch))
        self._leaving.wait()  # one at a time: behind a slow link they would pile up on the device, which the plan does not count
        there = self.host.take(here.numel()).view(here.shape)
        handle = self.comm.lane("d2h").submit(lambda: copy(there, here))
        self._leaving = handle
        slots.put(Slot(f"host_{kind}", unit, microbatch), there, handle)

    def fetch(self, instruction: Instruction, slots: Slots) -> None:
        _, unit, microbatch, kind, *_ = instruction
        there = slots.get(Slot(f"host_{kind}", unit, microbatch))
        here = torch.empty(there.shape, dtype=there.dtype, device=self.comm.device)
        handle = self.comm.lane("h2d").submit(lambda: copy(here, there))
        self.host.give(there, handle)
        slots.put(Slot(kind, unit, microbatch), here, handle)


def copy(into: torch.Tensor, of: torch.Tensor) -> None:
    """A copy by the lane that runs this. The device's memory is not used for anything else before it is done."""
    into.copy_(of, non_blocking=True)
    for tensor in (into, of):
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())

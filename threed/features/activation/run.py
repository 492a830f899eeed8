"""Kept inputs on the device: stored, cut over tp (RELEASE), gathered (GATHER). Messages are cut and gathered
in the same way."""

from __future__ import annotations

from collections.abc import Callable

import torch

from threed.comm.group import Comm
from threed.program.buffers import Buffers
from threed.program.instruction import PARTS, Instruction, Op, SlotKind
from threed.program.slots import Slots
from threed.program.table import Table
from threed.tensor.packing import PackedStream
from threed.tensor.pool import Pool


class ActivationRun:
    def __init__(self, comm: Comm, table: Table, buffers: Buffers, dtype: torch.dtype,
                 stream: Callable[[int], PackedStream]):
        """`stream`: unit -> what it hands to the next unit."""
        self.comm, self.table, self.stream = comm, table, stream
        self.arena = Pool(buffers.kept, dtype, comm.device)
        self.in_arena = bool(buffers.kept)

    def handlers(self) -> dict[Op, Callable[[Instruction, Slots], None]]:
        return {Op.RELEASE: self.release, Op.GATHER: self.gather}

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        """A unit's input, moved to where it is kept until RECOMPUTE: nothing else of the forward is kept."""
        return self._store(x) if self.in_arena and not self.table.activation.partition else x

    def give_back(self, x: torch.Tensor) -> torch.Tensor:
        """A kept input, copied out of the arena for RECOMPUTE: the unit's graph refers to it until
        BACKWARD."""
        return self._withdraw(x) if self.in_arena and not self.table.activation.partition else x

    def release(self, instruction: Instruction, slots: Slots) -> None:
        """[s, B, D], equal on all ranks of the group -> this rank's part of its elements."""
        kind = instruction.kind
        group = self.comm.groups[self.table.cut_over(kind)[0]]
        whole = slots.get(instruction.slot)
        part = whole.reshape(group.size(), -1)[group.rank()]
        slots.put(instruction.slot._replace(kind=PARTS[kind]),
                  self._store(part) if self.in_arena and kind == SlotKind.KEPT else part.clone())

    def gather(self, instruction: Instruction, slots: Slots) -> None:
        """All-gather the parts of all ranks of the group."""
        kind = instruction.kind
        group = self.comm.groups[self.table.cut_over(kind)[0]]
        part = slots.get(instruction.slot._replace(kind=PARTS[kind]))
        whole = part.new_empty(group.size() * part.numel())
        group.all_gather(whole, part.view(-1)).wait()
        if self.in_arena and kind == SlotKind.KEPT:
            self.arena.give(part)
        if kind != SlotKind.KEPT:
            whole = self.stream(instruction.unit).whole(whole)
        slots.put(instruction.slot, whole)

    def _store(self, x: torch.Tensor) -> torch.Tensor:
        return self.arena.take(x.numel()).view(x.shape).copy_(x)

    def _withdraw(self, x: torch.Tensor) -> torch.Tensor:
        copy = x.clone()
        self.arena.give(x)
        return copy

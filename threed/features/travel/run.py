"""The handlers of GATHER, REDUCE and EXCHANGE of a slot: a tensor of a micro-batch goes to other ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from threed.base.mesh import GROUPS
from threed.comm.group import Comm, Group
from threed.comm.lanes import Job
from threed.devices import device_of
from threed.program.handed import Move, move_of
from threed.program.instruction import Instruction, Op
from threed.program.slots import Late, Slots
from threed.program.table import Table


class TravelRun:
    def __init__(self, comm: Comm, table: Table):
        self.comm, self.table, self.device = comm, table, device_of(comm.device)

    def handlers(self) -> dict[Op, Callable[[Instruction, Slots], Job | None]]:
        return dict.fromkeys((Op.GATHER, Op.REDUCE, Op.EXCHANGE), self.move)

    def move(self, instruction: Instruction, slots: Slots) -> Job | None:
        """The job that takes a tensor to other ranks. How many rows come may be known only when it runs."""
        move, group = move_of(instruction, self.table), self.comm.groups[instruction.group]
        value, came = slots.get(move.source), Late()
        counts = [slots.late(slot) for slot in move.counts]
        slots.put(move.target, came)
        # What comes is freed by the computation: its memory is of that stream.
        stream = self.device.current_stream() if self.device.asynchronous else None

        def empty(rows: int) -> torch.Tensor:
            with self.device.on(stream) if stream is not None else nullcontext():
                return value.new_empty((rows, *value.shape[1:]))

        def job() -> None:
            came.value = _taken(move, instruction.op, group, value, [count() for count in counts], empty)
            for tensor in (value, came.value):
                self.device.in_use(tensor)

        if GROUPS[instruction.group].lane == "compute":
            job()
            return None
        return job


def _taken(move: Move, op: Op, group: Group, value: torch.Tensor, counts: list[Any],
           empty: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """What comes of the other ranks, when it is there (on a GPU: for the current stream)."""
    size, rows = group.size(), len(value)
    if op == Op.GATHER:
        whole = empty(size * rows)
        group.all_gather(whole, value.contiguous()).wait()
        return whole
    if op == Op.REDUCE:
        part = empty(rows // size)
        group.reduce_scatter(part, value.contiguous()).wait()
        return part
    gives, takes = [count.tolist() for count in counts] or [[rows // size] * size] * 2
    rows_in = empty(sum(takes))
    group.exchange(rows_in, value.contiguous(), gives, takes).wait()
    return rows_in

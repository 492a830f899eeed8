"""The handlers of GATHER, REDUCE and EXCHANGE of a slot: a tensor of a micro-batch goes to other ranks, as
the rows of tokens do to the ranks of their experts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from threed.base.errors import RunError
from threed.base.mesh import GROUPS
from threed.comm.group import Comm, Group
from threed.comm.lanes import Job
from threed.devices import device_of
from threed.features.travel.arrivals import Arrivals
from threed.program.entries import gradient_of
from threed.program.instruction import Instruction, Op, Slot
from threed.program.slots import Late, Slots
from threed.program.table import Table
from threed.program.trips import Trip, trip_of

Rows = tuple[list[int], list[int]]  # that a rank gives to each of a group, and takes of each


class TravelRun:
    def __init__(self, comm: Comm, table: Table):
        self.comm, self.table, self.device = comm, table, device_of(comm.device)
        self.arrivals = Arrivals(table)
        # What has left by counts -> its rows, which the host knows when its gradient comes back.
        self._rows: dict[Slot, Rows] = {}
        self._trips: dict[Instruction, Trip] = {}

    def handlers(self) -> dict[Op, Callable[[Instruction, Slots], Job | None]]:
        return {**dict.fromkeys((Op.GATHER, Op.REDUCE, Op.EXCHANGE), self.move),
                Op.RELEASE: lambda *_: None}  # the engine frees the slot

    def move(self, instruction: Instruction, slots: Slots) -> Job | None:
        """The job that takes a tensor to other ranks. How many rows come may be known only when it runs: on a
        GPU the host waits for the counts then."""
        trip, group = self._trips.get(instruction), self.comm.groups[instruction.group]
        if trip is None:
            trip = self._trips[instruction] = trip_of(instruction, self.table)
        value, came = slots.get(trip.source), Late()
        counts = [slots.late(slot) for slot in trip.counts]
        slots.put(trip.target, came)
        # What comes is freed by the computation: its memory is of that stream.
        stream = self.device.current_stream() if self.device.asynchronous else None

        def empty(rows: int) -> torch.Tensor:
            with self.device.on(stream) if stream is not None else nullcontext():
                return value.new_empty((rows, *value.shape[1:]))

        def job() -> None:
            came.value = self._taken(trip, instruction.op, group, value, counts, empty)
            for tensor in (value, came.value):
                self.device.in_use(tensor)

        if GROUPS[instruction.group].lane == "compute":
            job()
            return None
        return job

    def _taken(self, trip: Trip, op: Op, group: Group, value: torch.Tensor,
               counts: list[Callable[[], torch.Tensor]],
               empty: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """The tensor that arrives, complete (on a GPU: for the current stream)."""
        size = group.size()
        if not value.dim():
            raise self._wrong(trip, ", but it is a number and must have rows", f"{value.item():g}")
        gives, takes = self._counted(trip, counts, value, size) if op == Op.EXCHANGE else ([], [])
        if size == 1:
            return value.contiguous()
        if op == Op.GATHER:
            whole = empty(size * len(value))
            group.all_gather(whole, value.contiguous()).wait()
            return whole
        if op == Op.REDUCE:
            part = empty(len(value) // size)
            group.reduce_scatter(part, value.contiguous()).wait()
            return part
        came = empty(sum(takes))
        group.exchange(came, value.contiguous(), gives, takes).wait()
        return came

    def _counted(self, trip: Trip, counts: list[Callable[[], torch.Tensor]], value: torch.Tensor,
                 size: int) -> Rows:
        """The rows of an exchange. RunError if the counts do not match the tensor."""
        rows = len(value)
        if not counts:
            if rows % size:
                raise self._wrong(trip, f", equally many rows to each of {size} ranks: send a multiple, or "
                                  "say how many rows each gets (gives, takes)", f"{rows} rows")
            return [rows // size] * size, [rows // size] * size
        if trip.back:
            takes, gives = self._rows.pop(trip.target)
            return gives, takes
        known = []
        for (name, _), count in zip(trip.tensor.counts, counts, strict=True):
            each = count().cpu()
            if not each.dim() or len(each) != size or each.dtype != torch.int64 or (each < 0).any():
                raise self._wrong(trip, f" by the counts '{name}', which must be {size} whole numbers "
                                  "of at least 0, one a rank of the group", f"they are {each.tolist()}")
            known.append(each.reshape(size, -1))
        gives, takes = (list(map(sum, each.tolist())) for each in known)
        if sum(gives) != rows:
            raise self._wrong(trip, ", but not as many rows as the counts say: send as many",
                              f"{rows} rows, and {gives} for the ranks are {sum(gives)},")
        self._rows[gradient_of(trip.source)] = gives, takes
        self.arrivals.add(trip, known[1], rows, value.itemsize * value.shape[1:].numel())
        return gives, takes

    def _wrong(self, trip: Trip, what: str, seen: str) -> RunError:
        """The error about the rows of a tensor that travels. Its first line is the same on every rank and
        micro-batch, so that a restart recognises a repeated failure."""
        return RunError(f"layer {self.table.units[trip.source.unit].name} sends '{trip.tensor.name}' over "
                        f"{trip.tensor.over}{what}\n  {seen} on rank {self.comm.rank} "
                        f"({self.comm.here}), in micro-batch {trip.source.microbatch}")

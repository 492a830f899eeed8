"""Groups of torch.distributed: gloo on a CPU, NCCL on GPUs."""

from __future__ import annotations

import datetime
import os
import pickle
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from threed.base.mesh import GROUPS, Mesh
from threed.comm.group import Channel, Comm, Group, sum_parts
from threed.comm.lanes import Handle, run_as_batch
from threed.devices import device_of

FEW_BYTES = 256  # gloo all-reduces so few by sending them to everybody; counted as other all-reduces are


class ProcessGroup(Group):
    """A group of torch.distributed."""

    def __init__(self, name: str, ranks: Sequence[int], me: int, sent: Counter[str], process_group: Any):
        super().__init__(name, ranks, me, sent)
        self.process_group = process_group

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Handle:
        if op == "sum" and tensor.nbytes <= FEW_BYTES and _by_gloo(tensor):
            # Gloo's ring takes 2 (n - 1) hops, each a fraction of a millisecond even for a few bytes; an
            # all-to-all takes one.
            parts = tensor.new_empty(self.size(), tensor.numel())
            copies = tensor.expand(self.size(), *tensor.shape).contiguous()
            work = dist.all_to_all_single(parts, copies.view_as(parts), group=self.process_group,
                                          async_op=True)

            def add() -> None:
                work.wait()  # pyright: ignore[reportOptionalMemberAccess]
                tensor.copy_(parts.sum(0).view_as(tensor))

            return Handle(add, (parts, copies))
        how = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        return _handle(dist.all_reduce(tensor, how, self.process_group, async_op=True), tensor)

    def _reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, add: bool,
                        scratch: torch.Tensor | None) -> Handle:
        flat = output.view(-1)
        if not _by_gloo(tensor):
            if not add and output.dtype == tensor.dtype:
                work = _single("reduce_scatter")(output, tensor, group=self.process_group, async_op=True)
                return _handle(work, output, tensor)
            part = tensor.new_empty(flat.shape) if scratch is None else scratch.view(-1)[:flat.numel()]
            work = _single("reduce_scatter")(part, tensor, group=self.process_group, async_op=True)

            def add_part() -> None:
                work.wait()
                flat.add_(part) if add else flat.copy_(part)

            return Handle(add_part, (output, tensor, part))
        # Gloo's reduce-scatter sends as much as an all-reduce; messages that are summed on arrival send half.
        parts = tensor.view(self.size(), -1)
        arrived = (torch.empty_like(tensor) if scratch is None
                   else scratch.view(-1)[:tensor.numel()]).view_as(parts)
        handle = self._messages(parts, arrived)

        def finish() -> None:
            handle.wait()
            sum_parts([parts[self._index], *(arrived[index] for index in self.others())], flat, add)

        return Handle(finish, (output, tensor, arrived))

    def _all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        if not _by_gloo(tensor):
            work = _single("all_gather")(output, tensor, group=self.process_group, async_op=True)
            return _handle(work, output, tensor)
        # Messages: gloo's all-gather makes a copy of everything, and takes twice the time.
        return self._messages(tensor.view(1, -1).expand(self.size(), -1), output.view(self.size(), -1),
                              own=True)

    def _exchange(self, output: torch.Tensor, tensor: torch.Tensor, gives: Sequence[int],
                  takes: Sequence[int]) -> Handle:
        # (The function of torch.distributed takes longer than the rest of this.)
        work = self.process_group.alltoall_base(output, tensor, list(takes), list(gives))
        return _handle(work, output, tensor)

    def _messages(self, parts: torch.Tensor, arrived: torch.Tensor, own: bool = False) -> Handle:
        """Send row i of `parts` to rank i of the group, whose message arrives in row i of `arrived`. `own`:
        copy this rank's row, too. (isend and irecv would look up the peer each time.)"""
        works: list[Any] = []
        for index in reversed(self.others()):
            works.append(self.process_group.recv([arrived[index]], index, 0))
        for index in self.others():
            works.append(self.process_group.send([parts[index]], index, 0))
        mine, target = parts[self._index], arrived[self._index]
        if own and mine.data_ptr() != target.data_ptr():
            target.copy_(mine)
        return Handle(lambda: [work.wait() for work in works], (parts, arrived))


def _single(name: str) -> Any:
    """The collective over one tensor: torch 2.13 calls it `*_single`, earlier ones `*_tensor` and
    `*_into_tensor`."""
    older = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}
    return getattr(dist, f"{name}_single", None) or getattr(dist, older[name])


def _by_gloo(tensor: torch.Tensor) -> bool:
    return device_of(tensor.device).backend == "gloo"


def _handle(work: Any, *keep: torch.Tensor) -> Handle:
    return Handle(work.wait, keep, work.is_completed)


class ProcessChannel(Channel):
    """A channel that calls the process group directly, as `_messages` does."""

    def __init__(self, sent: Counter[str], process_group: Any, peer: int):
        super().__init__(sent)
        self._group, self._peer = process_group, dist.get_group_rank(process_group, peer)

    def _send(self, tensor: torch.Tensor) -> Handle:
        return _handle(self._group.send([tensor], self._peer, 0), tensor)

    def recv(self, tensor: torch.Tensor) -> Handle:
        return _handle(self._group.recv([tensor], self._peer, 0), tensor)


def file_store(path: str, world_size: int) -> Any:
    """A store in a file, where the ranks of one machine meet."""
    return dist.FileStore(path, world_size)


class ProcessComm(Comm):
    """A rank of torch.distributed. `store` is where ranks meet."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device, timeout_s: float, store: Any):
        super().__init__(mesh, rank, device)
        self._timeout = timeout = datetime.timedelta(seconds=timeout_s)
        # On GPUs the host's tensors, those of `all_gather` and its like, travel in the world alone: another
        # group's gloo would connect its ranks for nothing. (None: as the world.)
        known = device_of(device)
        known.use()
        if known.backend == "gloo":
            backend, self._others = "gloo", None
            run_as_batch()  # before gloo starts its threads
        else:
            backend, self._others = f"cpu:gloo,{known.kind}:{known.backend}", known.backend
        with connecting_late():
            dist.init_process_group(backend, store=store, rank=rank, world_size=mesh.size, timeout=timeout)
        # Every rank names every group, in one order; only members connect. (torch can let members make a
        # group alone, but then names it by how many groups a rank has made, and ranks at the ends of a
        # pipeline make fewer.)
        for name, row in GROUPS.items():
            for ranks in mesh.groups(name) if row.lane and row.needed(mesh) else ():
                if len(ranks) == mesh.size and row.axes is None:
                    group = dist.group.WORLD
                else:
                    group = self._new_group(ranks) if len(ranks) > 1 else None
                if rank in ranks:
                    self.groups[name] = ProcessGroup(name, ranks, rank, self.sent, group)

    def _new_group(self, ranks: Sequence[int]) -> Any:
        return dist.new_group(list(ranks), self._timeout, self._others)

    def open_channels(self, pairs: Sequence[tuple[int, int, str]]) -> None:
        """Connect a plan's channels, given as (sender position, receiver position, kind): each its own
        communicator, so that nothing waits behind a message of another kind."""
        pipelines = self.mesh.groups("pp")
        for sender, receiver, kind in sorted(pairs):
            for pipeline in pipelines:
                ends = pipeline[sender], pipeline[receiver]
                group = self._new_group(sorted(ends))
                if self.rank in ends:
                    peer = ends[1] if self.rank == ends[0] else ends[0]
                    self.channels[sender, receiver, kind] = ProcessChannel(self.sent, group, peer)

    def all_gather(self, value: Any) -> list[Any]:
        # all_gather_object makes some tensors for each rank: half a second with 10,000.
        data = pickle.dumps(value)
        most = int(self.numbers(len(data)).max())
        everything = torch.empty(self.mesh.size, most, dtype=torch.uint8)
        with self._talking():
            own = torch.frombuffer(bytearray(data.ljust(most)), dtype=torch.uint8)
            _single("all_gather")(everything.view(-1), own)
        rows = memoryview(everything.numpy().tobytes())
        return [pickle.loads(rows[start:start + most]) for start in range(0, len(rows), most)]

    def numbers(self, number: float) -> torch.Tensor:
        values = torch.empty(self.mesh.size, dtype=torch.float64)
        with self._talking():
            _single("all_gather")(values, torch.tensor([number], dtype=torch.float64))
        return values

    def gather(self, value: Any) -> list[Any] | None:
        # Messages: gather_object has all ranks send as much as the largest value.
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self.numbers(0 if value is None else len(data))
        if self.rank != 0:
            with self._talking():
                dist.send(data, 0) if value is not None else None
            return None
        parts = {rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in enumerate(sizes.tolist())
                 if size and rank}
        with self._talking():
            for work in [dist.irecv(part, rank) for rank, part in parts.items()]:
                work.wait()  # pyright: ignore[reportOptionalMemberAccess]
        arrived = {rank: pickle.loads(part.numpy().tobytes()) for rank, part in parts.items()}
        return [value, *(arrived.get(rank) for rank in range(1, self.mesh.size))]

    def broadcast(self, value: Any) -> Any:
        values = [value if self.rank == 0 else None]
        with self._talking():
            dist.broadcast_object_list(values)
        return values[0]

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """Show the watch that this rank waits for all others. (If the wait fails, `waiting_since` remains
        set: the rank still waits for the one that failed.)"""
        self.waiting_since = time.monotonic()
        yield
        self.waiting_since = None

    def close(self) -> None:
        super().close()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def connecting_late() -> Iterator[None]:
    """Gloo groups that are made here connect two ranks at their first message, which in most calls go to few
    others. Otherwise each rank at once connects with all others and reads their addresses from the store, 8
    bytes of each for each rank: 840 MB a rank at 10,240. (torch 2.7 does not know this variable.)"""
    name = "TORCH_GLOO_LAZY_INIT"
    before = os.environ.get(name)
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


@contextmanager
def initialized() -> Iterator[None]:
    """torch.distributed with this process as its only rank, while layers are constructed: megatron-core asks
    a group for its size only if torch.distributed is initialized. Destroyed afterwards, since a process that
    forks must not have gloo's threads."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()

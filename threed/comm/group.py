"""The one door to other ranks: groups made from a mesh, every collective and message, and their byte counts.

Every call returns a `Handle`, and adds its bytes to those of its axis in `Comm.sent` when it is issued: what
a rank sends by the ring formulas (all-gather and reduce-scatter of S bytes over n ranks: S (n-1)/n;
all-reduce twice that), which is what gloo and NCCL put on the wire. Waiting for a handle blocks the host on
CPU, and only the current stream on a GPU.

`ProcessComm` runs over torch.distributed (gloo on CPU, NCCL on GPU). `engine.loopback` has another, over
threads.
"""

from __future__ import annotations

import datetime
import os
import pickle
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from threed.base.mesh import GROUPS, Mesh
from threed.comm.lanes import CopyLane, Handle, Lane, StreamLane, ThreadLane, run_as_batch

HOST_LANES = ("host", "read", "write")  # threads, whatever the device
COPY_LANES = ("d2h", "h2d")
FEW_BYTES = 256  # what is all-reduced on CPU by sending it to everybody; counted as other all-reduces are


class Group(ABC):
    """A process group. `size()` and `rank()` are methods because megatron-core calls them
    so."""

    def __init__(self, name: str, ranks: Sequence[int], me: int, sent: Counter[str]):
        self.name, self.ranks, self._index, self._sent = name, tuple(ranks), tuple(ranks).index(me), sent
        self._axis = GROUPS[name].counts
        # called with each tensor that this rank gives to a collective, to inspect it
        self.tap: Callable[[torch.Tensor], None] | None = None

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self._index

    def others(self) -> list[int]:
        """The other ranks by index in the group, beginning with the next one: each rank begins with another
        peer."""
        return [(self._index + step) % self.size() for step in range(1, self.size())]

    def _count(self, tensor: torch.Tensor, rounds: int, given: torch.Tensor) -> None:
        self._sent[self._axis] += rounds * (tensor.nbytes * (self.size() - 1) // self.size())
        if self.tap is not None and self.size() > 1:
            self.tap(given)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Handle:
        """Sum or max over the group, in place. `tensor` must be contiguous."""
        assert tensor.is_contiguous()
        self._count(tensor, 2, tensor)
        return self._all_reduce(tensor, op) if self.size() > 1 else Handle(None)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, add: bool = False,
                       scratch: torch.Tensor | None = None) -> Handle:
        """Sum `tensor` over the group; each rank's part of the sum is written to `output`, or added to it.

        `output` may be this rank's part of `tensor`, or have another dtype. `scratch`, as large as `tensor`,
        saves an allocation.
        """
        assert tensor.is_contiguous() and output.numel() * self.size() == tensor.numel()
        self._count(tensor, 1, tensor)
        if self.size() == 1:
            if output.data_ptr() != tensor.data_ptr():
                output.view(-1).add_(tensor.view(-1)) if add else output.view(-1).copy_(tensor.view(-1))
            return Handle(None)
        return self._reduce_scatter(output, tensor, add, scratch)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        """All ranks' `tensor`, one after the other. `tensor` may be this rank's part of `output`."""
        assert output.is_contiguous() and tensor.numel() * self.size() == output.numel()
        self._count(output, 1, tensor)
        if self.size() == 1:
            if output.data_ptr() != tensor.data_ptr():
                output.copy_(tensor)
            return Handle(None)
        return self._all_gather(output, tensor)

    @abstractmethod
    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Handle: ...
    @abstractmethod
    def _reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, add: bool,
                        scratch: torch.Tensor | None) -> Handle: ...
    @abstractmethod
    def _all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle: ...


class Channel(ABC):
    """Messages of one kind between two pipeline positions: both ends name the same tensors in the same order;
    there are no tags."""

    def __init__(self, sent: Counter[str]):
        self._sent = sent

    def send(self, tensor: torch.Tensor) -> Handle:
        self._sent[GROUPS["pp"].counts] += tensor.nbytes
        return self._send(tensor.contiguous())

    @abstractmethod
    def recv(self, tensor: torch.Tensor) -> Handle: ...
    @abstractmethod
    def _send(self, tensor: torch.Tensor) -> Handle: ...


class Comm(ABC):
    """What one rank can reach: its groups, its channels to other pipeline positions, and plain values of all
    ranks, over the host."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device):
        self.mesh, self.rank, self.device = mesh, rank, device
        self.here = mesh.coordinate(rank)
        self.sent: Counter[str] = Counter()  # axis -> bytes since the start
        # when this rank began to wait for all others; None: it does not wait
        self.waiting_since: float | None = None
        self.groups: dict[str, Group] = {}
        self.channels: dict[tuple[int, int, str], Channel] = {}  # (sender, receiver, kind)
        self._lanes: dict[str, Lane] = {}

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank is in the first shard group. (Each shard group holds a whole copy of what is
        sharded.)"""
        return self.mesh.group("replica", self.rank)[0] == self.rank

    @abstractmethod
    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank (plain Python values, over the host). Also a barrier."""

    def numbers(self, number: float) -> torch.Tensor:
        """Every rank's number, by rank, [ranks], fp64. As `exchange`, but cheap for thousands of ranks that
        ask again and again."""
        return torch.tensor(self.exchange(number), dtype=torch.float64)

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value, by rank, on rank 0; None on the others. A rank with None sends nothing."""
        values = self.exchange(value)
        return values if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value; other ranks' values are ignored."""
        return self.exchange(value if self.rank == 0 else None)[0]

    def lane(self, name: str) -> Lane:
        """A queue of work beside the computation. If this rank is alone in all groups of a lane, the lane
        runs its jobs at once."""
        if name not in self._lanes:
            self._lanes[name] = self._make_lane(name)
        return self._lanes[name]

    def _make_lane(self, name: str) -> Lane:
        groups = [group for group, row in GROUPS.items() if row.lane == name]
        if groups and all(len(self.mesh.group(group, self.rank)) == 1 for group in groups):
            return Lane(self.device)
        if self.device.type != "cuda" or name in HOST_LANES:
            return ThreadLane(name, self.device)
        return CopyLane(name, self.device) if name in COPY_LANES else StreamLane(self.device)

    def close(self) -> None:
        """End all lanes."""
        for lane in self._lanes.values():
            lane.close()


class ProcessGroup(Group):
    """A group of torch.distributed."""

    def __init__(self, name: str, ranks: Sequence[int], me: int, sent: Counter[str], process_group: Any):
        super().__init__(name, ranks, me, sent)
        self.process_group = process_group

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Handle:
        if op == "sum" and not tensor.is_cuda and tensor.nbytes <= FEW_BYTES:
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
        if tensor.is_cuda:
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
        if tensor.is_cuda:
            work = _single("all_gather")(output, tensor, group=self.process_group, async_op=True)
            return _handle(work, output, tensor)
        # Messages: gloo's all-gather makes a copy of everything, and takes twice the time.
        return self._messages(tensor.view(1, -1).expand(self.size(), -1), output.view(self.size(), -1),
                              own=True)

    def _messages(self, parts: torch.Tensor, arrived: torch.Tensor, own: bool = False) -> Handle:
        """Send row i of `parts` to rank i of the group, whose message arrives in row i of `arrived`. `own`:
        copy this rank's row, too."""
        works: list[Any] = []
        for index in reversed(self.others()):
            works.append(dist.irecv(arrived[index], self.ranks[index], self.process_group))
        for index in self.others():
            works.append(dist.isend(parts[index], self.ranks[index], self.process_group))
        mine, target = parts[self._index], arrived[self._index]
        if own and mine.data_ptr() != target.data_ptr():
            target.copy_(mine)
        return Handle(lambda: [work.wait() for work in works], (parts, arrived))


def sum_parts(parts: Sequence[torch.Tensor], output: torch.Tensor, add: bool) -> None:
    """Sum two tensors or more into `output`, or add their sum to it; in fp32 if they are narrower. Only the
    first tensor may share memory with `output`, and then all of it."""
    wide = torch.promote_types(output.dtype, torch.float32)
    total = output if output.dtype == wide else torch.empty_like(output, dtype=wide)
    first, second, *rest = parts
    if add and total is output:
        total.add_(first).add_(second)
    elif first.dtype == wide:
        torch.add(first, second, out=total)
    else:
        total.copy_(first).add_(second)
    for part in rest:
        total.add_(part)
    if total is not output:
        output.add_(total) if add else output.copy_(total)


def _single(name: str) -> Any:
    """The collective over one tensor: torch 2.13 calls it `*_single`, earlier ones `*_tensor` and
    `*_into_tensor`."""
    older = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}
    return getattr(dist, f"{name}_single", None) or getattr(dist, older[name])


def _handle(work: Any, *keep: torch.Tensor) -> Handle:
    return Handle(work.wait, keep, work.is_completed)


class ProcessChannel(Channel):
    """A channel that calls the process group directly; isend and irecv would look up the peer each time."""

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
        # On GPUs the host's tensors, those of `exchange` and its like, travel in the world alone: another
        # group's gloo would connect its ranks for nothing. (None: as the world.)
        backend, self._others = ("cpu:gloo,cuda:nccl", "nccl") if device.type == "cuda" else ("gloo", None)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        else:
            run_as_batch()  # before gloo starts its threads
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

    def exchange(self, value: Any) -> list[Any]:
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

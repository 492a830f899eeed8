"""The one door to other ranks: groups made from a mesh, every collective and message, and their byte counts.

Every call returns a `Handle`, and adds its bytes to those of its axis in `Comm.sent` when it is issued: what
a rank sends by the ring formulas (all-gather and reduce-scatter of S bytes over n ranks: S (n-1)/n;
all-reduce twice that), which is what gloo and NCCL put on the wire; in an exchange, the rows for others.
Waiting for a handle blocks the host on CPU, and only the current stream on a GPU.

`process` has the groups of torch.distributed (gloo on a CPU, NCCL on GPUs), `engine.loopback` others, over
threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from threed.base.mesh import FOLDS, GROUPS, Mesh
from threed.comm.lanes import CopyLane, Handle, Lane, StreamLane, ThreadLane
from threed.devices import device_of

HOST_LANES = ("host", "read", "write")  # threads, whatever the device
COPY_LANES = ("d2h", "h2d")


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

    def exchange(self, output: torch.Tensor, tensor: torch.Tensor, gives: Sequence[int],
                 takes: Sequence[int]) -> Handle:
        """Rows of `tensor` to all ranks, and theirs into `output` (an all-to-all): first `gives[0]` rows to
        rank 0 of the group, then `gives[1]` to rank 1; likewise `takes[0]` rows of rank 0 come first. Counts
        may be 0. What a rank takes from another must be what that one gives to it."""
        assert tensor.is_contiguous() and output.is_contiguous() and tensor.dtype == output.dtype
        assert (sum(gives), sum(takes)) == (len(tensor), len(output)), (gives, takes, tensor.shape)
        assert tensor.shape[1:] == output.shape[1:] and len(gives) == len(takes) == self.size()
        away = len(tensor) - gives[self._index]
        self._sent[self._axis] += away * tensor.itemsize * tensor.shape[1:].numel()
        if self.tap is not None and self.size() > 1:
            self.tap(tensor)
        if self.size() == 1:
            output.copy_(tensor)
            return Handle(None)
        return self._exchange(output, tensor, gives, takes)

    @abstractmethod
    def _exchange(self, output: torch.Tensor, tensor: torch.Tensor, gives: Sequence[int],
                  takes: Sequence[int]) -> Handle: ...
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

    def is_first_copy(self, fold: str = "") -> bool:
        """Whether this rank is in the first shard group, of parameter units of a fold or of the others. (Each
        shard group holds a whole copy of what is sharded.)"""
        replica = FOLDS[fold].replica if fold else "replica"
        return self.mesh.group(replica, self.rank)[0] == self.rank

    @abstractmethod
    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank (plain Python values, over the host). Also a barrier."""

    def numbers(self, number: float) -> torch.Tensor:
        """Every rank's number, by rank, [ranks], fp64. As `all_gather`, but cheap for thousands of ranks that
        ask again and again."""
        return torch.tensor(self.all_gather(number), dtype=torch.float64)

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value, by rank, on rank 0; None on the others. A rank with None sends nothing."""
        values = self.all_gather(value)
        return values if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value; other ranks' values are ignored."""
        return self.all_gather(value if self.rank == 0 else None)[0]

    def lane(self, name: str, beside: bool = False) -> Lane:
        """A queue of work beside the computation. If this rank is alone in all groups of a lane, the lane
        runs its jobs at once, unless somebody has asked for it with `beside` before."""
        if name not in self._lanes or (beside and self._lanes[name].at_once):
            self._lanes[name] = self._make_lane(name, beside)
        return self._lanes[name]

    def _make_lane(self, name: str, beside: bool = False) -> Lane:
        groups = [group for group, row in GROUPS.items() if row.lane == name]
        if groups and not beside and all(len(self.mesh.group(group, self.rank)) == 1 for group in groups):
            return Lane(self.device)
        if not device_of(self.device).asynchronous or name in HOST_LANES:
            return ThreadLane(name, self.device)
        return CopyLane(name, self.device) if name in COPY_LANES else StreamLane(self.device)

    def close(self) -> None:
        """End all lanes."""
        for lane in self._lanes.values():
            lane.close()


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

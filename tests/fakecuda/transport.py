"""Loopback over fake GPUs: each rank has a GPU of its own, and collectives run on streams of their own, as
NCCL's do.

A collective waits for what the current stream has done so far, and runs later on its group's stream; `wait`
orders the stream that calls it behind the collective, and the host waits for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.fakecuda import shim
from threed.comm.lanes import Handle
from threed.devices.cuda import CudaPiece
from threed.engine import loopback


class OwnStream:
    """What is issued here runs in order, on a stream of its own."""

    _made: Any = None

    def issue(self, tensors: Sequence[torch.Tensor], run: Callable[[], None]) -> Handle:
        """Run when the current stream has come to this point. The tensors live until somebody waits."""
        if self._made is None:
            self._made = torch.cuda.Stream(priority=-1)
        before, after = torch.cuda.Event(), torch.cuda.Event()
        before.record()
        with torch.cuda.stream(self._made):
            self._made.wait_event(before)
            run()
            after.record()
        return Handle(lambda: torch.cuda.current_stream().wait_event(after), tensors, after.query)


class NcclGroup(loopback.ThreadGroup, OwnStream):
    def _parts(self, tensor: torch.Tensor, cut: Sequence[int] | None = None) -> list[Any]:
        self._count_calls += 1
        key = (self.name, self.ranks, self._count_calls)
        given = shim.installed.peek(tensor.detach())
        self._world.put(key, self.rank(), given if cut is None else given.split(list(cut)), self.size())
        return self._world.take(key, self.size())

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Handle:
        def run() -> None:
            parts = torch.stack(self._parts(tensor))
            shim.installed.poke(tensor.detach(), parts.sum(0) if op == "sum" else parts.amax(0))

        return self.issue((tensor,), run)

    def _all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        rows = output.view(self.size(), -1)
        in_place = rows[self.rank()].data_ptr() == tensor.data_ptr()  # then NCCL does not write its own part

        def run() -> None:
            for index, part in enumerate(self._parts(tensor)):
                if not (in_place and index == self.rank()):
                    shim.installed.poke(rows[index], part)

        return self.issue((output, tensor), run)

    def _exchange(self, output: torch.Tensor, tensor: torch.Tensor, gives: Sequence[int],
                  takes: Sequence[int]) -> Handle:
        def run() -> None:
            for into, rows in zip(output.split(list(takes)), self._parts(tensor, gives), strict=True):
                if len(into):
                    shim.installed.poke(into, rows[self.rank()])

        return self.issue((output, tensor), run)

    def _reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, add: bool,
                        scratch: torch.Tensor | None) -> Handle:
        """As ProcessGroup's on a GPU: what NCCL cannot do itself, the stream that waits does."""
        flat = output.view(-1)
        apart = add or output.dtype != tensor.dtype
        if not apart:
            part = flat
        else:
            part = tensor.new_empty(flat.shape) if scratch is None else scratch.view(-1)[:flat.numel()]

        def run() -> None:
            mine = [each.view(self.size(), -1)[self.rank()] for each in self._parts(tensor)]
            shim.installed.poke(part, torch.stack(mine).sum(0))

        scattered = self.issue((output, tensor, part), run)

        def finish() -> None:
            scattered.wait()
            flat.add_(part) if add else flat.copy_(part)

        return Handle(finish, (output, tensor, part)) if apart else scattered


class NcclChannel(loopback.ThreadChannel, OwnStream):
    def _send(self, tensor: torch.Tensor) -> Handle:
        sent = tensor.detach()
        return self.issue((tensor,), lambda: self._world.post(self._key, shim.installed.peek(sent)))

    def recv(self, tensor: torch.Tensor) -> Handle:
        return self.issue((tensor,), lambda: shim.installed.poke(tensor, self._world.receive(self._key)))


class FakeComm(loopback.ThreadComm):
    """A rank on a fake GPU of its own. (Two on one GPU would share autograd's thread of that device, and the
    collectives of one rank's backward hold up the other's.)"""

    def __init__(self, world: loopback.World, rank: int, pairs: Sequence[tuple[int, int, str]]):
        super().__init__(world, rank, pairs)
        self.device = torch.device("cuda", rank % shim.gpus)
        torch.cuda.set_device(self.device)
        self.groups = {name: NcclGroup(name, group.ranks, rank, self.sent, world)
                       for name, group in self.groups.items()}
        self.channels = {key: NcclChannel(self.sent, world, channel._key)  # pyright: ignore
                         for key, channel in self.channels.items()}


def use() -> None:
    """Loopback runs on fake GPUs from now on."""
    loopback.ThreadComm = FakeComm  # pyright: ignore
    end, one_at_a_time = CudaPiece.end, threading.Lock()

    def end_alone(self: CudaPiece) -> None:
        """It catches warnings, and those are the process's, not the thread's."""
        with one_at_a_time:
            end(self)

    CudaPiece.end = end_alone

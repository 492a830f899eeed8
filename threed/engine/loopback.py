"""Loopback: all ranks of a mesh in one process, one thread per rank, over a second implementation of `comm`.

The engine and its handlers are those of a real run; only the transport differs. Sums are added in a fixed
order.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from threed.base.mesh import GROUPS, Mesh
from threed.comm.group import Channel, Comm, Group, sum_parts
from threed.comm.lanes import Handle
from threed.comm.process import initialized
from threed.program.instruction import Op
from threed.program.plan import Plan

TIMEOUT_S = 60.0


class Aborted(RuntimeError):
    """Another rank failed."""


class World:
    """The state that all ranks share: one lock, and the tensors of collective calls and messages. Each key
    has a condition of its own, so that an event wakes only the ranks that wait for it: with many ranks,
    waking all of them for every event would be most of the work."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._waiting: dict[Any, threading.Condition] = {}
        self._calls: dict[Any, dict[int, torch.Tensor]] = {}  # (group, call number) -> index -> tensor
        self._taken: Counter[Any] = Counter()
        self._mail: dict[Any, deque[torch.Tensor]] = {}

    def _wait_for(self, key: Any, ready: Callable[[], bool]) -> None:
        """Wait until the call or message with this key is ready. The caller holds the lock."""
        if not ready() and self.failure is None:
            condition = self._waiting.setdefault(key, threading.Condition(self._lock))
            if not condition.wait_for(lambda: self.failure is not None or ready(), TIMEOUT_S):
                raise TimeoutError(f"nothing came for {TIMEOUT_S:.0f} s")
        if self.failure is not None and not ready():
            raise Aborted("another rank failed")

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if self.failure is None or isinstance(self.failure, Aborted):
                self.failure = error
            for condition in self._waiting.values():
                condition.notify_all()

    def put(self, key: Any, index: int, value: Any, size: int) -> None:
        with self._lock:
            call = self._calls.setdefault(key, {})
            call[index] = value
            if len(call) == size and key in self._waiting:
                self._waiting.pop(key).notify_all()

    def take(self, key: Any, size: int) -> list[Any]:
        """The values of all ranks of a call, by index, once all have come."""
        with self._lock:
            self._wait_for(key, lambda: len(self._calls.get(key, ())) == size)
            call = self._calls[key]
            self._taken[key] += 1
            if self._taken[key] == size:
                del self._calls[key], self._taken[key]
            return [call[index] for index in range(size)]

    def post(self, key: Any, tensor: torch.Tensor) -> None:
        with self._lock:
            self._mail.setdefault(key, deque()).append(tensor)
            if key in self._waiting:
                self._waiting[key].notify()

    def receive(self, key: Any) -> torch.Tensor:
        with self._lock:
            self._wait_for(key, lambda: bool(self._mail.get(key)))
            return self._mail[key].popleft()


class ThreadGroup(Group):
    def __init__(self, name: str, ranks: Sequence[int], me: int, sent: Counter[str], world: World):
        super().__init__(name, ranks, me, sent)
        self._world, self._count_calls = world, 0

    def _call(self, tensor: torch.Tensor, finish: Callable[[list[Any]], None],
              cut: Sequence[int] | None = None) -> Handle:
        """Give a copy of the tensor to the call, so that a result may overwrite the input; or rows of it for
        each rank, as many as `cut` says."""
        self._count_calls += 1
        key = (self.name, self.ranks, self._count_calls)
        given = tensor.detach().clone()
        self._world.put(key, self.rank(), given if cut is None else given.split(list(cut)), self.size())
        return Handle(lambda: finish(self._world.take(key, self.size())))

    def _all_reduce(self, tensor: torch.Tensor, op: str) -> Handle:
        def finish(parts: list[torch.Tensor]) -> None:
            stacked = torch.stack(parts)
            tensor.copy_(stacked.sum(0) if op == "sum" else stacked.amax(0))

        return self._call(tensor.detach(), finish)

    def _reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, add: bool,
                        scratch: torch.Tensor | None) -> Handle:
        def finish(parts: list[torch.Tensor]) -> None:
            mine = [part.view(self.size(), -1)[self.rank()] for part in parts]
            sum_parts([mine[index] for index in (self.rank(), *self.others())], output.view(-1), add)

        return self._call(tensor, finish)

    def _all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        def finish(parts: list[torch.Tensor]) -> None:
            torch.cat([part.view(-1) for part in parts], out=output.view(-1))

        return self._call(tensor, finish)

    def _exchange(self, output: torch.Tensor, tensor: torch.Tensor, gives: Sequence[int],
                  takes: Sequence[int]) -> Handle:
        def finish(parts: list[Sequence[torch.Tensor]]) -> None:
            for into, rows in zip(output.detach().split(list(takes)), parts, strict=True):
                assert len(into) == len(rows[self.rank()])
                into.copy_(rows[self.rank()])

        return self._call(tensor, finish, gives)


class ThreadChannel(Channel):
    def __init__(self, sent: Counter[str], world: World, key: Any):
        super().__init__(sent)
        self._world, self._key = world, key
        self._latest = Handle(None)

    def _send(self, tensor: torch.Tensor) -> Handle:
        self._world.post(self._key, tensor.detach().clone())
        return Handle(None)

    def recv(self, tensor: torch.Tensor) -> Handle:
        before = self._latest  # receives get messages in the order in which they were posted

        def finish() -> None:
            before.wait()
            sent = self._world.receive(self._key)
            assert sent.shape == tensor.shape and sent.dtype == tensor.dtype, (sent.shape, tensor.shape)
            tensor.copy_(sent)

        self._latest = Handle(finish)
        return self._latest


class ThreadComm(Comm):
    def __init__(self, world: World, rank: int, pairs: Sequence[tuple[int, int, str]]):
        super().__init__(world.mesh, rank, torch.device("cpu"))
        self._world, self._gathers = world, 0
        for name in (each for each, row in GROUPS.items() if row.needed(world.mesh)):
            self.groups[name] = ThreadGroup(name, world.mesh.group(name, rank), rank, self.sent, world)
        for sender, receiver, kind in pairs:
            key = (sender, receiver, kind, self.mesh.group("pp", self.rank))
            self.channels[sender, receiver, kind] = ThreadChannel(self.sent, world, key)

    def all_gather(self, value: Any) -> list[Any]:
        self._gathers += 1
        key = ("all-gather", self._gathers)
        self._world.put(key, self.rank, value, self._world.mesh.size)
        return self._world.take(key, self.mesh.size)


def run_loopback(plan: Plan, mesh: Mesh, work: Callable[[Comm], Any]) -> list[Any]:
    """Call `work` with each rank's comm, each on its own thread. Returns the results by rank; raises the
    first failure."""
    world = World(mesh)
    pairs = channel_pairs(plan)
    results: list[Any] = [None] * mesh.size

    def body(rank: int) -> None:
        comm = ThreadComm(world, rank, pairs)
        try:
            results[rank] = work(comm)
        except BaseException as error:
            world.fail(error)
        finally:
            comm.close()

    with initialized():
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(mesh.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if world.failure is not None:
        raise world.failure
    return results


def channel_pairs(plan: Plan) -> list[tuple[int, int, str]]:
    """(sender position, receiver position, kind) of every channel that a plan uses."""
    return sorted({(position, item.peer, item.kind) for programs in plan.programs.values()
                   for position, program in enumerate(programs) for item in program if item.op == Op.SEND})

"""Links: collectives and messages of the ranks of a node, and what they take from the computation beside
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from threed.calibration.clock import Clock
from threed.calibration.grid import Grid
from threed.calibration.points import Sent
from threed.comm import Comm, Group
from threed.lanes import Lane, StreamLane, ThreadLane
from threed.quantity import round_up, show_bytes

CHANNELS = ((0, 1, "act"), (1, 0, "grad"))
BETWEEN = 320  # rows of the square matrices that are multiplied between two collectives of a CPU
BESIDE_S = 0.3  # of computation, and of collectives, at a time
TRIES = 3


class Links:
    """What all ranks measure together."""

    def __init__(self, grid: Grid, comm: Comm):
        self.grid, self.comm, self.clock = grid, comm, Clock(comm.device)

    def points(self) -> list[Sent]:
        """Of the world and, where they are fewer, of the ranks of one position."""
        groups = [self.comm.groups["world"]]
        if 1 < self.comm.groups["dp"].size() < groups[0].size():
            groups.append(self.comm.groups["dp"])
        found = []
        for group in groups:
            for numel in self.grid.sent:
                found += self._collectives(group, round_up(numel, group.size()))
        if self.comm.channels:
            found += [self._message(numel) for numel in self.grid.sent]
        return found

    def contention(self) -> float:
        """Seconds that computation loses to a second of all-reduces beside it."""
        group, device = self.comm.groups["world"], self.comm.device
        numbers = torch.zeros(round_up(sorted(self.grid.sent)[-2], group.size()), device=device)
        matrix = torch.randn(4096 if device.type == "cuda" else 256, device=device).diag()
        work, talk = lambda: torch.mm(matrix, matrix), lambda: group.all_reduce(numbers).wait()
        lane: Lane = StreamLane(device) if device.type == "cuda" else ThreadLane("calibration", device)
        talk()
        calls = [max(1, round(BESIDE_S / self._most(self.clock.sample(call, 3)))) for call in (work, talk)]

        def compute() -> None:
            for _ in range(calls[0]):
                work()

        def together() -> float:
            """Seconds of the computation, with collectives beside it that end before the next call."""
            handle = lane.submit(self._repeated(talk, calls[1]))
            seconds = self.clock.sample(compute, 1)
            handle.wait()
            return seconds

        lost = []
        for _ in range(TRIES):
            alone = self._most(self.clock.sample(compute, 1))
            sent = self._most(self.clock.sample(self._repeated(talk, calls[1]), 1))
            beside = self._most(together())
            # Where collectives end before the computation, all of them ran beside it.
            lost.append((beside - alone) / min(sent, beside))
        lane.close()
        return min(1.0, max(0.0, sorted(lost)[TRIES // 2]))

    def _repeated(self, call: Callable[[], object], calls: int) -> Callable[[], None]:
        def repeated() -> None:
            for _ in range(calls):
                call()

        return repeated

    def _collectives(self, group: Group, numel: int) -> Iterator[Sent]:
        size = group.size()
        whole = torch.zeros(numel, device=self.comm.device)
        part = torch.zeros(numel // size, device=self.comm.device)
        ring = whole.nbytes * (size - 1) // size
        calls: dict[str, tuple[str, int, Callable[[], object]]] = {
            "all-reduce": ("all_reduce", 2 * ring, lambda: group.all_reduce(whole).wait()),
            "all-gather": ("ring", ring, lambda: group.all_gather(whole, part).wait()),
            "reduce-scatter": ("ring", ring, lambda: group.reduce_scatter(part, whole).wait())}
        for what, (way, sent, call) in calls.items():
            # All groups of a kind talk at the same time: so many ranks share the processors.
            yield Sent("collectives", f"{what} of {show_bytes(whole.nbytes)} over {size}", way, sent, size,
                       self.comm.mesh.size, self._time(call) if self.comm.device.type == "cuda"
                       else self._time_between(call))

    def _time_between(self, call: Callable[[], object]) -> float:
        """Of a call between two computations, as in a step: no rank of a CPU comes to it when the others do,
        and who has waited must be woken."""
        matrix = torch.randn(BETWEEN, BETWEEN)

        def both() -> None:
            torch.mm(matrix, matrix)
            call()

        return max(1e-6, self._time(both) - self._time(lambda: torch.mm(matrix, matrix)))

    def _message(self, numel: int) -> Sent:
        """There and back, and half of the time."""
        tensor, first = torch.zeros(numel, device=self.comm.device), self.comm.here.position == 0
        there, back = (self.comm.channels[name] for name in CHANNELS)

        def call() -> None:
            if first:
                there.send(tensor).wait()
                back.recv(tensor).wait()
            else:
                there.recv(tensor).wait()
                back.send(tensor).wait()

        return Sent("messages", f"message of {show_bytes(tensor.nbytes)}", "message", tensor.nbytes, 2,
                    self.comm.mesh.size // 2, self._time(call) / 2)

    def _time(self, call: Callable[[], object]) -> float:
        return self.clock.together(call, self.grid.point_s / 2, self._most)

    def _most(self, seconds: float) -> float:
        return float(self.comm.numbers(seconds).max())

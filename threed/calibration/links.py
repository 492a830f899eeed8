"""Links: collectives and messages of the ranks of a node, and what they take from the computation beside
them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from threed.base.quantity import round_up, show_bytes
from threed.calibration.clock import LEAST, MOST, Stopwatch, typical
from threed.calibration.grid import Grid
from threed.calibration.points import Sent
from threed.comm.group import Comm, Group
from threed.comm.lanes import Lane, StreamLane, ThreadLane
from threed.devices import device_of
from threed.program.instruction import SlotKind

CHANNELS = ((0, 1, SlotKind.ACT), (1, 0, SlotKind.GRAD))
BETWEEN = 320  # rows of the square matrices that are multiplied between two collectives of a CPU
BESIDE_S = 0.3  # of computation, and of collectives, at a time
TRIES = 5


class GroupTimes:
    """What all ranks measure together."""

    def __init__(self, grid: Grid, comm: Comm):
        self.grid, self.comm, self.clock = grid, comm, Stopwatch(comm.device)

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
        """Seconds that computation loses to a second of all-reduces beside it. Prices take it for what it
        loses to all-to-alls, too: both move bytes by kernels of the device, or by the processor."""
        group, device = self.comm.groups["world"], self.comm.device
        known = device_of(device)
        numbers = torch.zeros(round_up(sorted(self.grid.sent)[-2], group.size()), device=device)
        matrix = torch.randn(4096 if known.asynchronous else 256, device=device).diag()
        work, talk = lambda: torch.mm(matrix, matrix), lambda: group.all_reduce(numbers).wait()
        lane: Lane = StreamLane(device) if known.asynchronous else ThreadLane("calibration", device)
        talk()
        calls = [max(1, round(BESIDE_S / self._most(self.clock.sample(call, 3)))) for call in (work, talk)]
        computed, sent = self._repeated(work, calls[0]), self._repeated(talk, calls[1])

        def together() -> None:
            """The computation with collectives beside it, until both have ended."""
            handle = lane.submit(sent)
            computed()
            handle.wait()

        lost = []
        for _ in range(TRIES):
            alone, talked, both = (self._most(self.clock.sample(call, 1))
                                   for call in (computed, sent, together))
            lost.append((both - max(alone, talked)) / min(alone, talked))
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
        other, even = torch.zeros_like(whole), [len(whole) // size] * size
        ring = whole.nbytes * (size - 1) // size
        calls: dict[str, tuple[str, int, Callable[[], object]]] = {
            "all-reduce": ("all_reduce", 2 * ring, lambda: group.all_reduce(whole).wait()),
            "all-gather": ("ring", ring, lambda: group.all_gather(whole, part).wait()),
            "reduce-scatter": ("ring", ring, lambda: group.reduce_scatter(part, whole).wait()),
            "all-to-all": ("all_to_all", ring, lambda: group.exchange(other, whole, even, even).wait())}
        for what, (way, sent, call) in calls.items():
            # All groups of a kind talk at the same time: so many ranks share the processors.
            kind = "all-to-alls" if way == "all_to_all" else "collectives"
            yield Sent(kind, f"{what} of {show_bytes(whole.nbytes)} over {size}", way, sent, size,
                       self.comm.mesh.size, self._time(call))

    def _message(self, numel: int) -> Sent:
        """To the other position, while another one comes from there."""
        first = self.comm.here.position == 0
        sent, received = (torch.zeros(numel, device=self.comm.device) for _ in range(2))
        there, back = (self.comm.channels[name] for name in (CHANNELS if first else CHANNELS[::-1]))

        def call() -> None:
            for handle in (there.send(sent), back.recv(received)):
                handle.wait()

        return Sent("messages", f"message of {show_bytes(sent.nbytes)}", "message", sent.nbytes, 2,
                    self.comm.mesh.size // 2, self._time(call))

    def _time(self, call: Callable[[], object]) -> float:
        if device_of(self.comm.device).asynchronous:
            return self.clock.together(call, self.grid.point_s / 2, self._most)
        return self._after_work(call)

    def _after_work(self, call: Callable[[], object]) -> float:
        """Of a call after a computation, as in a step of a CPU: no rank comes to it when the others do, and
        who has waited must be woken. The mean of the ranks, some of which wait, and some do not."""
        matrix = torch.randn(BETWEEN, BETWEEN)

        def once() -> tuple[float, float]:
            """Seconds of the call, and with the computation."""
            begin = time.perf_counter()
            torch.mm(matrix, matrix)
            worked = time.perf_counter()
            call()
            end = time.perf_counter()
            return end - worked, end - begin

        once()
        count = round(self.grid.point_s / 2 / self._most(once()[1]))
        seconds = typical([once()[0] for _ in range(min(MOST, max(LEAST, count)))])
        return float(self.comm.numbers(seconds).mean())

    def _most(self, seconds: float) -> float:
        return float(self.comm.numbers(seconds).max())

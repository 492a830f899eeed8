"""Values of all ranks over real processes, and what it costs a rank to meet the others."""

from __future__ import annotations

import datetime
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import exchanges
from threed.base.mesh import Mesh
from threed.comm.process import ProcessComm, connecting_late, file_store

LIMIT = datetime.timedelta(seconds=60)


def told(rank: int, path: str, count: int) -> list[Any]:
    comm = ProcessComm(Mesh(dp=count), rank, torch.device("cpu"), 60.0, file_store(path, count))
    try:
        own = "x" * 1000 * rank if rank % 2 == 0 else None
        gathered = comm.gather(own)
        return [comm.numbers(rank + 0.5).tolist(), [value and len(value) for value in gathered or ()],
                comm.all_gather(rank), comm.broadcast(rank)]
    finally:
        comm.close()


def test_values_of_all_ranks(workers):
    """Of gathered values rank 0 gets each at its own size, and nothing of ranks that have none. (Python
    values: an empty text is one.)"""
    numbers, others = [0.5, 1.5, 2.5, 3.5, 4.5], list(range(5))
    first, *rest = workers.run(told, 5, 5)
    assert first == [numbers, ["", None, 2000, None, 4000], others, 0]
    assert rest == [[numbers, [], others, 0]] * 4


def exchanged(rank: int, path: str, count: int) -> list[tuple[bool, int]]:
    comm, went = ProcessComm(Mesh(dp=count), rank, torch.device("cpu"), 60.0, file_store(path, count)), []
    try:
        for dtype in exchanges.DTYPES:
            before = comm.sent["dp"]
            got, want = exchanges.exchanged(comm.groups["dp"], dtype, comm.device)
            went.append((torch.equal(got, want), comm.sent["dp"] - before))
        return went
    finally:
        comm.close()


def test_rows_are_exchanged(workers):
    """Rows of another rank, in another order, or bytes that are not those that leave a rank."""
    for rank, went in enumerate(workers.run(exchanged, 3, 3)):
        assert went == [(True, exchanges.sent(rank, dtype)) for dtype in exchanges.DTYPES]


class Counted(dist.Store):
    """A rank's client of a store, which counts the bytes that it reads."""

    def __init__(self, port: int):
        super().__init__()
        self.inner, self.read = dist.TCPStore("127.0.0.1", port, None, False), 0

    def set(self, key: str, value: str) -> None:
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        value = self.inner.get(key)
        self.read += len(value)
        return value

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self.inner.wait(keys, LIMIT)


def read_by_a_rank(rank: int, path: str, count: int, late: bool) -> int:
    """The bytes that rank 1 of `count` reads from the store until all have exchanged something. (Ranks are
    threads of this process: they have no other use for it.)"""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    stores = [Counted(server.port) for _ in range(count)]

    def be(rank: int) -> None:
        group: Any = dist.ProcessGroupGloo(stores[rank], rank, count, LIMIT)
        parts = torch.zeros(count)
        group.allgather([list(parts.split(1))], [torch.full((1,), rank + 1.0)]).wait()
        assert parts.tolist() == [each + 1.0 for each in range(count)]
        group.broadcast(torch.zeros(1), 0).wait()
        group.allreduce(torch.zeros(1)).wait()

    def work() -> None:
        with ThreadPoolExecutor(count) as ranks:
            list(ranks.map(be, range(count)))

    if late:
        with connecting_late():
            work()
    else:
        work()
    return stores[1].read


def policies(rank: int, path: str, count: int) -> list[int]:
    comm = ProcessComm(Mesh(dp=count), rank, torch.device("cpu"), 60.0, file_store(path, count))
    try:
        comm.all_gather(rank)
        return [os.sched_getscheduler(int(task.name)) for task in Path("/proc/self/task").iterdir()
                if "gloo" in (task / "comm").read_text()]
    finally:
        comm.close()


def test_threads_of_gloo_take_no_processor_from_each_other(workers):
    """Where one does, it spins for the lock that the other holds: collectives took 2 to 5 times as long."""
    for found in workers.run(policies, 2, 2):
        assert found and set(found) == {os.SCHED_BATCH}


def test_what_a_rank_reads_to_meet_the_others(workers):
    """Addresses of all ranks, for each of the ranks: 840 MB a rank at 10,240, from one store."""
    (few,), (many,) = (workers.run(read_by_a_rank, 1, count, True) for count in (6, 24))
    assert 0 < many <= 1.5 * few, (few, many)
    (few,), (many,) = (workers.run(read_by_a_rank, 1, count, False) for count in (6, 24))
    assert many > 4 * few, "gloo has learned it: connecting_late is not needed any more"

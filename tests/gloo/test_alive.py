"""Machines that are off, frozen or cut off, a store that does not answer, and killed neighbours are named;
nobody is at a normal end. Each process is one rank, which meets the others over TCP."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import time
from functools import partial

import pytest
import torch.distributed as dist

from tests.gloo.test_train import free_port
from tests.running import Forked
from threed.base.restart import FailureNote
from threed.comm.environment import RankPlace
from threed.engine import heartbeat as alive
from threed.engine import watch


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Limits of seconds."""
    monkeypatch.setattr(alive, "SIGN_S", 0.3)
    monkeypatch.setattr(alive, "SILENCE_S", 3.0)
    monkeypatch.setattr(watch, "STORE_S", 3.0)


def client(port: int, serves: bool = False):
    return dist.TCPStore("127.0.0.1", port, None, serves, datetime.timedelta(seconds=60),
                         wait_for_workers=False)


def serve(port: int) -> int:
    store = client(port, serves=True)
    while store is not None:
        time.sleep(1)
    return 0


def be(place: RankPlace, port: int, name: str) -> int:
    """Be a rank that waits for the end, which the test announces in the store."""
    socket.gethostname = lambda: name
    store = client(port)
    one = watch.Watch(place.rank, store, 1000.0, place.world_size, place)
    mine = client(port)
    print(f"rank {place.rank} waits", flush=True)
    while not mine.check([f"end/{place.rank}"]):
        time.sleep(0.1)
    one.close()
    return 0


class Ranks:
    """Ranks under way on machines of so many ranks each, and the store where they meet."""

    def __init__(self, folder, sizes):
        self.port = free_port()
        self.server = Forked(folder, partial(serve, self.port))
        self.store = client(self.port)
        world, places = sum(sizes), []
        for size in sizes:
            places += [RankPlace(len(places) + local, local, size, world) for local in range(size)]
        names = [f"host{host + 1}" for host, size in enumerate(sizes) for _ in range(size)]
        self.all = []
        for place, name in zip(places, names, strict=True):
            self.all.append(Forked(folder, partial(be, place, self.port, name)))
        for rank, one in enumerate(self.all):
            one.wait_for(f"rank {rank} waits")

    def signal(self, number, *ranks):
        for rank in ranks:
            os.kill(self.all[rank].process.pid, number)

    def end(self, *ranks):
        for rank in ranks:
            self.store.set(f"end/{rank}", "")

    def close(self):
        for one in (*self.all, self.server):
            one.kill()


@pytest.fixture
def ranks(tmp_path):
    made = []

    def make(*sizes: int) -> Ranks:
        made.append(Ranks(tmp_path, sizes))
        return made[-1]

    yield make
    for one in made:
        one.close()


def begun(run: Ranks) -> None:
    """Return when rank 0 has had time to see each machine's first sign."""
    until = time.monotonic() + 30
    while not run.store.check([alive.MACHINES]) and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(4 * alive.SIGN_S)


def test_a_frozen_machine(ranks):
    run = ranks(1, 2, 1)
    begun(run)
    run.signal(signal.SIGSTOP, 1, 2)
    assert [run.all[rank].wait(60) for rank in (0, 3)] == [1, 1], run.all[0].output
    said = "host2 has gone: no sign of life for 3 s: it is off, frozen or cut off; rank 0 at 'between steps'"
    assert said in run.all[0].output and "host2" not in run.all[3].output, run.all[3].output
    run.signal(signal.SIGCONT, 1, 2)  # they learn of it afterwards
    assert [run.all[rank].wait(60) for rank in (1, 2)] == [1, 1], run.all[1].output


def test_two_frozen_machines(ranks):
    run = ranks(1, 1, 1)
    begun(run)
    run.signal(signal.SIGSTOP, 1, 2)
    assert run.all[0].wait(60) == 1
    assert "gone: no sign of life for 3 s" in run.all[0].output, run.all[0].output


def test_a_suspended_run_goes_on(ranks):
    """All ranks stop for longer than each limit."""
    run = ranks(1, 2)
    begun(run)
    run.signal(signal.SIGSTOP, 0, 1, 2)
    time.sleep(2 * alive.SILENCE_S)
    run.signal(signal.SIGCONT, 0, 1, 2)
    time.sleep(alive.SILENCE_S)
    run.end(0, 1, 2)
    assert [one.wait(30) for one in run.all] == [0, 0, 0], [one.output for one in run.all]
    assert not any("threed: " in one.output for one in run.all)


def test_a_machine_that_ends_first_has_not_gone(ranks):
    run = ranks(2, 2)
    begun(run)
    run.end(2, 3)
    assert [run.all[rank].wait(30) for rank in (2, 3)] == [0, 0]
    time.sleep(2 * alive.SILENCE_S)
    run.end(1)
    assert run.all[1].wait(30) == 0
    time.sleep(2 * alive.WORD_S)
    run.end(0)
    assert run.all[0].wait(30) == 0
    assert not any("threed: " in one.output for one in run.all), [one.output for one in run.all]


def test_a_store_that_does_not_answer(ranks):
    """A client waits without a limit for the answer of a machine that is off."""
    run = ranks(1, 1)
    begun(run)
    os.kill(run.server.process.pid, signal.SIGSTOP)
    assert [one.wait(60) for one in run.all] == [1, 1], [one.output for one in run.all]
    for rank, one in enumerate(run.all):
        assert (f"rank {rank}: rank 0's host, or the launcher there, has gone: the store of the run has not "
                "answered for 3 s") in one.output


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_neighbour(victim, ranks):
    run = ranks(1, 3) if victim else ranks(2)
    time.sleep(4 * watch.POLL_S)  # each has told its process
    run.signal(signal.SIGKILL, victim)
    others = [one for rank, one in enumerate(run.all) if rank != victim]
    assert [one.wait(60) for one in others] == [1] * len(others), [one.output for one in others]
    where = " on host2" if victim else ""
    said = f"threed: rank {victim}{where} was killed: its process has ended without a word"
    assert "".join(one.output for one in others).count(said) == 1, [one.output for one in others]


def test_a_launcher_knows_better(ranks):
    """It tells the signal before the neighbour speaks."""
    run = ranks(2)
    time.sleep(4 * watch.POLL_S)
    run.signal(signal.SIGKILL, 1)
    watch.tell(run.store, FailureNote("rank 1 was killed by SIGKILL", 137, step=0))
    assert run.all[0].wait(60) == 137
    assert "without a word" not in run.all[0].output


def test_a_process_that_cannot_be_seen_is_not_watched(ranks, monkeypatch):
    monkeypatch.setattr(alive, "_identity", lambda pid: None)
    run = ranks(2)
    time.sleep(4 * watch.POLL_S)
    run.signal(signal.SIGKILL, 1)
    time.sleep(2 * alive.WORD_S)
    run.end(0)
    assert run.all[0].wait(30) == 0, run.all[0].output

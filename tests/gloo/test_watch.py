"""Failures are seen by all ranks at any moment, also while they connect; slow ranks are named; communicators
connect in order."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from functools import partial
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests.gloo.test_train import free_port
from tests.harness import channel_pairs, make_mesh, make_plan, tiny
from tests.running import Run, metrics
from threed.base.restart import FailureNote
from threed.comm.environment import RankPlace
from threed.comm.process import ProcessComm, file_store
from threed.comm.store import Guard
from threed.engine.connect import warm
from threed.engine.watch import Watch, tell
from threed.launcher import rank
from threed.launcher.rank import Unattended
from threed.training import setup as assemble

SMALL = ["train", "configs/toy.yaml", "model.layers=2", "model.hidden=32", "model.seq_len=32",
         "model.vocab=300",
         "train.global_batch_size=8", "train.micro_batch_size=1", "train.eval_every=0",
         "monitor.wandb=disabled",
         "optimizer.warmup_steps=0", "run.timeout_s=100"]


@pytest.fixture
def start(begin):
    return partial(begin, SMALL)


@pytest.fixture
def as_ranks(start):
    """as_ranks(count, *overrides) -> a run a rank, which meet over TCP as under torchrun. `alone`: as on
    machines of one rank each."""

    def begin(count: int, *overrides: str, alone: bool = False) -> list[Run]:
        port = str(free_port())
        place = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": "1" if alone else str(count),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [start(*overrides, env={**place, "RANK": str(rank), "LOCAL_RANK": "0" if alone else str(rank)})
                for rank in range(count)]

    return begin


def leave(how: str) -> None:
    if how == "raises":
        raise OSError("no such network")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def never_connects(monkeypatch):
    """never_connects(rank, how): this rank ends while others wait for it, each in a call that locks its
    client of the store."""
    original = ProcessComm.__init__

    def set_up(rank, how):
        def init(self, mesh, mine, *others):
            if mine == rank:
                time.sleep(1.0)
                leave(how)
            original(self, mesh, mine, *others)

        monkeypatch.setattr(ProcessComm, "__init__", init)

    return set_up


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_a_failure_while_ranks_connect(how, start, never_connects):
    """Over files, from the launcher: the others end with the run, long before run.timeout_s, and say
    nothing."""
    never_connects(2, how)
    run = start("train.steps=2", "parallel.dp=2", "parallel.tp=1", "parallel.pp=2")
    assert run.wait(40) == (1 if how == "raises" else 128 + 9), run.output
    lines = [line for line in run.output.splitlines() if line.startswith("threed: ")]
    assert len(lines) == 1 and ("no such network" if how == "raises"
                                else "rank 2 was killed by SIGKILL") in lines[0], run.output
    assert "transport" not in run.output


def test_a_failure_while_ranks_connect_over_tcp(as_ranks, never_connects):
    """As under torchrun: each rank reads the failure from the store, although it waits there for another
    answer."""
    never_connects(2, "raises")
    runs = as_ranks(4, "train.steps=2", "parallel.dp=2", "parallel.tp=1", "parallel.pp=2")
    statuses, outputs = [run.wait(40) for run in runs], [run.output for run in runs]
    assert statuses == [1] * 4, outputs
    assert ["no such network" in output for output in outputs] == [False, False, True, False], outputs
    assert sum(output.count("threed: ") for output in outputs) == 1, outputs


@pytest.mark.parametrize("victim", [1, 3])
def test_the_echo_of_a_killed_rank(victim, as_ranks):
    """Nobody has a launcher or a neighbour that says why: the first whose connection breaks says that, in one
    line and without gloo's words."""
    runs = as_ranks(4, "train.steps=100000", "parallel.dp=2", "parallel.tp=1", "parallel.pp=2", alone=True)
    runs[0].wait_for("step      3/100000")
    runs[victim].process.kill()
    others = [run for rank, run in enumerate(runs) if rank != victim]
    assert [run.wait(40) for run in others] == [1] * 3, [run.output for run in others]
    text = "".join(run.output for run in others)
    assert text.count("the connection to another rank is gone") == 1 == text.count("threed: "), text
    assert "Traceback" not in text and "transport" not in text, text


@pytest.mark.parametrize("victim", [1, 3])
def test_a_killed_rank_is_named_by_its_neighbour(victim, as_ranks):
    runs = as_ranks(4, "train.steps=100000", "parallel.dp=2", "parallel.tp=1", "parallel.pp=2")
    runs[0].wait_for("step      3/100000")
    runs[victim].process.kill()
    others = [run for rank, run in enumerate(runs) if rank != victim]
    assert [run.wait(40) for run in others] == [1] * 3, [run.output for run in others]
    text = "".join(run.output for run in others)
    assert text.count("threed: ") == 1, text
    assert f"threed: rank {victim} was killed: its process has ended without a word" in text


@pytest.mark.parametrize("fails", [False, True])
def test_data_may_take_longer_than_the_timeout(fails, as_ranks, monkeypatch):
    """The other ranks wait for rank 0, and end with it."""
    original = assemble.prepare

    def prepare(*args):
        time.sleep(8)
        if fails:
            raise OSError("no such text")
        return original(*args)

    monkeypatch.setattr(assemble, "prepare", prepare)
    runs = as_ranks(2, "train.steps=2", "parallel.dp=2", "parallel.tp=1", "parallel.pp=1", "run.timeout_s=5")
    assert [run.wait(60) for run in runs] == [int(fails)] * 2, [run.output for run in runs]
    assert (" 2/2  loss" if not fails else "no such text") in runs[0].output
    assert "threed: " not in runs[1].output


def test_a_slow_rank(start, monkeypatch, tmp_path):
    """Named in the metrics of each step and, since it stays slow, in a line; not ended."""
    from threed.features.pipeline.run import PipelineRun

    original = PipelineRun.forward

    def forward(self, instruction, slots):
        if self.comm.rank == 2:
            time.sleep(0.1)
        return original(self, instruction, slots)

    monkeypatch.setattr(PipelineRun, "forward", forward)
    run = start("train.steps=12", "parallel.dp=4", "parallel.tp=1", "parallel.pp=1")
    assert run.wait() == 0, run.output
    rows = metrics(tmp_path / "run")[1:]
    assert [row["straggler/rank"] for row in rows] == [2] * 11
    assert min(row["straggler/slower"] for row in rows) > 1.5
    assert run.output.count("warning: rank 2 (pp0 dp2) is slow for 10 steps now") == 1
    assert "most of it in compute" in run.output


def warmed(rank: int, path: str, config):
    """Connect as on a GPU, and exchange something, which shows that all calls have met."""
    comm = ProcessComm(make_mesh(config), rank, torch.device("cpu"), 30.0,
                       file_store(path, config.world_size))
    try:
        comm.open_channels(channel_pairs(make_plan(config)))
        warm(comm)
        return comm.all_gather(rank)
    finally:
        comm.close()


@pytest.mark.parametrize("overrides", [["parallel.dp=2", "parallel.tp=2", "parallel.pp=2"],
                                       ["parallel.dp=4", "parallel.pp=2", "zero.shard_size=2",
                                        "parallel.schedule=zb-v"],
                                       ["parallel.pp=8", "parallel.schedule=zb-h1"]])
def test_communicators_connect_in_one_order(overrides, workers):
    """The first calls on all communicators, each of which waits for its peers: no rank waits for one that is
    at another."""
    config = tiny("train.global_batch_size=16", *overrides)
    assert workers.run(warmed, config.world_size,
                       config) == [list(range(config.world_size))] * config.world_size


def test_hosts_in_messages(tmp_path):
    """Beside each rank that a message names, where there are several hosts; another library's ranks stay as
    they are."""
    watch = Watch(0, file_store(str(tmp_path / "store"), 1), 60.0)
    watch.hosts = ["a", "b"]
    assert watch.with_hosts("rank 1: a tensor of rank 4") == "rank 1 on b: a tensor of rank 4"
    assert watch.with_hosts("rank 0's host, rank 0 on a") == "rank 0's host, rank 0 on a"
    watch.close()


@pytest.mark.parametrize("ranks", [1, 8, 500, 10_000, 100_000])
def test_the_store_is_not_flooded(ranks, tmp_path):
    """Each rank asks the store of the run for failures: with ten thousand ranks four times a second, it
    would do nothing else."""
    watch = Watch(0, file_store(str(tmp_path / "store"), 1), 60.0, ranks)
    assert ranks / watch.poll_s <= 2000 and (ranks > 500 or watch.poll_s == 0.25)
    watch.close()


def test_news_come_before_the_end(tmp_path):
    """Rank 0 lives on for the others after a failure; its console has the reason at once, and once."""
    watch = Watch(0, file_store(str(tmp_path / "store"), 2), 60.0, 2)
    told, ended = [], threading.Event()
    watch.on_news = lambda note: told.append((note.message, time.monotonic()))

    def end(note):
        ended.set()
        threading.Event().wait()  # here the process would end

    watch.on_end, begin = end, time.monotonic()
    tell(file_store(str(tmp_path / "store"), 2), FailureNote("rank 1 was killed", 137, step=3))
    assert ended.wait(30) and [text for text, _ in told] == ["rank 1 was killed"]
    assert told[0][1] - begin < time.monotonic() - told[0][1]


@pytest.mark.parametrize("local, elsewhere", [(0, True), (0, False), (1, True)])
def test_the_first_rank_of_a_machine_says_why_once(local, elsewhere, monkeypatch):
    """Not where the agent of this machine has said it, nor by each rank."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    said: list[str] = []
    monkeypatch.setattr(rank, "say", said.append)
    note = FailureNote("rank 3 was killed", 137, host="far" if elsewhere else socket.gethostname(),
                       launcher=os.getppid())
    alone = Unattended(tiny(), RankPlace(2 + local, local, 2, 4))
    for _ in range(2):
        alone.hear(note)
    alone.hear(None)
    assert said == ["rank 3 was killed"] * (local == 0 and elsewhere)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_store_that_does_not_answer(frozen):
    """Its machine is off: a client that waits there does so without a limit."""
    port, gone, up = free_port(), threading.Event(), get_context("fork").Event()

    def serve() -> None:
        store = dist.TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        up.set()
        time.sleep(600)
        del store

    server = get_context("fork").Process(target=serve, daemon=True)
    server.start()
    assert up.wait(30)
    guard = Guard(1.5, gone.set)
    guard.begin(dist.PrefixStore("run", dist.TCPStore("127.0.0.1", port, None, False)))
    assert not gone.wait(3)
    if frozen:
        os.kill(server.pid or 0, signal.SIGSTOP)
    else:
        server.kill()  # its client sees it
    assert gone.wait(10 if frozen else 3) == frozen
    guard.close()
    server.kill()

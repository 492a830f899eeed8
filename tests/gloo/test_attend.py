"""The attendant of torch's agent: ranks that end, and an agent that waits in a long call of torch's."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from tests.running import Forked
from threed.launcher import attend, elastic
from threed.launcher.processes import be_child


def agent(tmp_path, monkeypatch, rank, limit_s: float, restarts: bool = True,
          neighbour=None, well: bool = False) -> Forked:
    """An agent of one of two nodes, with one rank's process; its main thread sits in a call without an end:
    where ranks have ended well, in torch's exit barrier."""
    def _exit_barrier() -> None:
        time.sleep(60)

    def body() -> int:
        attendant = attend.Attendant()
        attendant.folder = str(tmp_path / "logs")
        attendant.restarts = restarts
        attendant.await_nodes("10.0.0.1:29500", limit_s, 0.0, lambda: "node 0 did not answer")
        for child in filter(None, (neighbour, rank)):
            if os.fork() == 0:
                child()
                os._exit(0)
        if well:
            os.wait()  # it takes the rank's status before the attendant can
            _exit_barrier()
        time.sleep(60)
        return 9

    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(attend, "OTHERS_S", 0.5)
    monkeypatch.setattr(attend, "AGENT_S", 0.5)
    return Forked(tmp_path, body)


def test_a_rank_that_is_killed_before_it_says_who_it_is(tmp_path, monkeypatch):
    """It is named once; and the agent ends though torch waits for a store that has gone."""
    run = agent(tmp_path, monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL), limit_s=3.0)
    assert run.wait(20) == 137
    assert run.output.splitlines() == [f"threed: a rank on {socket.gethostname()} was killed by SIGKILL",
                                       "threed: node 0 did not answer"]
    assert not (tmp_path / "logs").exists()


def test_an_agent_that_sees_the_end_first(tmp_path, monkeypatch):
    """It lingers until the attendant has told others why a rank was killed, and joins no thread that has not
    begun."""
    start = threading.Thread.start

    def late(thread: threading.Thread) -> None:
        if getattr(thread, "_target", None) is attend._tell:
            time.sleep(0.3)
        start(thread)

    def body() -> int:
        attendant = attend.Attendant()
        attendant.await_nodes("10.0.0.1:29500", 60.0, 0.0, lambda: "")
        if os.fork() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        attendant.linger()
        return 5

    monkeypatch.setattr(threading.Thread, "start", late)
    monkeypatch.setattr(attend, "LINGER_S", 0.2)
    run = Forked(tmp_path, body)
    assert run.wait(20) == 5 and "was killed by SIGKILL" in run.output, run.output


def test_an_agent_that_does_not_end(tmp_path, monkeypatch):
    """It is made to, with the status of the rank that was killed."""
    run = agent(tmp_path, monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL), 60.0, restarts=False)
    assert run.wait(20) == 137
    assert "was killed by SIGKILL" in run.output and "has not ended 0.5 s after ranks failed" in run.output


def test_an_agent_that_does_not_end_a_neighbour(tmp_path, monkeypatch):
    """The neighbour lives on, as if it waited for others."""
    def neighbour() -> None:
        be_child(os.getppid())
        elastic.tell_launcher(rank=2)
        time.sleep(60)

    def killed() -> None:
        elastic.tell_launcher(rank=3)
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)

    run = agent(tmp_path, monkeypatch, killed, 60.0, restarts=False, neighbour=neighbour)
    assert run.wait(20) == 137 and "rank 3 on" in run.output and "0.5 s after ranks failed" in run.output


@pytest.mark.parametrize(("code", "status"), [(0, 0), (7, 7)])
def test_the_end_of_all_ranks(code, status, tmp_path, monkeypatch):
    """torch would wait for other nodes for 300 s."""
    def rank() -> None:
        elastic.tell_launcher(rank=3)
        os._exit(code)

    run = agent(tmp_path, monkeypatch, rank, limit_s=2.0, well=code == 0)
    assert run.wait(20) == status
    said = "have done their work" if code == 0 else "node 0 did not answer"
    assert said in run.output and not (tmp_path / "logs").exists()


def test_the_exit_barrier_has_its_name():
    """`attend` knows it by that."""
    assert callable(SimpleElasticAgent._exit_barrier)


def test_an_agent_waits_while_ranks_live(tmp_path, monkeypatch):
    """Limits count from the end of the last rank."""
    def rank() -> None:
        elastic.tell_launcher(rank=1)
        time.sleep(4)
        os._exit(1)

    begin = time.monotonic()
    run = agent(tmp_path, monkeypatch, rank, limit_s=3.0)
    assert run.wait(20) == 1 and time.monotonic() - begin > 7
    assert json.dumps(run.output).count("threed:") == 1

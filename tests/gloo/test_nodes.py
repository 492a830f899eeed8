"""Two nodes on this machine over loopback, and two hosts where one is root: in short what `make cluster` does
at length."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler

from tests.cluster.conftest import TINY
from tests.cluster.hosts import Hosts, missing
from tests.gloo.test_train import free_port
from tests.running import Run, Torchrun, losses
from threed.launcher import agents  # imported before the runs fork


def settings(folder, cache) -> list[str]:
    return [*TINY[1:], *cache, f"run.dir={folder / 'run'}", "run.restarts=0"]


@pytest.fixture
def node(tmp_path, cache):
    """node(number, *overrides) -> one of two nodes."""
    port, runs = str(free_port()), []

    def start(number: int, *overrides: str) -> Torchrun:
        env = {"NNODES": "2", "NODE_RANK": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
               "GPUS_PER_NODE": "1"}
        runs.append(Torchrun(tmp_path, *settings(tmp_path, cache), *overrides, env=env))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


def test_a_stop_and_a_kill(node, tmp_path):
    """SIGTERM to one launcher: all save and end with status 0. A rank is killed: all end with its name."""
    first, second = node(0, "train.steps=100000"), node(1, "train.steps=100000")
    first.wait_for("step      3/100000")
    os.kill(second.process.pid, signal.SIGTERM)
    assert (first.wait(20), second.wait(20)) == (0, 0), first.output + second.output
    assert "stopped on request" in first.output and (tmp_path / "run" / "checkpoints").exists()
    assert second.output.count("once more to stop now, without ") == 1, "the node that was asked answers"
    assert "stopped on request" in (tmp_path / "run" / "log.txt").read_text()
    first, second = node(0, "train.steps=100000"), node(1, "train.steps=100000")
    first.wait_for("resumed from")
    first.wait_for("step ")
    second.ranks()[-1].kill()
    assert (first.wait(20), second.wait(20)) == (137, 137), first.output + second.output
    (row,) = map(json.loads, (tmp_path / "run" / "failures.jsonl").read_text().splitlines())
    assert "was killed by SIGKILL" in row["message"] and row["newest"].startswith("step-")
    assert "was killed by SIGKILL" in first.output and "was killed by SIGKILL" in second.output
    assert "Traceback" not in first.output + second.output


def test_a_second_request_to_one_node(node, tmp_path):
    """Both nodes end at once, and say that it was asked for."""
    first, second = node(0, "train.steps=100000"), node(1, "train.steps=100000")
    first.wait_for("step      3/100000")
    second.ranks()[-1].suspend()  # no step ends any more, and its rank does not answer
    os.kill(second.process.pid, signal.SIGTERM)
    second.wait_for("once more to stop now")
    time.sleep(1.1)
    os.kill(second.process.pid, signal.SIGTERM)
    assert (first.wait(20), second.wait(20)) == (143, 143), first.output + second.output
    assert "stopped at once, as asked; there is no checkpoint" in first.output
    assert "stopped at once, as asked" in second.output and "SIGKILL" not in first.output + second.output
    assert json.loads((tmp_path / "run" / "state.json").read_text())["state"] == "stopped"


def test_an_agent_that_has_ended_is_told_to_end(monkeypatch):
    """It saw the killed rank before our thread did: no traceback in place of the status."""
    def launching(*_):
        def launch(*_):
            signal.signal(signal.SIGQUIT, _terminate_process_handler)  # as torch's agent does
            raise RuntimeError("a rank has failed")
        return launch

    monkeypatch.setattr(agents, "elastic_launch", launching)
    before = signal.getsignal(signal.SIGQUIT)
    try:
        with pytest.raises(RuntimeError, match="a rank has failed"):
            agents._launch(None, None)  # pyright: ignore[reportArgumentType]
        os.kill(os.getpid(), signal.SIGQUIT)
        time.sleep(0.01)
    finally:
        signal.signal(signal.SIGQUIT, before)


@pytest.mark.parametrize("status", [0, 5])
def test_ranks_that_end_one_after_the_other(status, tmp_path):
    """torch's agent would hang if a rank ended before it has taken all results, or wait 30 s for one that has
    done its work and heeds no SIGTERM when another fails."""
    script = tmp_path / "late.py"
    script.write_text("import os, signal, sys, time\n"
                      "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
                      "if os.environ['RANK'] == '0':\n"
                      f"    time.sleep(3)\n    sys.exit({status})\n")
    run = Torchrun(tmp_path, "--nproc-per-node=2", str(script))
    assert run.wait(20) == status, run.output


def test_a_node_that_never_comes(node):
    """It is said while node 0 waits, and why it ends."""
    first = node(0, "run.connect_timeout_s=12")
    assert first.wait(40) == 1
    assert re.search(r"waits for other nodes at 127\.0\.0\.1:\d+ for 10 of 12 s", first.output), first.output
    assert "1 of 2 nodes came within run.connect_timeout_s=12; are all 2 nodes started" in first.output
    assert "Traceback" not in first.output


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_two_hosts(tmp_path, cache):
    """Addresses and names of their own, which resolve nowhere."""
    alone = Run(tmp_path, *TINY, *cache, f"run.dir={tmp_path / 'alone'}", "train.steps=4", "parallel.dp=2")
    assert alone.wait() == 0, alone.output
    with Hosts(2, tmp_path) as hosts:
        runs = [host.start(*settings(tmp_path, cache), "train.steps=4", env={
            "NNODES": "2", "NODE_RANK": str(number), "MASTER_ADDR": "10.77.0.1", "GPUS_PER_NODE": "1"})
            for number, host in enumerate(hosts)]
        assert [run.wait() for run in runs] == [0, 0], [run.output for run in runs]
    assert losses(tmp_path / "run") == losses(tmp_path / "alone")

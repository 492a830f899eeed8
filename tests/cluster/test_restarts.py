"""Ranks, agents and hosts are started again after a fault: all go on from the newest checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
from pathlib import Path

import pytest

import threed.launcher.agents  # noqa: F401  (imported before the runs fork)
from tests.cluster.cluster import FOR_EVER, TINY, Cluster
from tests.cluster.conftest import Clock
from tests.cluster.hosts import Hosts, missing
from tests.cluster.test_hosts import debian
from tests.running import losses, metrics

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
REPEAT = int(os.environ.get("CLUSTER_REPEAT", "1"))  # runs of torchrun itself; ten show that none fails
TORCHRUN = str(Path(sysconfig.get_path("scripts")) / "torchrun")


@pytest.mark.parametrize("fault", ["rank", "agent of host2", "agent of host1", "host2"])
def test_five_restarts(fault, two, alone, measured):
    """Five times in one run. An agent or a host that was killed is started again by somebody, as are all
    agents after the one of node 0, which holds the store."""
    settings = ("train.steps=70", "checkpoint.every=4", "run.restarts=2", "run.restart_wait_s=0.1",
                "run.connect_timeout_s=60")
    two.start(*settings)
    seconds = []
    for step in range(8, 68, 12):
        two.reach(step)
        clock = Clock()
        if fault == "rank":
            two.runs[1].ranks()[0].kill()
        elif fault == "host2":
            two.hosts[1].off()
        else:
            next(run for run in two.runs if run.host.name == fault[-5:]).signal()
        if fault == "agent of host1":
            two.gone(60)
            two.replace(0, *settings)
        elif fault != "rank":
            two.gone(60, two.hosts[1])
            two.hosts[1].link(True)
        if fault != "rank":
            two.replace(1, *settings)
        two.reach(step + 4)
        seconds.append(clock.seconds)
    assert two.end() == [0, 0], two.output
    assert "resumed from" in two.output
    assert losses(two.folder / "run") == alone[2]
    measured(f"killed five times in one run: {fault}", "resumes each time, equal losses; the longest time",
             max(seconds))


def test_fewer_nodes(two, alone, measured):
    """NNODES=1:2, a host is off: the other goes on alone, with the same global batch."""
    settings = ("train.steps=40", "checkpoint.every=4", "run.restarts=2", "run.restart_wait_s=0.1",
                "run.connect_timeout_s=40")
    first, _ = two.start(*settings, env={"NNODES": "1:2", "NODE_RANK": ""})
    two.reach(8)
    clock = Clock()
    two.hosts[1].off()
    assert two.end(first) == [0], two.output
    assert "was saved by 2 ranks (pp 1 x dp 2 x tp 1), and goes on on 1 rank" in first.output, two.output
    for row in metrics(two.folder / "run"):  # on another mesh a step is equal within rounding only
        assert row["train/loss"] == pytest.approx(alone[2][row["step"]][0], rel=1e-5)
    measured("NNODES=1:2, host 2 off", "host 1 goes on alone to the end, dp 2 -> 1, equal losses",
             clock.seconds)


def test_a_node_that_joins(two, measured):
    """NNODES=1:2, begun alone, with loopback for an interface; the second joins at once, over the network."""
    settings = (*FOR_EVER, "checkpoint.every=20", "run.restarts=2", "run.connect_timeout_s=40")
    first = two.node(0, *settings, env={"NNODES": "1:2"})
    two.reach(20)
    clock = Clock()
    second = two.node(1, *settings, env={"NNODES": "1:2"})
    first.wait_for("goes on on 2 ranks", timeout_s=30)  # torch kills a rank that waits after 30 s
    measured("NNODES=1:2, a second node comes", "goes on on both, dp 1 -> 2", clock.seconds)
    two.reach(two.step + 20)
    second.signal(signal.SIGTERM)
    assert two.end() == [0, 0], two.output


def test_a_node_that_joins_two(three, measured):
    """torch's agents would break the run: it is refused, and the two go on."""
    settings, env = (*FOR_EVER, "run.connect_timeout_s=40"), {"NNODES": "1:3"}
    first, second = three.node(0, *settings, env=env), three.node(1, *settings, env=env)
    three.reach(20)
    clock = Clock()
    third = three.node(2, *settings, env=env)
    words = "torch's agents allow no other to join two or more"
    assert third.wait() == 2 and three.said(words, third), three.output
    measured("NNODES=1:3, a node comes to two that run", f"refused with status 2: `{words}`; the two go on",
             clock.seconds)
    three.reach(three.step + 20)
    first.signal(signal.SIGTERM)
    assert three.end(first, second) == [0, 0], three.output


# ---------------------------------------------------------------- torchrun itself


def torchrun(cluster: Cluster, address: str, *words: str) -> None:
    """Start torchrun, as people type it, on each host."""
    count = len(cluster.hosts)
    for number, host in enumerate(cluster.hosts):
        where = ("--nnodes", str(count), "--node-rank", str(number), "--master-addr", address)
        argv = (sys.executable, TORCHRUN, *(where if count > 1 else ()), *words)
        cluster.runs.append(host.execute(*argv, env={"OMP_NUM_THREADS": "1"}))


@pytest.mark.parametrize("fault", ["none", "agent 0", "agent 1"])
@pytest.mark.parametrize("names", ["unresolvable", "debian"])
def test_torchrun_itself(names, fault, two, alone, measured):
    """When one of torchrun's agents is killed, its ranks end, and then the others."""
    if names == "debian":
        debian(two.hosts)
    steps = "train.steps=12" if fault == "none" else "train.steps=100000"
    torchrun(two, "host1" if names == "debian" else "10.77.0.1", "--nproc-per-node=1", "-m", "threed",
             "train", *two.settings(steps))
    if fault == "none":
        assert [run.wait(120) for run in two.runs] == [0, 0], two.output
        assert losses(two.folder / "run") == {step: alone[2][step] for step in range(1, 13)}
        return
    two.reach(20)
    clock = Clock()
    two.runs[int(fault[-1])].signal()
    two.gone(60)
    measured(f"torchrun's agent on host {int(fault[-1]) + 1} killed (names: {names})",
             "all ranks end, no orphan", clock.seconds)


@pytest.mark.parametrize("repetition", range(REPEAT))
@pytest.mark.parametrize("count", [1, 2])
def test_torchrun_starts_again(count, repetition, tmp_path, cache, alone, measured):
    """A rank is killed: torchrun starts all ranks again, and they go on from the newest checkpoint."""
    with Hosts(count, tmp_path) as hosts:
        cluster = Cluster(hosts, tmp_path, cache)
        if count == 1:  # torchrun itself needs the name of a host that is alone
            debian(hosts)
        settings = [*TINY[1:], *cache, f"run.dir={tmp_path / 'run'}", "train.steps=40", "checkpoint.every=4"]
        torchrun(cluster, "10.77.0.1", f"--nproc-per-node={2 // count}", "--max-restarts=2", "-m", "threed",
                 "train", *settings)
        cluster.reach(8)
        clock = Clock()
        cluster.runs[-1].ranks()[-1].kill()
        cluster.reach(20)
        seconds = clock.seconds
        assert cluster.end() == [0] * count, cluster.output
        assert "resumed from" in cluster.output and losses(tmp_path / "run") == {
            step: alone[2][step] for step in range(1, 41)}
        measured(f"torchrun --max-restarts=2 -m threed train, {count} host{'s' * (count > 1)}, a rank killed",
                 "resumes, equal losses", seconds)

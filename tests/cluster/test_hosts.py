"""Agents on two and three hosts (network namespaces) find each other, and say why where they do not."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import signal
import socket
import sys
import time

import pytest

import threed.launcher.agents  # noqa: F401  (imported before the runs fork)
from tests.cluster.conftest import Clock
from tests.cluster.hosts import Host, missing
from tests.running import losses

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
EQUAL = "exit 0, losses equal to one host's"


def debian(hosts: list[Host]) -> None:
    """Names as Debian's installer leaves them: a host's own is 127.0.1.1."""
    for host in hosts:
        host.etc_hosts += f"127.0.1.1 {host.name}\n"
        host.etc_hosts += "".join(f"{other.address} {other.name}\n" for other in hosts if other is not host)


def are_equal(got: dict, alone: dict) -> bool:
    """Whether the losses of 12 steps are those of one host."""
    return got == {step: alone[step] for step in range(1, 13)}


def test_losses_are_those_of_one_host(two, alone, measured):
    """launch/torchrun.sh itself on both, host names that resolve nowhere."""
    clock = Clock()
    for number, host in enumerate(two.hosts):
        env = {"NNODES": "2", "NODE_RANK": str(number), "MASTER_ADDR": "10.77.0.1", "GPUS_PER_NODE": "1",
               "PYTHON": sys.executable}
        two.runs.append(host.execute("launch/torchrun.sh", *two.settings("train.steps=12"), env=env))
    assert two.end() == [0, 0], two.output
    assert are_equal(losses(two.folder / "run"), alone[2])
    measured("2 hosts, launch/torchrun.sh, names that do not resolve", EQUAL, clock.seconds)


@pytest.mark.parametrize("names", ["unresolvable", "debian", "resolvable"])
def test_host_names(names, three, alone, measured):
    """Three hosts, started out of order."""
    if names == "debian":
        debian(three.hosts)
    elif names == "resolvable":
        for host in three.hosts:
            host.etc_hosts += "".join(f"{other.address} {other.name}\n" for other in three.hosts)
    clock = Clock()
    env = {} if names == "unresolvable" else {"MASTER_ADDR": "host1"}
    for number in (2, 0, 1):
        three.node(number, "train.steps=12", env=env)
        time.sleep(1.0)
    assert three.end() == [0, 0, 0], three.output
    assert are_equal(losses(three.folder / "run"), alone[3])
    measured(f"3 hosts started out of order, names: {names}", EQUAL, clock.seconds)


def test_slow_link(two, alone, measured):
    two.hosts[1].slow("2mbit")
    clock = Clock()
    two.start("train.steps=12")
    assert two.end() == [0, 0], two.output
    assert are_equal(losses(two.folder / "run"), alone[2])
    measured("2 Mbit/s from host 2 (tbf)", "exit 0, equal losses", clock.seconds)


@pytest.mark.skipif(shutil.which("nft") is None, reason="nft (package nftables) is missing")
def test_lost_packets(two, alone, measured):
    for host in two.hosts:
        host.lossy(5)
    clock = Clock()
    two.start("train.steps=12")
    assert two.end() == [0, 0], two.output
    assert are_equal(losses(two.folder / "run"), alone[2])
    measured("5% of all packets lost (nft), both ways", "exit 0, equal losses", clock.seconds)


@pytest.mark.parametrize("variables", ["PyTorchJob", "PyTorchJob of v1.5", "elastic PyTorchJob"])
def test_pods(variables, two, alone, measured):
    """What the training operator sets in its pods."""
    common = {"NNODES": "", "NODE_RANK": "", "GPUS_PER_NODE": "", "MASTER_ADDR": "", "PYTHONUNBUFFERED": "0"}
    clock = Clock()
    for number, host in enumerate(two.hosts):
        host.etc_hosts += "10.77.0.1 job-master-0\n"
        own = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": str(number)}
        if variables == "PyTorchJob":
            own |= {"PET_NNODES": "2", "PET_NODE_RANK": str(number), "PET_NPROC_PER_NODE": "1"}
        elif variables == "PyTorchJob of v1.5":
            own |= {"MASTER_ADDR": "localhost" if number == 0 else "job-master-0", "GPUS_PER_NODE": "1"}
        else:
            own = {"PET_RDZV_ENDPOINT": "job-master-0:23456", "PET_RDZV_BACKEND": "c10d", "PET_NNODES": "1:2",
                   "PET_NPROC_PER_NODE": "1"}
        # with c10d, nodes that are fewer than the most wait for a tenth of the limit
        two.node(number, "train.steps=12", "run.connect_timeout_s=100", env=common | own)
    assert two.end() == [0, 0], two.output
    assert are_equal(losses(two.folder / "run"), alone[2])
    measured(f"variables of {variables}", EQUAL, clock.seconds)


# ---------------------------------------------------------------- faults before the first step


def test_a_node_never_comes(two, measured):
    clock = Clock()
    run = two.node(0, "run.connect_timeout_s=12")
    assert two.end() == [1]
    assert two.said("host1 waits for other nodes at 10.77.0.1:29500 for 10 of 12 s"), run.output
    words = "1 of 2 nodes came within run.connect_timeout_s=12"
    assert two.said(words) and "are all 2 nodes started" in run.output, run.output
    measured("a node never comes (limit 12 s)", f"said after 10 s, then ends with status 1; `{words}`",
             clock.seconds)


@pytest.mark.parametrize(("address", "words"), [
    ("10.77.0.1", "is node 0 started, is MASTER_ADDR=10.77.0.1 its address"),
    ("10.77.0.99", "is MASTER_ADDR=10.77.0.99 its address"),
    ("192.0.2.1", "no network leads from host2 to 192.0.2.1"),
    ("no-such-host", "the name no-such-host does not resolve on host2"),
    ("127.0.0.1", "MASTER_ADDR=127.0.0.1 leads back to host2 itself")])
def test_node_0_never_comes(address, words, two, measured):
    """Or MASTER_ADDR is wrong: nobody has it, there is no way to it, it does not resolve, it is this host."""
    clock = Clock()
    run = two.node(1, "run.connect_timeout_s=12", env={"MASTER_ADDR": address})
    assert two.end() == [1]
    assert two.said(f"host2 waits for other nodes at {address}:29500 for 10 of 12 s"), run.output
    assert two.said(f"node 0 did not answer at {address}:29500 within run.connect_timeout_s=12"), run.output
    assert words in run.output, run.output
    measured(f"node 0 never comes, MASTER_ADDR={address} (limit 12 s)", f"ends with status 1; `{words}`",
             clock.seconds)


@contextlib.contextmanager
def other_program(host: Host, answer: bytes):
    """Something that takes connections at MASTER_PORT."""
    ready = multiprocessing.get_context("fork").Event()

    def body() -> None:
        host.enter()
        with socket.create_server(("", 29500)) as listener:
            ready.set()
            while True:
                connection, _ = listener.accept()
                connection.sendall(answer)

    process = multiprocessing.get_context("fork").Process(target=body, daemon=True)
    process.start()
    assert ready.wait(20)
    yield
    process.kill()
    process.join()


def test_the_port_is_taken(two, measured):
    """By a program that answers in its own way: node 0 says so at once, node 1 that this is not node 0."""
    clock = Clock()
    with other_program(two.hosts[0], b"HTTP/1.1 400 Bad Request\r\n\r\n"):
        runs = two.start("run.connect_timeout_s=12")
        assert runs[0].wait() == 2, two.output
        seconds = clock.seconds
        assert runs[1].wait() == 1, two.output
    assert two.said("MASTER_PORT=29500 is taken by another program on host1", runs[0]), two.output
    assert "is MASTER_PORT=29500" in runs[1].output, two.output
    assert two.end() == [2, 1]
    measured("MASTER_PORT taken by another program", "node 0 ends with status 2 and says so", seconds)
    measured("... and node 1 (limit 12 s)", "ends with status 1, and asks after node 0's port", clock.seconds)


def test_a_stop_before_the_first_step(two, measured):
    first = two.node(0)
    first.wait_for("host1 waits for other nodes at 10.77.0.1:29500 for 10 of 20 s")
    clock = Clock()
    first.signal(signal.SIGTERM)
    assert two.end() == [143] and two.said("stopped by SIGTERM on host1 before the first step")
    measured("SIGTERM while nodes are awaited", "ends, `stopped by SIGTERM on host1 before the first step`",
             clock.seconds)


def test_run_dir_is_not_shared(two, measured):
    clock = Clock()
    two.node(0, "train.steps=3")
    two.node(1, "train.steps=3", own=two.folder / "run")
    assert two.end() == [2, 2], two.output
    assert two.said("is not the same folder on host2 as on host1"), two.output
    assert not (two.folder / "run" / "checkpoints").exists()
    words = "ends with status 2 before step 1; `is not the same folder on host2 as on host1`"
    measured("run.dir not shared", words, clock.seconds)


def test_prepared_data_is_not_shared(two, measured, tmp_path):
    clock = Clock()
    two.cache = [two.cache[0], f"data.cache={tmp_path / 'cache'}"]
    two.node(0, "train.steps=3")
    two.node(1, "train.steps=3", own=tmp_path / "cache")
    assert two.end() == [2, 2], two.output
    assert "on host2 it is missing" in two.output
    measured("prepared data not shared", "ends with status 2 before step 1; `on host2 it is missing`",
             clock.seconds)


@pytest.mark.parametrize("restarts", [0, 3])
def test_another_config_on_a_host(restarts, two, measured):
    """A mistake is not started again."""
    clock = Clock()
    two.node(0, "train.steps=3", f"run.restarts={restarts}")
    two.node(1, "train.steps=3", f"run.restarts={restarts}", "optimizer.lr=0.5")
    assert two.end() == [2, 2], two.output
    assert two.said("optimizer.lr") and "restart 1 of" not in two.output, two.output
    measured(f"another config on host 2, run.restarts={restarts}", "refused with status 2, key named",
             clock.seconds)


@pytest.mark.parametrize("twice", [0, 1])
def test_two_nodes_with_one_number(twice, three, alone, measured):
    """One of them is left out, and says so at the limit; if the others train, they are right."""
    clock = Clock()
    for host, number in enumerate((0, 1, twice)):
        env = {"NNODES": "2", "NODE_RANK": str(number)}
        three.node(host, "train.steps=12", "run.connect_timeout_s=12", env=env)
    statuses = three.end()
    left_out = [run for run, status in zip(three.runs, statuses, strict=True) if status]
    assert left_out and all("threed: " in run.output for run in left_out), three.output
    if 0 in statuses:
        assert len(left_out) == 1 and are_equal(losses(three.folder / "run"), alone[2]), three.output
    measured(f"two nodes {twice} of 2 (limit 12 s)", f"one is left out, all end: statuses {statuses}",
             clock.seconds)


def test_another_number_of_nodes(two, measured):
    clock, words = Clock(), "NNODES is 3 on host2 and 2 on node 0"
    two.node(0, "train.steps=12")
    two.node(1, "train.steps=12", env={"NNODES": "3"})
    assert two.end() == [2, 2] and two.said(words), two.output
    measured("another NNODES on host 2", f"refused with status 2, `{words}`", clock.seconds)


def test_loopback_is_refused(two, measured):
    clock = Clock()
    two.node(0, env={"GLOO_SOCKET_IFNAME": "lo"})
    two.node(1)
    assert two.end() == [2, 2], two.output
    assert two.said("GLOO_SOCKET_IFNAME=lo on host1 is loopback"), two.output
    measured("GLOO_SOCKET_IFNAME=lo with two hosts", "refused with status 2, and the right interface",
             clock.seconds)

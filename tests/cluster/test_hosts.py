"""Runs on two and three hosts (network namespaces): they find each other, a fault on one ends all with a
message that names it, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

import threed.nodes  # noqa: F401  (imported before the runs fork)
from tests.cluster.conftest import TINY, Clock
from tests.cluster.hosts import Host, HostRun, Hosts, missing
from tests.running import Run, losses

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
FOR_EVER = ("train.steps=100000", "monitor.console_every=50")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache):
    """Losses of 12 steps on this machine alone, with dp=2 and dp=3."""
    results = {}
    for dp in (2, 3):
        folder = tmp_path_factory.mktemp(f"alone-{dp}")
        run = Run(folder, *TINY, *cache, f"run.dir={folder / 'run'}", "train.steps=12", f"parallel.dp={dp}")
        assert run.wait() == 0, run.output
        results[dp] = losses(folder / "run")
    return results


class Cluster:
    """Hosts, and one run over all of them."""

    def __init__(self, hosts: list[Host], folder: Path, cache: list[str]):
        self.hosts, self.folder, self.cache = hosts, folder, cache
        self.runs: list[HostRun] = []

    def node(self, number: int, *overrides: str, env: dict[str, str] | None = None,
             own: Path | None = None) -> HostRun:
        """Start node `number` on its host."""
        given = {"NNODES": str(len(self.hosts)), "NODE_RANK": str(number),
                 "MASTER_ADDR": self.hosts[0].address,
                 "GPUS_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
        given = {name: value for name, value in (given | (env or {})).items() if value != ""}
        run = self.hosts[number].start(*TINY, *self.cache, f"run.dir={self.folder / 'run'}", "run.restarts=0",
                                       *overrides, env=given, own=own)
        self.runs.append(run)
        return run

    def start(self, *overrides: str, env: dict[str, str] | None = None) -> list[HostRun]:
        """A node on each host."""
        return [self.node(number, *overrides, env=env) for number in range(len(self.hosts))]

    def steps(self, number: int, timeout_s: float = 90.0) -> None:
        """Return when so many steps are done."""
        file, until = self.folder / "run" / "metrics.jsonl", time.monotonic() + timeout_s
        while not file.exists() or len(file.read_text().splitlines()) < number:
            assert time.monotonic() < until, self.output
            time.sleep(0.02)

    @property
    def output(self) -> str:
        return "\n".join(f"---- {run.host.name}\n{run.output}" for run in self.runs)

    def end(self, *runs: HostRun, timeout_s: float = 90.0) -> list[int]:
        """Exit statuses, once all have ended and nothing is left of any."""
        statuses = [run.wait(timeout_s) for run in runs or self.runs]
        left = [process for host in self.hosts for process in host.processes()] if not runs else []
        _, alive = psutil.wait_procs(left, timeout=10)
        assert not alive, [process.cmdline() for process in alive]
        assert "Traceback" not in self.output and "frame #" not in self.output, self.output
        return statuses

    def gone(self, limit_s: float, *hosts: Host) -> None:
        """Return when no process is left on the hosts."""
        until = time.monotonic() + limit_s
        while left := [process for host in hosts or self.hosts for process in host.processes()]:
            assert time.monotonic() < until, (left, self.output)
            time.sleep(0.1)


@pytest.fixture
def two(tmp_path, cache):
    with Hosts(2, tmp_path) as hosts:
        yield Cluster(hosts, tmp_path, cache)


@pytest.fixture
def three(tmp_path, cache):
    with Hosts(3, tmp_path) as hosts:
        yield Cluster(hosts, tmp_path, cache)


# ---------------------------------------------------------------- they find each other


def test_losses_are_those_of_one_host(two, alone, measured):
    """launch/torchrun.sh itself on both, host names that resolve nowhere."""
    clock = Clock()
    for number, host in enumerate(two.hosts):
        env = {"NNODES": "2", "NODE_RANK": str(number), "MASTER_ADDR": "10.77.0.1", "GPUS_PER_NODE": "1",
               "PYTHON": sys.executable}
        run = host.start("launch/torchrun.sh", *TINY[1:], *two.cache, f"run.dir={two.folder / 'run'}",
                         "train.steps=12", env=env)
        host.runs.append(run)
        two.runs.append(run)
    assert two.end() == [0, 0], two.output
    assert losses(two.folder / "run") == alone[2]
    measured("2 hosts, launch/torchrun.sh, names that do not resolve", "exit 0, losses equal to one host's",
             clock.seconds)


@pytest.mark.parametrize("fault", ["none", "agent 0", "agent 1"])
@pytest.mark.parametrize("names", ["unresolvable", "debian"])
def test_torchrun_itself(names, fault, two, alone, measured):
    """torchrun's agents instead of threed's launchers; when one is killed, its ranks end, and then the
    others."""
    for number, host in enumerate(two.hosts):
        if names == "debian":
            host.etc_hosts += (
                f"127.0.1.1 {host.name}\n{two.hosts[1 - number].address} {two.hosts[1 - number].name}\n"
            )
        address = "host1" if names == "debian" else "10.77.0.1"
        argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}",
                "--nproc-per-node=1",
                f"--master-addr={address}", "--master-port=29500", "-m", "threed.cli", *TINY, *two.cache,
                f"run.dir={two.folder / 'run'}", "train.steps=12" if fault == "none"
                else "train.steps=100000"]
        two.runs.append(host.start(*argv))
    if fault == "none":
        assert [run.wait(120) for run in two.runs] == [0, 0], two.output
        assert losses(two.folder / "run") == alone[2]
        return
    two.steps(20)
    clock = Clock()
    two.runs[int(fault[-1])].kill()
    two.gone(60)
    measured(f"torchrun's agent on host {int(fault[-1]) + 1} killed (names: {names})",
             "all ranks end, no orphan", clock.seconds)


@pytest.mark.parametrize("names", ["unresolvable", "debian", "resolvable"])
def test_host_names(names, three, alone, measured):
    """Three hosts, started out of order. On Debian a host's own name is 127.0.1.1."""
    for host in three.hosts:
        others = "".join(f"{other.address} {other.name}\n" for other in three.hosts if other is not host
                         or names == "resolvable")
        if names == "debian":
            host.etc_hosts += f"127.0.1.1 {host.name}\n{others}"
        elif names == "resolvable":
            host.etc_hosts += others
    clock = Clock()
    env = {} if names == "unresolvable" else {"MASTER_ADDR": "host1"}
    for number in (2, 0, 1):
        three.node(number, "train.steps=12", env=env)
        time.sleep(1.0)
    assert three.end() == [0, 0, 0], three.output
    assert losses(three.folder / "run") == alone[3]
    measured(f"3 hosts started out of order, names: {names}", "exit 0, losses equal to one host's",
             clock.seconds)


def test_slow_link(two, alone, measured):
    two.hosts[1].slow("2mbit")
    clock = Clock()
    two.start("train.steps=12")
    assert two.end() == [0, 0], two.output
    assert losses(two.folder / "run") == alone[2]
    measured("2 Mbit/s from host 2 (tbf)", "exit 0, equal losses", clock.seconds)


@pytest.mark.skipif(shutil.which("nft") is None, reason="nft (package nftables) is missing")
def test_lost_packets(two, alone, measured):
    for host in two.hosts:
        host.lossy(5)
    clock = Clock()
    two.start("train.steps=12")
    assert two.end() == [0, 0], two.output
    assert losses(two.folder / "run") == alone[2]
    measured("5% of all packets lost (nft), both ways", "exit 0, equal losses", clock.seconds)


@pytest.mark.parametrize("variables", ["PyTorchJob", "PyTorchJob of v1.5", "elastic PyTorchJob"])
def test_pods(variables, two, alone, measured):
    """What the training operator sets in its pods."""
    common = {"NNODES": "", "NODE_RANK": "", "GPUS_PER_NODE": "", "MASTER_ADDR": "", "PYTHONUNBUFFERED": "0"}
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
        two.node(number, "train.steps=12", env=common | own)
    assert two.end() == [0, 0], two.output
    assert losses(two.folder / "run") == alone[2]
    measured(f"variables of {variables}", "exit 0, losses equal to one host's", None)


# ---------------------------------------------------------------- faults while they run


def test_a_rank_is_killed(two, measured):
    first, second = two.start(*FOR_EVER)
    two.steps(20)
    clock = Clock()
    second.ranks()[0].kill()
    assert two.end() == [137, 137], two.output
    assert all("rank 1 on host2 was killed by SIGKILL" in run.output for run in (first, second)), two.output
    measured("SIGKILL of a rank on host 2", "all end; `rank 1 on host2 was killed by SIGKILL` on both",
             clock.seconds)


@pytest.mark.parametrize("number", [0, 1])
def test_a_launcher_is_killed(number, two, measured):
    """No rank trains on unseen, and the folder is free."""
    runs = two.start(*FOR_EVER)
    two.steps(20)
    clock = Clock()
    runs[number].kill()
    two.gone(60)
    other = runs[1 - number]
    assert other.wait(5) == 1
    words = "node 0 at 10.77.0.1 has gone" if number == 0 else "node 1 (host2) has gone"
    assert words in other.output, two.output
    measured(f"SIGKILL of host {number + 1}'s launcher", f"all end, no orphan; `{words}`", clock.seconds)
    two.runs.clear()
    two.start("train.steps=21", "train.resume=never")
    assert two.end() == [0, 0], two.output


@pytest.mark.parametrize("fault", ["off", "cut"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_host_is_off_or_cut_off(fault, number, two, measured):
    runs = two.start(*FOR_EVER, "run.timeout_s=120")
    two.steps(20)
    clock = Clock()
    two.hosts[number].off() if fault == "off" else two.hosts[number].link(False)
    two.gone(60)
    seconds, other = clock.seconds, runs[1 - number]
    words = (
        "node 0 at 10.77.0.1 has gone: no sign of life"
        if number == 0
        else "node 1 (host2) has gone: no sign of life"
    )
    assert other.wait(5) == 1 and words in other.output, two.output
    measured(f"host {number + 1} {'off' if fault == 'off' else 'cut off for ever'}",
             f"all end; `{words} for 30 s`", seconds)


def test_the_link_is_down_for_a_moment(two, alone, measured):
    """Five seconds are not noticed."""
    two.start("train.steps=100000", "monitor.console_every=50", "checkpoint.every=12", "checkpoint.keep=0")
    two.steps(20)
    two.hosts[1].link(False)
    time.sleep(5)
    two.hosts[1].link(True)
    clock = Clock()
    two.steps(len((two.folder / "run" / "metrics.jsonl").read_text().splitlines()) + 20)
    measured("link down for 5 s", "goes on; seconds until 20 further steps were done", clock.seconds)
    two.runs[0].process.terminate()
    assert two.end() == [0, 0], two.output
    steps, got = range(1, 13), losses(two.folder / "run")
    assert [got[step] for step in steps] == [alone[2][step] for step in steps]


@pytest.mark.parametrize("number", [0, 1])
def test_a_requested_stop(number, two, measured):
    """SIGTERM to one host's launcher: all save, and end with status 0."""
    runs = two.start(*FOR_EVER)
    two.steps(20)
    clock = Clock()
    assert runs[number].process.pid is not None
    os.kill(runs[number].process.pid, signal.SIGTERM)
    assert two.end() == [0, 0], two.output
    assert "stopped on request after step" in two.output
    measured(f"SIGTERM to host {number + 1}'s launcher", "saved, both end with status 0", clock.seconds)


def test_a_stop_before_the_first_step(two, measured):
    first = two.node(0)
    first.wait_for("1 of 2 nodes after 10 s, waiting for node 1")
    clock = Clock()
    assert first.process.pid is not None
    os.kill(first.process.pid, signal.SIGTERM)
    assert two.end() == [143] and "stopped by SIGTERM on host1 before the first step" in two.output
    measured("SIGTERM while nodes are awaited", "ends, `stopped by SIGTERM on host1 before the first step`",
             clock.seconds)


# ---------------------------------------------------------------- starting again


@pytest.mark.parametrize("fault", ["rank", "launcher of host2", "launcher of host1", "host2"])
def test_restarts(fault, two, alone, measured):
    """All ranks start again from the newest checkpoint; a launcher or host that was killed is started again
    by somebody."""
    settings = ("train.steps=12", "checkpoint.every=2", "run.restarts=2", "run.connect_timeout_s=60")
    runs = two.start(*settings)
    two.steps(5)
    clock = Clock()
    if fault == "rank":
        runs[1].ranks()[0].kill()
    else:
        number = 0 if fault.endswith("host1") else 1
        two.hosts[number].off() if fault == "host2" else runs[number].kill()
        two.gone(60, two.hosts[number])
        runs[number].process.join()
        two.hosts[number].link(True)
        two.runs.remove(runs[number])
        two.node(number, *settings)
    assert two.end() == [0, 0], two.output
    assert "resumed from" in two.output and losses(two.folder / "run") == alone[2]
    measured(f"run.restarts=2, killed: {fault}", "resumes, equal losses", clock.seconds)


def test_fewer_nodes(two, alone, measured):
    """NNODES=1:2, a host is off: the other goes on alone, with the same global batch."""
    settings = ("train.steps=12", "checkpoint.every=2", "run.restarts=2", "run.connect_timeout_s=40")
    first, _ = two.start(*settings, env={"NNODES": "1:2"})
    two.steps(5)
    clock = Clock()
    two.hosts[1].off()
    assert two.end(first) == [0], two.output
    assert "going on with 1 of 2 nodes: node 0 (host1)" in first.output, two.output
    assert "was saved by 2 ranks (pp 1 x dp 2 x tp 1), and goes on on 1 rank" in first.output, two.output
    for step, (loss, _) in losses_of_last(two.folder / "run").items():
        assert loss == pytest.approx(alone[2][step][0], rel=1e-5)
    measured("NNODES=1:2, host 2 off", "host 1 goes on alone to the end, dp 2 -> 1, equal losses",
             clock.seconds)


def test_a_node_that_joins(two, measured):
    """NNODES=1:2, begun alone, with loopback for an interface; the second joins at the next start, over the
    network."""
    settings = (*FOR_EVER, "checkpoint.every=20", "run.restarts=2", "run.connect_timeout_s=40")
    first = two.node(0, *settings, env={"NNODES": "1:2"})
    two.steps(20)
    second = two.node(1, *settings, env={"NNODES": "1:2"})
    second.wait_for("the run is under way with 1 nodes; this one joins it at its next start")
    clock = Clock()
    first.ranks()[0].kill()
    first.wait_for("goes on on 2 ranks")
    measured("NNODES=1:2, a second node comes, a rank is killed", "goes on on both, dp 1 -> 2", clock.seconds)
    two.steps(len((two.folder / "run" / "metrics.jsonl").read_text().splitlines()) + 20)
    assert second.process.pid is not None
    os.kill(second.process.pid, signal.SIGTERM)
    assert two.end() == [0, 0], two.output


def losses_of_last(folder: Path) -> dict[int, tuple[float, float]]:
    """Step -> what it had the last time: on another mesh a repeated step is equal within rounding only."""
    from tests.running import metrics

    return {row["step"]: (row["train/loss"], row["train/grad_norm"]) for row in metrics(folder)}


# ---------------------------------------------------------------- faults before the first step


def test_a_node_never_comes(two, measured):
    clock = Clock()
    run = two.node(0, "run.connect_timeout_s=12")
    assert two.end() == [1]
    assert "1 of 2 nodes after 10 s, waiting for node 1" in run.output
    assert "1 of 2 nodes came within run.connect_timeout_s=12; missing: node 1" in run.output
    measured("a node never comes (limit 12 s)", "`1 of 2 nodes after 10 s, waiting for node 1`, then ends",
             clock.seconds)


@pytest.mark.parametrize(("address", "words"), [
    ("10.77.0.1", "connection refused"), ("10.77.0.99", "10.77.0.99:29500"),
    ("192.0.2.1", "network is unreachable"),
    ("no-such-host", "the name no-such-host does not resolve"), ("127.0.0.1", "leads back to host2 itself")])
def test_node_0_never_comes(address, words, two, measured):
    """Or MASTER_ADDR is wrong: nobody has it, there is no way to it, it does not resolve, it is this host."""
    clock = Clock()
    run = two.node(1, "run.connect_timeout_s=12", env={"MASTER_ADDR": address})
    assert two.end() == [1]
    assert "node 0 did not answer within run.connect_timeout_s=12" in run.output and words in run.output, (
        run.output
    )
    measured(f"node 0 never comes, MASTER_ADDR={address} (limit 12 s)", f"ends; `{words}`", clock.seconds)


@contextlib.contextmanager
def other_program(host: Host, answer: bytes):
    """Something that takes connections at MASTER_PORT."""
    import multiprocessing

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
    """By a program that answers in its own way: node 0 and node 1 each say so at once."""
    clock = Clock()
    with other_program(two.hosts[0], b"HTTP/1.1 400 Bad Request\r\n\r\n"):
        runs = two.start()
        assert [run.wait() for run in runs] == [2, 2], two.output
    assert "MASTER_PORT=29500 is taken by another program on host1" in runs[0].output
    assert "10.77.0.1:29500 is not threed: another program has this port" in runs[1].output
    measured("MASTER_PORT taken by another program", "both end with status 2 and say so", clock.seconds)


def test_run_dir_is_not_shared(two, measured):
    clock = Clock()
    two.node(0, "train.steps=3")
    two.node(1, "train.steps=3", own=two.folder / "run")
    assert two.end() == [2, 2], two.output
    assert "is not the same folder on host2 as on host1" in two.output
    assert not (two.folder / "run" / "checkpoints").exists()
    words = "ends with status 2 before step 1; `is not the same folder on host2 as on host1`"
    measured("run.dir not shared", words, clock.seconds)


def test_prepared_data_is_not_shared(two, measured, tmp_path):
    clock = Clock()
    cache = [two.cache[0], f"data.cache={tmp_path / 'cache'}"]
    two.cache = cache
    two.node(0, "train.steps=3")
    two.node(1, "train.steps=3", own=tmp_path / "cache")
    assert two.end() == [2, 2], two.output
    assert "on host2 it is missing" in two.output
    measured("prepared data not shared", "ends with status 2 before step 1; `on host2 it is missing`",
             clock.seconds)


def test_another_config_on_a_host(two, measured):
    clock = Clock()
    two.node(0, "train.steps=3")
    two.node(1, "train.steps=3", "optimizer.lr=0.5")
    assert two.end() == [2, 2], two.output
    assert "optimizer.lr" in two.output
    measured("another config on host 2", "refused, key named", clock.seconds)


def test_two_nodes_with_one_number(two, measured):
    clock = Clock()
    two.node(0)
    run = two.node(0, env={})
    run_on_two = two.hosts[1].start(*TINY, *two.cache, f"run.dir={two.folder / 'run'}", env={
        "NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "10.77.0.1", "GPUS_PER_NODE": "1"})
    assert run.wait() == 2 and "is taken by another program on host1" in run.output
    assert run_on_two.wait() == 2 and "NNODES is 3 on host2 and 2 on node 0" in run_on_two.output
    measured("two nodes 0; another NNODES on host 2", "each refused with status 2", clock.seconds)


def test_loopback_is_refused(two, measured):
    clock = Clock()
    two.node(0, env={"GLOO_SOCKET_IFNAME": "lo"})
    two.node(1)
    assert two.end() == [2, 2], two.output
    assert "GLOO_SOCKET_IFNAME=lo on host1 is loopback" in two.output
    measured("GLOO_SOCKET_IFNAME=lo with two hosts", "refused with status 2, and the right interface",
             clock.seconds)

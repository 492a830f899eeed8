"""A real Slurm of two nodes, each a network namespace with a name of its own: sbatch launch/slurm.sbatch with
threed itself. srun starts a task a rank; with MAX_RESTARTS an agent a node."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import threed.launcher.local  # noqa: F401 (imported once, before forks)
from tests.cluster.conftest import TINY, Clock
from tests.cluster.hosts import Host, Hosts, missing
from tests.running import Run, losses
from threed.launcher.processes import die_with_parent

TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol")
REASON = missing() or next((f"{tool} is missing: make cluster" for tool in TOOLS
                            if shutil.which(tool) is None), None)
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

CONFIG = """
ClusterName=lab
SlurmctldHost=host1(10.77.0.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait=5
GresTypes=gpu
NodeName=host1 NodeAddr=10.77.0.1 CPUs=2 Gres=gpu:2 RealMemory=4000 State=UNKNOWN
NodeName=host2 NodeAddr=10.77.0.2 CPUs=2 Gres=gpu:2 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=host1,host2 Default=YES MaxTime=10:00 State=UP
"""


class Slurm:
    """slurmctld and a slurmd on the first host, a slurmd on the second."""

    def __init__(self, hosts: list[Host], folder: Path):
        self.hosts, self.folder = hosts, folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHON": sys.executable,
                    "OMP_NUM_THREADS": "1"}
        (folder / "state").mkdir(parents=True)
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/tty[0-1]\n")  # to Slurm any device is a GPU
        self.daemon(hosts[0], "slurmctld", "-D")
        for host in hosts:
            self.daemon(host, "slurmd", "-D", "-N", host.name)
        self.wait_for(lambda: self.control("show", "node").count("State=IDLE") == 2, 60)

    def daemon(self, host: Host, *argv: str) -> None:
        parent = os.getpid()

        def body() -> None:
            die_with_parent(parent)
            host.enter()
            log = os.open(self.folder / f"{argv[0]}-{host.name}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.execvpe(argv[0], argv, self.env)

        multiprocessing.get_context("fork").Process(target=body, daemon=True).start()

    def command(self, *argv: str) -> str:
        """On the first host."""
        entered = ["nsenter", f"--net={self.hosts[0].path}", *argv]
        done = subprocess.run(entered, env=self.env, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def control(self, *words: str) -> str:
        return self.command("scontrol", *words)

    def submit(self, *options: str, overrides: list[str], ranks: int = 1, restarts: int = 0) -> str:
        """The number of a job of two nodes with so many ranks each."""
        words = ["--nodes=2", f"--gpus-per-node={ranks}", f"--output={self.folder}/job-%j.log", *options]
        given = [f"MAX_RESTARTS={restarts}"] if restarts else []
        out = self.command("env", *given, "sbatch", *words, "launch/slurm.sbatch", *overrides)
        match = re.search(r"Submitted batch job (\d+)", out)
        assert match, out
        return match[1]

    def job(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.control("show", "job", job)))

    def log(self, job: str) -> str:
        path = self.folder / f"job-{job}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, condition, timeout_s: float = 120.0, job: str = "") -> None:
        until = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until, (self.log(job), self.control("show", "job"),
                                              self.control("show", "node"))
            time.sleep(0.5)

    def end(self, job: str, timeout_s: float = 200.0) -> str:
        """Its state, once it has ended."""
        ended = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED")
        self.wait_for(lambda: self.job(job).get("JobState") in ended, timeout_s, job)
        return self.job(job)["JobState"]

    def empty(self) -> bool:
        """Whether no rank and no agent is left on any node, soon after a job's end."""
        until = time.monotonic() + 10
        while any(ranks(host) for host in self.hosts) and time.monotonic() < until:
            time.sleep(0.1)
        return not any(ranks(host) for host in self.hosts)

    def step(self, job: str, count: int) -> None:
        """Wait until the job's log has this many more lines of steps."""
        before = self.log(job).count("\nstep ")
        self.wait_for(lambda: self.log(job).count("\nstep ") >= before + count, 60, job)


def ranks(host: Host) -> list[psutil.Process]:
    """The ranks that run on a host: the programs in Python that have no children, as agents have."""
    found = []
    for process in host.processes():
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("python") and not process.children():
                found.append(process)
    return found


@pytest.fixture
def slurm(tmp_path):
    with Hosts(2, tmp_path) as hosts:
        yield Slurm(hosts, tmp_path / "slurm")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache):
    """alone(n): the losses of n ranks on one host."""
    @functools.cache
    def measure(ranks: int) -> dict:
        folder = tmp_path_factory.mktemp("alone")
        run = Run(folder, *TINY, *cache, f"run.dir={folder / 'run'}", "train.steps=12",
                  f"parallel.dp={ranks}")
        assert run.wait() == 0, run.output
        return losses(folder / "run")

    return measure


@pytest.fixture
def settings(tmp_path, cache):
    """A run without an end, which saves often."""
    return [*TINY[1:], *cache, f"run.dir={tmp_path / 'run'}", "train.steps=1000000", "checkpoint.every=50",
            "monitor.console_every=20"]


def test_a_run(slurm, tmp_path, settings, alone, measured):
    """Two ranks a node, as many as GPUs; tasks are processes of Slurm's, and no agent runs."""
    clock = Clock()
    job = slurm.submit("--cpus-per-task=2", overrides=[*settings, "train.steps=12"], ranks=2)
    assert slurm.end(job) == "COMPLETED" and losses(tmp_path / "run") == alone(4), slurm.log(job)
    assert "2 nodes (host[1-2]) x 2 ranks" in slurm.log(job) and "\n4 ranks = " in slurm.log(job)
    assert "processors" not in slurm.log(job), slurm.log(job)
    measured("Slurm, 2 nodes x 2 ranks, sbatch launch/slurm.sbatch", "COMPLETED, losses equal to one host's",
             clock.seconds)


def test_signals_and_a_rank_that_is_killed(slurm, settings, measured):
    """The next job goes on where SIGUSR1 saved."""
    settings = [*settings, "checkpoint.every=1000000"]  # no other checkpoint than those asked for
    job = slurm.submit(overrides=settings)
    slurm.step(job, 5)
    assert "\nsaved " not in slurm.log(job)
    clock = Clock()
    slurm.command("scancel", "--signal=USR1", job)
    slurm.wait_for(lambda: "\nsaved " in slurm.log(job), 20, job)
    measured("Slurm, scancel --signal=USR1", "saved, goes on", clock.seconds)
    slurm.step(job, 3)

    victim, = ranks(slurm.hosts[1])
    victim.kill()
    clock = Clock()
    assert slurm.end(job, 30) == "FAILED", slurm.log(job)
    assert "host2: task 1: Killed" in slurm.log(job) and "Traceback" not in slurm.log(job), slurm.log(job)
    assert slurm.empty()
    measured("Slurm, SIGKILL of a rank on host 2", "FAILED, named by srun", clock.seconds)

    job = slurm.submit(overrides=settings)
    slurm.wait_for(lambda: "resumed from" in slurm.log(job), job=job)
    slurm.step(job, 3)
    clock = Clock()
    slurm.command("scancel", "--signal=TERM", job)
    assert slurm.end(job, 30) == "COMPLETED", slurm.log(job)
    assert "stopped on request after step" in slurm.log(job) and "Traceback" not in slurm.log(job)
    measured("Slurm, the next job; scancel --signal=TERM", "resumes; saved, COMPLETED", clock.seconds)


def test_a_node_that_fails(slurm, tmp_path, settings, measured):
    """The job goes back into the queue when its node has gone, and goes on."""
    job = slurm.submit(overrides=[*settings, "train.steps=400"])
    slurm.wait_for(lambda: "step 100/400" in slurm.log(job), job=job)
    second = slurm.hosts[1]
    second.off()
    clock = Clock()
    slurm.wait_for(lambda: slurm.job(job).get("Restarts") == "1", job=job)
    measured("Slurm, a node fails (SlurmdTimeout=20)", "the job is back in the queue", clock.seconds)
    second.link(True)
    slurm.daemon(second, "slurmd", "-D", "-N", second.name)
    slurm.control("update", "NodeName=host2", "State=RESUME")
    slurm.wait_for(lambda: slurm.control("show", "node").count("State=IDLE") == 2, 60, job)
    slurm.wait_for(lambda: slurm.job(job).get("JobState") == "PENDING", 60, job)
    slurm.control("update", f"JobId={job}", "StartTime=now")  # Slurm itself waits for 2 minutes
    assert slurm.end(job) == "COMPLETED" and "resumed from" in slurm.log(job), slurm.log(job)
    assert "Traceback" not in slurm.log(job)


def test_time_limit_and_singleton(slurm, settings, measured):
    """SIGTERM ahead of the time limit saves; the job is COMPLETED, and the next of the chain goes on."""
    options = ("--job-name=chain", "--dependency=singleton", "--time=9", "--signal=TERM@60")
    first, second = (slurm.submit(*options, overrides=settings) for _ in range(2))
    slurm.step(first, 3)  # on a busy machine a start takes longer than the shortest limit
    minutes = int(slurm.job(first)["RunTime"].split(":")[1]) + 2
    slurm.control("update", f"JobId={first}", f"TimeLimit={minutes}")
    clock = Clock()
    assert slurm.end(first, 180) == "COMPLETED", slurm.log(first)
    assert "stopped on request after step" in slurm.log(first) and "Traceback" not in slurm.log(first)
    measured("Slurm, 1 to 2 minutes before the time limit, --signal=TERM@60", "saved, COMPLETED",
             clock.seconds)
    slurm.wait_for(lambda: "resumed from" in slurm.log(second), job=second)
    slurm.command("scancel", second)
    assert slurm.end(second, 60) == "CANCELLED"


def test_restarts_within_a_job(slurm, tmp_path, settings, measured):
    """MAX_RESTARTS: an agent a node starts the ranks again, and the job does not end."""
    job = slurm.submit(overrides=settings, restarts=2)
    slurm.step(job, 5)
    slurm.wait_for(lambda: "\nsaved " in slurm.log(job), 60, job)
    victim, = ranks(slurm.hosts[1])
    victim.kill()
    clock = Clock()
    slurm.wait_for(lambda: "resumed from" in slurm.log(job), 60, job)
    measured("Slurm, MAX_RESTARTS=2, SIGKILL of a rank on host 2", "resumes within the job", clock.seconds)
    slurm.step(job, 3)
    assert slurm.job(job)["JobState"] == "RUNNING", slurm.log(job)
    assert "rank 1 on host2 was killed by SIGKILL" in slurm.log(job), slurm.log(job)
    clock = Clock()
    slurm.command("scancel", "--signal=TERM", job)
    assert slurm.end(job, 30) == "COMPLETED", slurm.log(job)
    assert "stopped on request after step" in slurm.log(job) and "Traceback" not in slurm.log(job)
    assert slurm.empty()
    measured("Slurm, MAX_RESTARTS=2, scancel --signal=TERM", "saved, COMPLETED", clock.seconds)

"""A real Slurm of two nodes, each a network namespace with a name of its own: sbatch launch/slurm.sbatch with
threed itself."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import threed.nodes  # noqa: F401
from tests.cluster.conftest import TINY, Clock
from tests.cluster.hosts import Host, Hosts, missing
from tests.running import Run, losses
from threed.children import die_with_parent

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
NodeName=host1 NodeAddr=10.77.0.1 CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=host2 NodeAddr=10.77.0.2 CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=host1,host2 Default=YES MaxTime=10:00 State=UP
"""


class Slurm:
    """slurmctld and a slurmd on the first host, a slurmd on the second."""

    def __init__(self, hosts: list[Host], folder: Path):
        self.hosts, self.folder = hosts, folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHON": sys.executable,
                    "GPUS_PER_NODE": "1",
                    "OMP_NUM_THREADS": "1"}
        (folder / "state").mkdir(parents=True)
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder))
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

    def submit(self, *options: str, overrides: list[str]) -> str:
        out = self.command("sbatch", "--nodes=2", "--cpus-per-task=1", f"--output={self.folder}/job-%j.log",
                           *options,
                           "launch/slurm.sbatch", *overrides)
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


@pytest.fixture
def slurm(tmp_path):
    with Hosts(2, tmp_path) as hosts:
        yield Slurm(hosts, tmp_path / "slurm")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("alone")
    run = Run(folder, *TINY, *cache, f"run.dir={folder / 'run'}", "train.steps=12", "parallel.dp=2")
    assert run.wait() == 0, run.output
    return losses(folder / "run")


def test_a_run_and_a_node_that_fails(slurm, tmp_path, cache, alone, measured):
    """The job goes back into the queue when its node has gone, and goes on to the same losses."""
    settings = [*TINY[1:], *cache, f"run.dir={tmp_path / 'run'}", "train.steps=12"]
    clock = Clock()
    job = slurm.submit(overrides=settings)
    assert slurm.end(job) == "COMPLETED" and losses(tmp_path / "run") == alone, slurm.log(job)
    measured("Slurm, 2 nodes, sbatch launch/slurm.sbatch", "COMPLETED, losses equal to one host's",
             clock.seconds)

    settings = [*settings, f"run.dir={tmp_path / 'other'}", "train.steps=600", "checkpoint.every=50",
                "monitor.console_every=50"]
    job = slurm.submit(overrides=settings)
    slurm.wait_for(lambda: "step 100/600" in slurm.log(job), job=job)
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


def test_time_limit_and_singleton(slurm, tmp_path, cache, measured):
    """SIGTERM ahead of the time limit saves; the job is COMPLETED, and the next of the chain goes on."""
    settings = [*TINY[1:], *cache, f"run.dir={tmp_path / 'run'}", "train.steps=1000000",
                "monitor.console_every=20"]
    options = ("--job-name=chain", "--dependency=singleton", "--time=2", "--signal=TERM@60")
    first, second = (slurm.submit(*options, overrides=settings) for _ in range(2))
    clock = Clock()
    assert slurm.end(first, 240) == "COMPLETED", slurm.log(first)
    assert "stopped on request after step" in slurm.log(first) and "Traceback" not in slurm.log(first)
    measured("Slurm, time limit of 2 minutes, --signal=TERM@60; since it was submitted", "saved, COMPLETED",
             clock.seconds)
    slurm.wait_for(lambda: "resumed from" in slurm.log(second), job=second)
    slurm.wait_for(lambda: slurm.log(second).count("step ") > 3, job=second)
    clock = Clock()
    slurm.command("scancel", "--signal=TERM", second)
    assert slurm.end(second) == "COMPLETED", slurm.log(second)
    assert "stopped on request after step" in slurm.log(second) and "Traceback" not in slurm.log(second)
    measured("Slurm, the next job of the chain; scancel --signal=TERM", "resumes; saved, COMPLETED",
             clock.seconds)

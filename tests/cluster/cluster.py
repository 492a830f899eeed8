"""Cluster: a run that is divided among hosts, its agents, and what is left of them."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from tests.cluster.hosts import Host, HostRun
from tests.running import metrics

TINY = ["train", "configs/toy.yaml", "model.layers=2", "model.hidden=16", "model.heads=2", "model.seq_len=16",
        "model.vocab=300",
        "parallel.dp=auto", "parallel.tp=1", "parallel.pp=1", "train.global_batch_size=12",
        "train.micro_batch_size=1",
        "train.eval_every=0", "monitor.wandb=disabled", "monitor.trace_every=0", "optimizer.warmup_steps=0",
        "optimizer.decay_steps=100", "run.timeout_s=20", "run.connect_timeout_s=20"]
FOR_EVER = ("train.steps=100000", "monitor.console_every=50")


class Cluster:
    """Hosts, and one run over all of them."""

    def __init__(self, hosts: list[Host], folder: Path, cache: list[str]):
        self.hosts, self.folder, self.cache = hosts, folder, cache
        self.runs: list[HostRun] = []

    def settings(self, *overrides: str) -> list[str]:
        return [*TINY[1:], *self.cache, f"run.dir={self.folder / 'run'}", "run.restarts=0", *overrides]

    def node(self, number: int, *overrides: str, env: dict[str, str] | None = None,
             own: Path | None = None) -> HostRun:
        """Start node `number` on its host. `env`: variables; "" for one that is not set."""
        given = {"NNODES": str(len(self.hosts)), "NODE_RANK": str(number),
                 "MASTER_ADDR": self.hosts[0].address, "GPUS_PER_NODE": "1", "OMP_NUM_THREADS": "1"}
        given = {name: value for name, value in (given | (env or {})).items() if value != ""}
        run = self.hosts[number].start(*self.settings(*overrides), env=given, own=own)
        self.runs.append(run)
        return run

    def start(self, *overrides: str, env: dict[str, str] | None = None) -> list[HostRun]:
        """A node on each host."""
        return [self.node(number, *overrides, env=env) for number in range(len(self.hosts))]

    def replace(self, number: int, *overrides: str) -> None:
        """Start a node again whose agent has ended."""
        run = next(run for run in self.runs if run.host is self.hosts[number])
        run.process.join()
        self.runs.remove(run)
        self.node(number, *overrides)

    @property
    def step(self) -> int:
        """The last step that is done; 0: none."""
        file = self.folder / "run" / "metrics.jsonl"
        rows = metrics(file.parent) if file.exists() else []
        return rows[-1]["step"] if rows else 0

    def reach(self, step: int, timeout_s: float = 90.0) -> None:
        """Return when a step is done."""
        until = time.monotonic() + timeout_s
        while self.step < step:
            assert time.monotonic() < until and any(run.process.is_alive() for run in self.runs), self.output
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

    def said(self, words: str, *runs: HostRun) -> bool:
        """Whether each console has these words, once."""
        return all(run.output.count(words) == 1 for run in runs or self.runs)

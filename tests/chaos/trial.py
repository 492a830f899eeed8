"""A trial: a run, a fault, the restarts that are needed, and what must be true at the end."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.chaos import tensors
from tests.chaos.interposer import Site
from tests.chaos.sister import (
    ANY_MESH,
    PACE_S,
    RESTARTS,
    STEPS,
    TOY,
    Reference,
    Sister,
    make_folder,
    overrides,
    ranks_of,
    read_steps,
)
from tests.cluster.hosts import Host, Hosts, missing

HANG_S = 60.0  # without a step and without an end
ORPHAN_S = 6.0  # what is left of a run this long after its end is an orphan
STARTS = 6  # of one trial: a user who has started a run so often in vain gives up
POLL_S = 0.005


@dataclass
class Fault:
    """What happens to the first run of a trial. All parts are optional."""

    text: str
    says: str = ""  # words that must be in the output: a regular expression; none where nobody is left to say
    # them
    everywhere: bool = False  # whether each console of the first run must have these words
    hook: Callable[[], None] = lambda: None  # in the launcher's process, before the command
    act: Callable[[Trial, Sister], None] = lambda trial, run: None  # beside the first run, from its start
    between: Callable[[Trial], None] = lambda trial: None  # once it has ended
    later: Callable[[], None] = lambda: None  # as `hook`, for the second start
    end: Callable[[Trial], None] = lambda trial: None  # once the trial is over
    site: Site | None = None  # the call that is struck


@dataclass
class Result:
    """What a trial has shown, in plain values: it is sent between processes."""

    seed: int
    number: int
    kind: str
    text: str = ""
    verdicts: dict[str, str] = field(default_factory=dict)  # name -> what was seen
    skipped: str = ""  # why it could not be made
    struck: str = ""  # what: a call and its path, an instruction; empty if the fault found nothing to strike
    site: Site | None = None  # the call of the first sister's save that was struck
    attempts: int = 1  # a fault that came too late to strike is made again
    starts: int = 0
    repeated: int = 0  # steps
    recovery_s: float | None = None  # from the fault to the first step that was not there before it
    seconds: float = 0.0
    output: str = ""


class Instant(NamedTuple):
    """When a fault comes: after the run's first `step` steps, and some seconds."""

    step: int
    seconds: float

    def __str__(self) -> str:
        return f"{f'after step {self.step}' if self.step else 'from the start'} + {self.seconds:.2f} s"


class Skip(Exception):
    """A trial that cannot run here, with the reason."""


class Trial:
    def __init__(self, rng: random.Random, reference: Reference, data: list[str], folder: Path, index: int):
        self.rng, self.reference, self.data = rng, reference, data
        self.folder = make_folder(folder)
        self.run_dir, self.marker = folder / "run", folder / "struck"
        self.more: list[str] = []  # overrides
        self.restarts = RESTARTS and rng.random() < 0.6
        self.runs: list[Sister] = []
        self.verdicts: dict[str, str] = {}
        self.index = index  # which of its kind it is
        self.planned: str | None = None  # another mesh, on which a second start is to go on,
        self.other: str | None = None  # and the one on which it did
        self.argv: list[str] = []
        self.caches: list[Path] = []  # of prepared data, that are this trial's own
        self.statuses: list[int | None] = []
        self.mounted: list[Path] = []
        self.hosts: Hosts | None = None  # that the run is divided among

    @property
    def size(self) -> int:
        return ranks_of(self.reference.name)

    @property
    def output(self) -> str:
        """The output of all starts."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("log-*.txt")))

    def instant(self) -> Instant:
        """A random moment of a run: one in four during the start."""
        if self.rng.random() < 0.25:
            return Instant(0, self.rng.uniform(0.0, 1.0))
        return Instant(self.rng.randrange(1, STEPS - 1), self.rng.uniform(0.0, 2 * PACE_S))

    # ------------------------------------------------------------ for faults

    def wait(self, run: Sister, instant: Instant) -> bool:
        """Wait for an instant. Returns whether the run is still under way."""
        return (self.until_begun(run) and self.until_step(run, instant.step)
                and self.sleep(run, instant.seconds))

    def sleep(self, run: Sister, seconds: float) -> bool:
        """Wait for some seconds, or until the run has ended. Returns whether it is still under way."""
        until = time.monotonic() + seconds
        while run.alive() and time.monotonic() < until:
            time.sleep(POLL_S)
        return run.alive()

    def until_begun(self, run: Sister) -> bool:
        """Wait until threed handles signals."""
        return self.until(run, lambda: run.begun)

    def until_step(self, run: Sister, step: int) -> bool:
        """Wait until a step was logged. Returns whether the run is still under way."""
        return self.until(run, lambda: step == 0 or any(done >= step for _, done in read_steps(self.folder)))

    def until(self, run: Sister, true: Callable[[], object]) -> bool:
        limit = time.monotonic() + HANG_S
        while run.alive() and time.monotonic() < limit:
            if true():
                return run.alive()
            time.sleep(POLL_S)
        return False

    def until_saved(self, run: Sister, count: int) -> bool:
        """Wait until there are this many checkpoints."""
        return self.until(run, lambda: len(tensors.checkpoints(self.run_dir)) >= count)

    def strike(self, text: str = "") -> None:
        """Record that the fault happens now."""
        if not self.marker.exists():
            self.marker.write_text(f"{time.monotonic():.6f}\tfault\t{text}\n")

    def family(self, run: Sister) -> list[psutil.Process]:
        """All processes of a run except its launchers."""
        processes = []
        for pid in run.pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes += [child for child in psutil.Process(pid).children(recursive=True)
                          if child.status() != "zombie"]
        return processes

    def kill_node(self, run: Sister) -> None:
        """Kill everything at once, like a power failure."""
        victims = [*run.pids, *(child.pid for child in self.family(run))]
        self.strike()
        for pid in victims:
            send(pid, signal.SIGKILL)

    def mount(self, folder: Path, options: str) -> None:
        """Mount a small file system in memory."""
        folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder],
                                               capture_output=True).returncode:
            raise Skip("only root may mount a small file system")
        self.mounted.append(folder)

    def use_hosts(self) -> list[Host]:
        """Two hosts, each with half of the ranks."""
        if reason := missing():
            raise Skip(reason)
        self.hosts = Hosts(2, self.folder)
        return self.hosts.__enter__()

    def _places(self) -> list[Callable[[], None]]:
        """What makes the process of each launcher one of its host's."""
        if self.hosts is None:
            return []
        first, share = self.hosts.all[0], ranks_of(self.other or self.reference.name) // 2

        def place(number: int, host: Host) -> Callable[[], None]:
            def enter() -> None:
                host.enter()
                os.environ.update(NNODES="2", NODE_RANK=str(number), MASTER_ADDR=first.address,
                                  GPUS_PER_NODE=str(share))

            return enter

        return [place(*pair) for pair in enumerate(self.hosts.all)]

    # ------------------------------------------------------------ the trial

    def run(self, fault: Fault) -> None:
        """All starts, until the last checkpoint is there and the last start has said so."""
        try:
            while len(self.runs) < STARTS and not (self.done() and self.statuses[-1] == 0):
                self._start(fault)
                if "hang" in self.verdicts:
                    break
                if self._stuck():
                    break
            if not self.done():
                last = self.output.strip().splitlines()[-1:] or ["(no output)"]
                self.verdicts.setdefault("lost", f"after {len(self.runs)} starts step {STEPS} is not saved: "
                                                 f"{last[0]}")
        finally:
            fault.end(self)
            for run in self.runs:
                run.kill()

    def done(self) -> bool:
        newest = tensors.newest(self.run_dir)
        return newest is not None and tensors.step_of(newest) == STEPS

    def too_late(self) -> bool:
        """Whether nothing was left to disturb when the fault came: the first start ended as if nothing had
        happened."""
        struck = float(self.marker.read_text().split("\t")[0])
        before = [step for moment, step in read_steps(self.folder) if moment <= struck]
        return len(self.runs) == 1 and self.done() and max(before, default=0) >= STEPS - 1

    def _stuck(self) -> bool:
        """The same refusal came twice: it will not pass by itself."""
        if len(self.runs) < 3 or self.statuses[-1] != 2 or self.statuses[-2] != 2:
            return False
        return _refusal(self.runs[-1].output) == _refusal(self.runs[-2].output)

    def _start(self, fault: Fault) -> None:
        first = not self.runs
        if not first:
            self.other = self.planned
        self.argv = [*TOY, *overrides(self.other or self.reference.name, self.folder), *self.data, *self.more]
        if RESTARTS:
            self.argv += [f"run.restarts={3 if self.restarts else 0}", "run.restart_wait_s=0.2"]
        hooks = [fault.hook] if first else [fault.later] if len(self.runs) == 1 else []
        run = Sister(self.folder, self.argv, hooks, self._places())
        self.runs.append(run)
        if first:
            fault.act(self, run)
        self.statuses.append(self._attend(run))
        self._orphans(run)
        self._status(run)
        if first:
            fault.between(self)

    def _attend(self, run: Sister) -> int | None:
        """Wait for the end of a run; return its exit status."""
        known, since = read_steps(self.folder), time.monotonic()
        while run.alive():
            steps = read_steps(self.folder)
            if len(steps) != len(known):
                known, since = steps, time.monotonic()
            if time.monotonic() - since > HANG_S:
                self.hangs(run)
            time.sleep(POLL_S)
        return run.join()

    def hangs(self, run: Sister) -> None:
        """Record that a run does, and end it."""
        left = len(self.family(run))
        self.verdicts["hang"] = f"no step and no end for {HANG_S:g} s, {left} processes: {self._stacks(run)}"
        run.kill()

    def _stacks(self, run: Sister) -> str:
        for pid in [*run.pids, *(child.pid for child in self.family(run))]:
            send(pid, signal.SIGALRM)
        time.sleep(0.5)
        return (self.folder / "stacks").read_text()

    def _orphans(self, run: Sister) -> None:
        """Record and kill processes that outlive the run that started them. (This process adopts those whose
        parent has ended.)"""
        until, begin = time.monotonic() + ORPHAN_S, time.monotonic()
        while left := self._left():
            if time.monotonic() > until:
                self.verdicts["orphan"] = (
                    f"{len(left)} processes {time.monotonic() - begin:.0f} s after the end of the run"
                )
                for process in left:
                    send(process.pid, signal.SIGCONT)
                    send(process.pid, signal.SIGKILL)
            time.sleep(POLL_S)

    def _left(self) -> list[psutil.Process]:
        processes = []
        launchers = [pid for run in self.runs for pid in run.pids]
        for child in psutil.Process().children(recursive=True):
            try:
                if child.status() == "zombie":
                    if child.ppid() == os.getpid() and child.pid not in launchers:
                        os.waitpid(child.pid, os.WNOHANG)
                elif child.pid not in launchers:
                    processes.append(child)
            except (psutil.NoSuchProcess, ChildProcessError):
                pass
        return processes

    def _status(self, run: Sister) -> None:
        """Status 0 says: all that was asked for is saved."""
        newest = tensors.newest(self.run_dir)
        step = tensors.step_of(newest) if newest else 0
        stopped = re.findall(r"stopped on request after step (\d+)", run.output)
        wanted = int(stopped[-1]) if stopped else STEPS
        if self.statuses[-1] == 0 and step < wanted:
            self.verdicts["status"] = (
                f"exit status 0, but the newest checkpoint is of step {step}, not {wanted}"
            )

    def clean(self) -> None:
        if self.hosts is not None:
            self.hosts.__exit__()
        for folder in self.mounted:
            subprocess.run(["umount", "-l", folder], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _refusal(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("threed: ")]


def another_mesh(rng: random.Random, name: str) -> str | None:
    """Now and then, where the numbers stay comparable."""
    if name not in ANY_MESH or rng.random() > 0.25:
        return None
    return rng.choice([other for other in ANY_MESH if other != name])

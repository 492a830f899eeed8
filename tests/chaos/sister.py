"""The toy's little sisters: models of a second or two, on meshes and with features of all kinds; and their
undisturbed runs."""

from __future__ import annotations

import faulthandler
import functools
import inspect
import itertools
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil

import threed.launcher.local as launcher
from tests import running
from tests.chaos import interposer
from tests.chaos.interposer import Site
from tests.chaos.tensors import newest
from threed import torchrun
from threed.base.signals import ASKS, begin
from threed.cli import main as cli
from threed.engine.engine import Engine
from threed.launcher import (
    rank,
)
from threed.monitor.log import Log
from threed.schema import RunConfig

STEPS, EVERY, KEEP = 16, 4, 2
PACE_S = 0.05  # that a step takes longer than it must: a save in the background is to end before the next
TOY = ["train", "configs/toy.yaml", "model.layers=2", "model.hidden=32", "model.heads=4", "model.seq_len=16",
       "model.vocab=300",
       "train.global_batch_size=4", "train.micro_batch_size=1", "train.eval_every=0",
       "monitor.wandb=disabled",
       "monitor.trace_every=0", "optimizer.warmup_steps=0", f"train.steps={STEPS}",
       f"checkpoint.every={EVERY}",
       f"checkpoint.keep={KEEP}", "run.timeout_s=20"]


def _mesh(dp: int, tp: int = 1, pp: int = 1, *more: str) -> tuple[str, ...]:
    return (f"parallel.dp={dp}", f"parallel.tp={tp}", f"parallel.pp={pp}", *more)


MOE = ("model.family=moe", "model.experts=4", "model.expert_ffn_hidden=16", "model.activation=swiglu",
       "model.bias=false", "model.balance=bias", "parallel.ep=2")
# By name: overrides. `{disk}` is a folder of the trial.
SISTERS = {
    "few tensors": _mesh(2, 1, 1, "model.layers=1", "model.bias=false", "model.norm=rmsnorm"),
    "dp2": _mesh(2),
    "dp2 zero2": _mesh(2, 1, 1, "zero.stage=2"),
    "dp2 zero3": _mesh(2, 1, 1, "zero.stage=3"),
    "dp2 zero3 cpu": _mesh(2, 1, 1, "zero.stage=3", "offload.optimizer=cpu"),
    "dp2 zero3 nvme": _mesh(2, 1, 1, "zero.stage=3", "offload.optimizer=nvme", "offload.parameters=nvme",
                            "offload.nvme_path={disk}"),
    "dp2 cpu": _mesh(2, 1, 1, "offload.optimizer=cpu"),
    "dp2 cpu no overlap": _mesh(2, 1, 1, "offload.optimizer=cpu", "offload.overlap=none"),
    "dp2 zero2 cpu gradients": _mesh(2, 1, 1, "zero.stage=2", "offload.optimizer=cpu",
                                     "offload.gradients=host"),
    "dp2 fp16": _mesh(2, 1, 1, "precision.dtype=fp16", "precision.initial_loss_scale=4096",
                      "precision.loss_scale_window=5"),
    "tp2": _mesh(1, 2),
    "pp2": _mesh(1, 1, 2),
    "pp2 zb-h1": _mesh(1, 1, 2, "parallel.schedule=zb-h1"),
    "dp3": _mesh(2, 1, 1, "parallel.dp=3", "train.global_batch_size=6"),
    "dp2 pp2 zero2": _mesh(2, 1, 2, "zero.stage=2"),
    "tp2 pp2": _mesh(1, 2, 2),
    "dp2 muon": _mesh(2, 1, 1, "optimizer.name=muon"),
    "dp2 ep2": _mesh(2, 1, 1, *MOE, "zero.stage=2"),
    "dp2 tp2 ep4 zero3": _mesh(2, 2, 1, *MOE, "parallel.sequence_parallel=true", "parallel.ep=4",
                               "zero.stage=3"),
}
EXPERTS, MATRICES = ["dp2 ep2", "dp2 tp2 ep4 zero3"], ["dp2 muon"]  # with exchanges of rows, of matrices
FIRST = "few tensors"  # the one whose saves are gone through call by call: they are the shortest
ANY_MESH = ["dp2", "dp2 zero2", "dp2 zero3", "dp2 zero3 cpu", "dp2 zero3 nvme", "tp2", "pp2", "pp2 zb-h1",
            "dp2 pp2 zero2", "tp2 pp2"]
# whether a run starts its ranks again by itself
RESTARTS = any(entry.name == "restarts" for entry in fields(RunConfig))


def ranks_of(name: str) -> int:
    sizes = dict(word.split("=") for word in SISTERS[name] if word.startswith("parallel.")
                 and not word.startswith("parallel.s"))
    return int(sizes["parallel.dp"]) * int(sizes["parallel.tp"]) * int(sizes["parallel.pp"])


class Sister(running.Run):
    """A run under way in `folder`: its run.dir is folder/run, its temporary files belong into folder/tmp. It
    has one launcher, or a torchrun on each of some hosts, which `places` enter."""

    def __init__(self, folder: Path, argv: list[str], hooks: list[Callable[[], None]],
                 places: Sequence[Callable[[], None]] = ()):
        self._folder, self._argv = folder, [*argv, f"run.dir={folder / 'run'}"]
        self._hooks, self._places = hooks, places
        self.logs: list[Path] = []
        self.replaced: list[int | None] = []  # statuses of launchers that were started again
        self.launchers = [self._start(number) for number in range(len(places) or 1)]

    def _start(self, number: int) -> Any:
        log = self._folder / f"log-{time.monotonic_ns()}-{number}.txt"
        self.logs.append(log)
        hooks = [*self._places[number:number + 1], *self._hooks]
        process = multiprocessing.get_context("fork").Process(
            target=_begin, args=(log, self._argv, self._folder, hooks, number if self._places else None))
        process.start()
        return process

    def start_again(self, number: int) -> None:
        """A launcher that has been killed, as a job manager would."""
        self.launchers[number].join()
        self.replaced.append(self.launchers[number].exitcode)
        self.launchers[number] = self._start(number)

    def alive(self) -> bool:
        return any(process.is_alive() for process in self.launchers)

    def join(self, timeout_s: float | None = None) -> int | None:
        """The exit status: of several launchers, the first that is not 0. None if one is still alive."""
        return next((status for status in self.statuses(timeout_s) if status != 0), 0)

    def statuses(self, timeout_s: float | None = None) -> list[int | None]:
        """The exit status of each launcher."""
        for process in self.launchers:
            process.join(timeout_s)
        return [process.exitcode for process in self.launchers]

    @property
    def begun(self) -> bool:
        """Whether all launchers handle signals."""
        return all((self._folder / f"begun-{number}").exists() for number in range(len(self.launchers)))

    @property
    def output(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self.logs if log.exists())

    @property
    def pids(self) -> list[int]:
        """Process ids of the launchers."""
        return [process.pid for process in self.launchers if process.pid is not None]

    @property
    def pid(self) -> int:
        return self.pids[0]

    def kill(self) -> None:
        for process in self.launchers:
            if process.pid is not None and psutil.pid_exists(process.pid):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.join(10)


def _begin(log: Path, argv: list[str], folder: Path, hooks: list[Callable[[], None]],
           node: int | None) -> None:
    """The body of a launcher's process: settings that every launcher needs, then the fault's hook, then the
    command; on a node of several, by torchrun."""
    interposer.die_with_parent()
    for number in ASKS:
        signal.signal(number, signal.SIG_DFL)
    stacks = (folder / "stacks").open("a")
    faulthandler.register(signal.SIGALRM, stacks)  # what a process is at, where it does not end
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "tmp")
    write_steps(folder / "steps")
    slow_down()
    for hook in hooks:
        hook()
    begun = folder / f"begun-{node or 0}"
    if node is None:
        patch(cli, "main", lambda original: lambda: (begin(), begun.touch(), original()))
        running._body(log, tuple(argv), {})
    else:
        patch(torchrun, "Attendant", lambda original: lambda: (original(), begun.touch())[0])
        running._call(log, functools.partial(running.torchrun_main, tuple(argv[1:]), {}))


def patch(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function, in this process and those that it forks."""
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(make(original)))


def in_ranks(body: Callable[[int], None]) -> None:
    """Call body(rank) first in the process of each rank."""
    signature = inspect.signature(launcher.run_rank)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def run_rank(*args: Any, **kwargs: Any) -> Any:
            body(signature.bind(*args, **kwargs).arguments["place"].rank)
            return original(*args, **kwargs)

        return run_rank

    for starter in (launcher, rank):  # of one machine's launcher, and of agents
        patch(starter, "run_rank", make)


def write_steps(file: Path) -> None:
    """A line for each step that is logged, with its time: what metrics.jsonl forgets when a step is run
    again."""
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Log, number: int, *others: Any) -> None:
            original(self, number, *others)
            with file.open("a") as lines:
                lines.write(f"{time.monotonic():.6f} {number}\n")

        return step

    patch(Log, "step", make)


def slow_down() -> None:
    """Make steps slower: those of such a small model take no time."""
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(self: Engine, batch: Any) -> Any:
            time.sleep(PACE_S)
            return original(self, batch)

        return train_step

    patch(Engine, "train_step", make)


def read_steps(folder: Path) -> list[tuple[float, int]]:
    """(time, step) of all steps so far."""
    if not (folder / "steps").exists():
        return []
    lines = [line.split() for line in (folder / "steps").read_text().splitlines(keepends=True)
             if line.endswith("\n")]
    return [(float(moment), int(step)) for moment, step in lines]


# ---------------------------------------------------------------- data, and undisturbed runs


def make_corpus(folder: Path) -> list[str]:
    """Write a small corpus into `folder`; returns overrides. The first run prepares the data."""
    (folder / "text").mkdir(parents=True)
    for name in ("argparse", "ast"):
        shutil.copy(Path(os.__file__).parent / f"{name}.py", folder / "text")
    return [f"data.source={folder / 'text'}", f"data.cache={folder / 'cache'}"]


@dataclass
class Reference:
    """An undisturbed run."""

    name: str
    folder: Path  # of the last checkpoint
    losses: dict[int, tuple[float, float]]
    seconds: float
    sites: list[Site] = field(default_factory=list)  # the calls of a save, in order, of all ranks: one that
    # prunes


def overrides(name: str, folder: Path) -> list[str]:
    return [word.format(disk=folder / "disk") for word in SISTERS[name]]


def make_folder(folder: Path) -> Path:
    for name in ("tmp", "disk", "run"):
        (folder / name).mkdir(parents=True)
    return folder


def make_reference(name: str, base: Path, data: list[str]) -> Reference:
    """Run a sister undisturbed; once more if a busy machine has skipped a save."""
    for attempt in itertools.count():
        reference = _make_reference(name, base / f"undisturbed {name} {attempt}", data)
        whole = any("latest" in site.path for site in reference.sites)
        if attempt == 4 or not interposer.preloaded() or whole:
            return reference
    raise AssertionError


def _make_reference(name: str, folder: Path, data: list[str]) -> Reference:
    make_folder(folder)
    reports = [folder / f"calls-{rank}" for rank in range(ranks_of(name))]

    def hook() -> None:
        if interposer.preloaded():
            in_ranks(lambda rank: interposer.report(folder / "run", reports[rank]))

    begin = time.monotonic()
    run = Sister(folder, [*TOY, *overrides(name, folder), *data], [hook])
    status = run.join(90)
    assert status == 0, f"an undisturbed run of '{name}' ends with {status}:\n{run.output}"
    seconds = time.monotonic() - begin
    sites = [site for rank, file in enumerate(reports) if file.exists() for site in calls_of_save(rank, file)]
    checkpoint = newest(folder / "run")
    assert checkpoint is not None
    return Reference(name, checkpoint, running.losses(folder / "run"), seconds, sites)


def calls_of_save(rank: int, file: Path) -> list[Site]:
    """What a rank did from the first call of the third save to before the fourth's: one that also removes an
    older checkpoint."""
    third, fourth = (f"step-{EVERY * count:08d}" for count in (3, 4))
    calls = interposer.read_report(rank, file)
    begin = next((i for i, site in enumerate(calls) if third in site.path), len(calls))
    end = next((i for i, site in enumerate(calls) if fourth in site.path), len(calls))
    return [site for site in calls[begin:end] if site.path.startswith("checkpoints")]

"""Run the command line as a user would, in a process forked from the tests' (which has imported
everything)."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil


class Forked:
    """A process, forked from the tests', that calls `body`; its output goes to a file."""

    def __init__(self, folder: Path, body: Callable[[], int]):
        self.log = folder / f"log-{time.monotonic_ns()}.txt"
        self.process = multiprocessing.get_context("fork").Process(target=_call, args=(self.log, body))
        self.process.start()

    def wait(self, timeout_s: float = 90.0) -> int:
        """The exit status."""
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output}")
        return self.process.exitcode

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Return once `text` is in the output."""
        until = time.monotonic() + timeout_s
        while text not in self.output:
            assert time.monotonic() < until and self.process.is_alive(), (
                f"'{text}' did not appear:\n{self.output}"
            )
            time.sleep(0.01)

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, in order."""
        assert self.process.pid is not None
        children = psutil.Process(self.process.pid).children()
        return sorted((c for c in children if "python" in c.name()),
                      key=lambda child: (child.create_time(), child.pid))

    def kill(self) -> None:
        if self.process.pid is not None and psutil.pid_exists(self.process.pid):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
        self.process.kill()
        self.process.join(10)


class Run(Forked):
    """`threed ARGV ...` under way. A run that fails is not started again, unless argv says so."""

    def __init__(self, folder: Path, *argv: str, env: dict[str, str] | None = None):
        if argv[0] == "train" and not any(word.startswith("run.restarts=") for word in argv):
            argv = (*argv, "run.restarts=0")
        super().__init__(folder, partial(_main, argv, env or {}))


class Torchrun(Forked):
    """`python -m threed.torchrun ARGV ...` under way."""

    def __init__(self, folder: Path, *argv: str, env: dict[str, str] | None = None):
        super().__init__(folder, partial(torchrun_main, argv, env or {}))


def torchrun_main(argv: tuple[str, ...], env: dict[str, str]) -> int:
    os.environ.update(env)
    from threed.torchrun import main

    return main(list(argv))


def _call(log: Path, body: Callable[[], int]) -> None:
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    status = body()
    sys.stdout.flush()
    os._exit(status)


def _body(log: Path, argv: tuple[str, ...], env: dict[str, str]) -> None:
    _call(log, partial(_main, argv, env))


def _main(argv: tuple[str, ...], env: dict[str, str]) -> int:
    os.environ.update(env)
    sys.argv = ["threed", *argv]
    from threed.cli.main import main

    try:
        main()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    """step -> (loss, gradient norm). Each step stands once, in order, even if it was run twice."""
    rows = metrics(folder)
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)), f"steps are repeated or out of order: {steps}"
    return {row["step"]: (row["train/loss"], row["train/grad_norm"]) for row in rows}


def wandb_records(folder: Path) -> list[dict]:
    """What the offline wandb run in a run's folder holds, read by wandb itself."""
    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    text = subprocess.run([sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)], check=True,
                          capture_output=True, text=True).stdout
    return [json.loads(line) for line in text.splitlines()]

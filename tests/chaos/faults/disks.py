"""Disks that are full, too small, or can only be read: real file systems in memory, which root may mount."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from pathlib import Path

from tests.chaos.faults import kind
from tests.chaos.sister import STEPS, Sister
from tests.chaos.trial import Fault, Trial

FULL = r"No space left on device|has no room"


def _fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 14))


def _empty(folder: Path) -> None:
    (folder / "ballast").unlink(missing_ok=True)


def _size(trial: Trial) -> int:
    return sum(path.stat().st_size for path in trial.reference.folder.iterdir())


@kind("disk: too small", 2)
def small(trial: Trial) -> Fault:
    """Room for one or two checkpoints; the user makes room after the run has ended."""
    size = int(_size(trial) * trial.rng.uniform(0.5, 2.9)) + 40_000
    trial.mount(trial.run_dir, f"size={size}")

    def act(trial: Trial, run: Sister) -> None:
        trial.strike()

    def between(trial: Trial) -> None:
        subprocess.run(["mount", "-o", "remount,size=64m", trial.run_dir], check=True)

    return Fault(f"a disk of {size / _size(trial):.1f} checkpoints", FULL, act=act, between=between)


@kind("disk: full for a while", 3)
def full_for_a_while(trial: Trial) -> Fault:
    trial.mount(trial.run_dir, "size=16m")
    step, seconds = trial.rng.randrange(1, STEPS), trial.rng.uniform(0.05, 1.0)

    def act(trial: Trial, run: Sister) -> None:
        if trial.until_step(run, step):
            trial.strike()
            _fill(trial.run_dir)
            trial.sleep(run, seconds)
            _empty(trial.run_dir)

    return Fault(f"a full disk after step {step}, for {seconds:.1f} s", act=act,
                 end=lambda trial: _empty(trial.run_dir))


@kind("disk: full to the end", 3)
def full_to_the_end(trial: Trial) -> Fault:
    trial.mount(trial.run_dir, "size=16m")
    step = trial.rng.randrange(1, STEPS - 2)

    def act(trial: Trial, run: Sister) -> None:
        if trial.until_step(run, step):
            trial.strike()
            _fill(trial.run_dir)

    return Fault(f"a full disk after step {step}, until the run has ended", FULL, act=act,
                 between=lambda trial: _empty(trial.run_dir), end=lambda trial: _empty(trial.run_dir))


@kind("disk: read-only for a while", 2)
def read_only(trial: Trial) -> Fault:
    folder = trial.run_dir / "checkpoints"
    trial.mount(folder, "size=16m")
    step, seconds = trial.rng.randrange(1, STEPS - 4), trial.rng.choice([0.3, 1.0, 20.0])

    def remount(how: str) -> bool:
        return subprocess.run(["mount", "-o", f"remount,{how}", folder], capture_output=True).returncode == 0

    def act(trial: Trial, run: Sister) -> None:
        if trial.until_step(run, step) and trial.until(run, lambda: remount("ro")):
            trial.strike()
            trial.sleep(run, seconds)
            time.sleep(0.1)
        remount("rw")

    says = os.strerror(errno.EROFS) if seconds > 10 else ""
    return Fault(f"checkpoints/ read-only after step {step}, for {seconds:.1f} s", says, act=act,
                 between=lambda trial: (remount("rw"), None)[1], end=lambda trial: (remount("rw"), None)[1])

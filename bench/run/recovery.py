"""Seconds from a fault to the first new step: one rank of a small run gets SIGKILL, and the run goes on from
its last checkpoint by itself.

    python -m bench.run.recovery                  at 2, 4 and 8 processes of this machine, three times each
    python -m bench.run.recovery --ranks 2 --rounds 1

The run saves after every step and waits `run.restart_wait_s` before it starts again, which is left out of the
numbers: 0 here. What is left is to notice the death, end the others, start, connect, load and take a step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from threed.base.quantity import show_seconds

LIMIT_S = 300.0
STEP = 3  # after which the rank is killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{len(os.sched_getaffinity(0))} cores, load {load:.1f} before it began")
    for ranks in args.ranks:
        times = [recovery_s(ranks) for _ in range(args.rounds)]
        print(f"{ranks} processes: {show_seconds(median(times))} (median), {show_seconds(min(times))} to "
              f"{show_seconds(max(times))}", flush=True)


def recovery_s(ranks: int) -> float:
    """Seconds from SIGKILL to the first step that was not there before it."""
    here = Path(tempfile.mkdtemp(prefix="recovery-"))
    (here / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 4000)
    config = Path(__file__).parents[2] / "configs" / "toy.yaml"
    command = [sys.executable, "-m", "threed", "train", str(config), "model.layers=2", "model.hidden=32",
               "model.seq_len=32", "model.vocab=300", "train.global_batch_size=8", "train.micro_batch_size=1",
               "train.steps=100000", "train.eval_every=0", "monitor.wandb=disabled", "monitor.trace_every=0",
               f"parallel.dp={ranks}", "parallel.tp=1", "parallel.pp=1", "checkpoint.every=1",
               "run.restarts=1", "run.restart_wait_s=0", f"data.source={here / 'text.txt'}",
               f"data.cache={here / 'cache'}", f"run.dir={here / 'run'}"]
    with open(here / "log.txt", "w") as log:
        run = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        wait_for(run, here, lambda rows: len(rows) >= STEP)
        victim = ranks_of(run.pid)[-1]
        victim.kill()
        killed_s = time.time()
        rows = wait_for(run, here, lambda rows: after(here, rows, killed_s))
        return rows[-1]["run/time"] - killed_s
    finally:
        for process in [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]:
            process.kill()
        run.wait()
        shutil.rmtree(here)


def after(here: Path, rows: list[dict[str, Any]], killed_s: float) -> bool:
    """Whether a step of the new start has ended. (One that was under way may end within a moment of the
    kill.)"""
    return bool(rows) and rows[-1]["run/time"] > killed_s + 0.2 and "resumed from" in (
        here / "log.txt").read_text()


def rows_of(here: Path) -> list[dict[str, Any]]:
    path = here / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError:  # a line is being written
        return []


def wait_for(run: subprocess.Popen, here: Path, done: Any) -> list[dict[str, Any]]:
    until = time.monotonic() + LIMIT_S
    while not done(rows := rows_of(here)):
        if time.monotonic() > until or run.poll() is not None:
            raise SystemExit(f"the run has not come so far:\n{(here / 'log.txt').read_text()}")
        time.sleep(0.01)
    return rows


def ranks_of(launcher: int) -> list[psutil.Process]:
    children = psutil.Process(launcher).children()
    return sorted((each for each in children if "python" in each.name()), key=lambda each: each.pid)


if __name__ == "__main__":
    main()

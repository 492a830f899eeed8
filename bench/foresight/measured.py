"""Compare predictions before any run with measured steps, on the CPUs of this machine.

    python -m bench.foresight.measured                        # calibrate, predict, run, compare: ten minutes
    python -m bench.foresight.measured --hardware my.yaml     # with a file of `threed calibrate`
    python -m bench.foresight.measured --markdown bench/results/foresight.md

Twelve configurations of configs/toy.yaml are predicted with a hardware file that `threed calibrate` has
written, then run twice each, with one thread a rank. None of them is used for the calibration. The step time
of a run is the median of `perf/step_s` over its later steps. The faster run counts: what slows a run is other
work, which on a virtual machine may be that of other machines. `noise` is how far the runs are apart, and the
last line has the error against their mean, too.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import psutil

import threed
from bench.foresight.published import spearman
from threed.prediction.hardware import load

STEPS, WARM = 10, 3  # of a run; the first do not count
BASE = (f"train.steps={STEPS}", "train.eval_every=0", "checkpoint.every=0", "monitor.wandb=disabled",
        "run.device=cpu")
ONE = "parallel.dp=1 parallel.tp=1 parallel.pp=1"
# Name -> overrides of configs/toy.yaml, whose mesh is dp 2, tp 2, pp 2.
CONFIGS = {
    "1 rank": f"{ONE} train.global_batch_size=16",
    "1 rank, full recomputation": f"{ONE} train.global_batch_size=16 activation.policy=full",
    "1 rank, optimizer on the host": f"{ONE} train.global_batch_size=8 offload.optimizer=cpu "
                                     "model.hidden=256",
    "dp 2, ZeRO-1": f"{ONE} parallel.dp=2 train.global_batch_size=16",
    "dp 2, ZeRO-2, micro-batch 1": f"{ONE} parallel.dp=2 zero.stage=2 train.global_batch_size=16 "
                                   "train.micro_batch_size=1",
    "dp 2, ZeRO-3, hidden 256": f"{ONE} parallel.dp=2 zero.stage=3 train.global_batch_size=32 "
                                "model.hidden=256",
    "tp 2, sequence parallel": f"{ONE} parallel.tp=2 parallel.sequence_parallel=true "
                               "train.global_batch_size=16",
    "pp 2, GPipe": f"{ONE} parallel.pp=2 parallel.schedule=gpipe train.global_batch_size=24",
    "pp 2, interleaved, selective": f"{ONE} parallel.pp=2 parallel.schedule=interleaved "
                                    "parallel.virtual_stages=2 activation.policy=selective "
                                    "train.global_batch_size=16",
    "pp 2 x dp 2, zb-h1": f"{ONE} parallel.pp=2 parallel.dp=2 parallel.schedule=zb-h1 "
                          "train.global_batch_size=32",
    "dp 2 x tp 2, ZeRO-3": f"{ONE} parallel.dp=2 parallel.tp=2 zero.stage=3 train.global_batch_size=32 "
                           "train.micro_batch_size=8",
    "dp 2 x tp 2 x pp 2": "",
}


class Times(NamedTuple):
    step_s: float
    compute_s: float  # of it in forward and backward, mean over ranks


class Row(NamedTuple):
    name: str
    predicted: Times
    measured: list[Times]

    @property
    def best(self) -> Times:
        """The faster run."""
        return min(self.measured)

    @property
    def error(self) -> float:
        return self.predicted.step_s / self.best.step_s - 1

    @property
    def mean_error(self) -> float:
        """Against the mean of the runs."""
        return self.predicted.step_s / fmean(times.step_s for times in self.measured) - 1

    @property
    def noise(self) -> float:
        steps = [times.step_s for times in self.measured]
        return max(steps) / min(steps) - 1

    @property
    def line(self) -> str:
        numbers = (self.predicted.step_s, self.best.step_s, self.predicted.compute_s, self.best.compute_s)
        return (f"| {self.name} | {' | '.join(f'{1e3 * number:.1f}' for number in numbers)} | "
                f"{self.error:+.1%} | {self.noise:.1%} |")


def predicted(overrides: Sequence[str], hardware: str) -> Times:
    values = threed.predict(threed.load("configs/toy.yaml", [*BASE, *overrides]), hardware)
    return Times(values["step_time"], fmean(stage["busy_s"] for stage in values["stages"]))


def measured(overrides: Sequence[str], folder: Path, config: str = "configs/toy.yaml") -> Times:
    """Medians over the later steps of a run."""
    run = folder / "run"
    command = [sys.executable, "-m", "threed", "train", config, *BASE, *overrides,
               f"run.dir={run}"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
                          check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARM:]
    shutil.rmtree(run)  # a second run of it would go on from its checkpoint
    return Times(median(row["perf/step_s"] for row in rows), median(row["time/compute"] for row in rows))


def table(rows: Sequence[Row]) -> str:
    lines = ["| configuration | predicted ms | measured ms | predicted compute | measured compute | error | "
             "noise |", "|---|--:|--:|--:|--:|--:|--:|", *(row.line for row in rows)]
    errors = [abs(row.error) for row in rows]
    rank = spearman([row.best.step_s for row in rows], [row.predicted.step_s for row in rows])
    lines.append(f"\nmean error {fmean(errors):.1%}, worst {max(errors):.1%} (against the mean of the runs "
                 f"{fmean(abs(row.mean_error) for row in rows):.1%}), mean noise "
                 f"{fmean(row.noise for row in rows):.1%}; Spearman's rank correlation {rank:.3f}")
    return "\n".join(lines)


def others(run: Callable[[], object]) -> float:
    """The share of the machine's processors that other programs take while something runs."""
    def busy() -> float:
        times, ours = psutil.cpu_times(), os.times()
        return sum(times) - times.idle - times.iowait - sum(ours[:4])

    begin, before = time.monotonic(), busy()
    run()
    return (busy() - before) / (time.monotonic() - begin) / psutil.cpu_count()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n    python")[0])
    parser.add_argument("--hardware", help="a file of threed calibrate; without it, this bench calibrates")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each configuration")
    parser.add_argument("--only", default="", help="configurations whose names contain this")
    parser.add_argument("--markdown", type=Path, help="write the table to this file, too")
    args = parser.parse_args()
    chosen = {name: text.split() for name, text in CONFIGS.items() if args.only in name}
    with tempfile.TemporaryDirectory() as folder:
        hardware = args.hardware or f"{folder}/my.yaml"
        if not args.hardware:
            subprocess.run([sys.executable, "-m", "threed", "calibrate", "-o", hardware],
                           env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        print(f"{load(hardware)}\n", flush=True)
        before = {name: predicted(each, hardware) for name, each in chosen.items()}
        times: dict[str, list[Times]] = {name: [] for name in chosen}

        def run() -> None:
            for number, (name, each) in enumerate(chosen.items()):
                times[name].append(measured(each, Path(folder) / str(number)))
                print(f"{name}: predicted {1e3 * before[name].step_s:.1f} ms, measured "
                      f"{1e3 * times[name][-1].step_s:.1f} ms", file=sys.stderr, flush=True)

        shares = [others(run) for _ in range(args.repeat)]
        text = table([Row(name, before[name], times[name]) for name in chosen])
        text += f"\n\nOther programs took {fmean(shares):.0%} of the processors meanwhile."
        print(text)
        if args.markdown is not None:
            args.markdown.write_text("# Predictions before any run\n\n"
                                     "`python -m bench.foresight.measured` on "
                                     f"{load(hardware).name}; see [bench/README.md](../README.md).\n\n"
                                     f"{text}\n")


if __name__ == "__main__":
    main()

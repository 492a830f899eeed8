"""The toy's loss with muon and with adamw, after equal steps, each at the best of some learning rates.

    python -m bench.run.muon_loss --markdown bench/results/muon.md
    python -m bench.run.muon_loss --batch 32    # the toy's whole batch takes four times as long
    python -m bench.run.muon_loss --quick

Runs of `threed train` on one rank, one after the other; all but optimizer.name, optimizer.lr and what the
options say is of configs/toy.yaml. Steps are equal, and so are the samples and the first weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from bench.common import columns, machine, put_section

ROOT = Path(__file__).parents[2]
OPTIMIZERS = ("adamw", "muon")
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
LAST = 20  # steps whose training loss is averaged


class Losses(NamedTuple):
    held_out: float  # after the last step
    trained: float  # mean of the last steps

    @property
    def cells(self) -> list[str]:
        return [f"{self.held_out:.3f}", f"{self.trained:.3f}"]


def run(name: str, rate: float, args: argparse.Namespace, folder: Path) -> Losses:
    to = folder / f"{name}-{rate:g}"
    words = ["parallel.dp=1", "parallel.tp=1", "parallel.pp=1", f"optimizer.name={name}",
             f"optimizer.lr={rate:g}", f"train.steps={args.steps}", f"train.eval_every={args.steps}",
             f"train.global_batch_size={args.batch}", "checkpoint.every=0", "monitor.wandb=disabled",
             f"data.cache={folder / 'data'}", f"run.dir={to}", *args.overrides]
    done = subprocess.run([sys.executable, "-m", "threed", "train", "configs/toy.yaml", *words], cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                          check=False)
    if done.returncode:
        raise SystemExit(f"{name} at {rate:g}: {(done.stdout + done.stderr)[-2000:]}")
    rows = [json.loads(line) for line in (to / "metrics.jsonl").read_text().splitlines()]
    held_out = next(row["val/loss"] for row in reversed(rows) if row.get("val/loss") is not None)
    trained = [row["train/loss"] for row in rows if "train/loss" in row]
    return Losses(held_out, statistics.mean(trained[-LAST:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of all runs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step (the toy has 32)")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="LR")
    parser.add_argument("--quick", action="store_true", help="two rates, five steps")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write a section of this file")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.rates = 5, args.rates[:2]
    begin, found = time.monotonic(), dict[str, dict[float, Losses]]()
    with tempfile.TemporaryDirectory(prefix="muon-loss-") as scratch:
        for name in OPTIMIZERS:
            for rate in args.rates:
                found.setdefault(name, {})[rate] = run(name, rate, args, Path(scratch))
                print(f"{name} at {rate:g}: {' '.join(found[name][rate].cells)}, "
                      f"{time.monotonic() - begin:.0f} s so far", file=sys.stderr, flush=True)
    text = report(found, args)
    print(text)
    if args.markdown:
        if not args.markdown.exists():
            args.markdown.write_text("# Muon\n")
        command = shlex.join(["python", "-m", "bench.run.muon_loss", *sys.argv[1:]])
        put_section(args.markdown, "The toy's loss",
                    f"`{command}`, {machine()}, {time.strftime('%Y-%m-%d')}.\n\n{text}")


def report(found: dict[str, dict[float, Losses]], args: argparse.Namespace) -> str:
    head = ["learning rate", *(f"{name}, {what}" for name in OPTIMIZERS for what in ("held out", "trained"))]
    rows = [[f"{rate:g}", *(cell for name in OPTIMIZERS for cell in found[name][rate].cells)]
            for rate in args.rates]
    best = {name: min(found[name].values()) for name in OPTIMIZERS}
    rows.append(["best", *(cell for name in OPTIMIZERS for cell in best[name].cells)])
    less = best["adamw"].held_out - best["muon"].held_out
    said = f"{abs(less):.3f} {'below' if less > 0 else 'above'}"
    return (f"Losses in nats after {args.steps} steps of {args.batch} sequences: of held-out data, and the "
            f"mean training loss of the last {min(LAST, args.steps)} steps. The learning rate falls as the "
            f"toy says.\n\n"
            f"{columns([head, *rows])}\n\nmuon at its best rate is {said} adamw at its best.")


if __name__ == "__main__":
    main()

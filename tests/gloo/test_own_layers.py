"""User layers, in real processes: a script that forks its ranks, stops, and goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.guides import ROOT

SMALL = ["train.global_batch_size=8", "train.micro_batch_size=2", "monitor.wandb=disabled",
         "monitor.console_every=1", "train.eval_every=2", "train.eval_batches=1",
         "optimizer.schedule=constant"]


def script(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(ROOT / "examples/vit.py"), f"run.dir={folder}", *SMALL, *overrides]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_script_trains_and_goes_on(tmp_path):
    """What loopback cannot show: layers that are known in a forked rank alone, channels with sizes of their
    own, and a second start that does not know the first one's layers."""
    first = script(tmp_path, "parallel.dp=1", "parallel.schedule=zb-h1", "zero.stage=2", "train.steps=2")
    assert first.returncode == 0, first.stderr
    second = script(tmp_path, "parallel.dp=2", "zero.stage=3", "train.steps=4")
    assert second.returncode == 0, second.stderr
    assert f"resumed from {tmp_path}/checkpoints/step-00000002 after step 2" in second.stdout
    assert "samples/s" in second.stdout and "tok/s" not in second.stdout
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["run/samples"] for row in rows] == [8, 16, 24, 32] and "perf/tokens_per_s" not in rows[0]
    assert [row["step"] for row in rows if "val/loss" in row] == [2, 4]


def test_the_command_line_knows_them():
    """A family of a file that is no list of our layers; and bad input that ends as a traceback."""
    argv = [sys.executable, "-m", "threed", "check", "examples/vit.yaml"]
    good, bad = (subprocess.run([*argv, *more], cwd=ROOT, capture_output=True, text=True, timeout=60,
                                check=False)
                 for more in ([], ["parallel.tp=2"]))
    assert good.returncode == 0 and good.stdout.startswith("ok: 8 ranks"), good.stderr
    assert bad.returncode == 2 and "Traceback" not in bad.stderr and "parallel.tp=2: the layers" in bad.stderr

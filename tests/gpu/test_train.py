"""`threed train` as a user starts it: the launcher, which must not touch a GPU, forks ranks that do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
TOY = ["configs/toy.yaml", "parallel.tp=1", "parallel.pp=1", "model.layers=2", "precision.dtype=bf16",
       "checkpoint.every=3"]
RUNS = {
    "all GPUs": [*TOY, "parallel.dp=auto", "zero.stage=2"],
    "own layers": ["examples/vit.yaml", "parallel.dp=1", "parallel.pp=1"],
    "graphs": [*TOY, "parallel.dp=1", "run.cuda_graphs=true"],
    "deterministic": [*TOY, "parallel.dp=1", "run.deterministic=true", "data.document_mask=true"],
    "offload": [*TOY, "parallel.dp=1", "zero.stage=2", "offload.optimizer=cpu", "run.verify_every=2"],
}


def train(*words: str) -> str:
    """What a run prints."""
    done = subprocess.run(
        [sys.executable, "-m", "threed", "train", *words], cwd=ROOT, capture_output=True, text=True,
        check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_and_goes_on(name, tmp_path):
    """Six steps, and two more from the checkpoint after the last of them."""
    run = tmp_path / "run"
    out = train(*RUNS[name], "train.steps=6", "train.eval_every=0", "run.device=cuda", "run.restarts=0",
                "monitor.wandb=disabled", f"run.dir={run}")
    assert ", cuda, " in out
    assert "resumed from" in train(str(run), "train.steps=8")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [step["train/loss"] for step in steps if "train/loss" in step]
    assert len(losses) == 8 and losses[-1] < losses[0]

"""Whole runs whose ranks share sequences: the same numbers as without, with all that surrounds training."""

from __future__ import annotations

import pytest

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests.running import Run, metrics

TOY = ["train", "configs/toy.yaml", "model.layers=4", "model.hidden=32", "model.seq_len=64",
       "model.vocab=300",
       "train.global_batch_size=4", "train.micro_batch_size=2", "train.eval_every=2", "train.sample_every=2",
       "train.sample_prompts=[a]", "train.sample_tokens=3", "monitor.wandb=disabled", "train.steps=4",
       "data.document_mask=true", "data.packing=best-fit", "parallel.dp=1", "parallel.tp=1", "parallel.pp=3"]
TWO = ["parallel.cp=2", "run.verify_every=2", "monitor.trace_every=2"]


def test_the_same_numbers(tmp_path, cache):
    """Losses of training and validation on a pipeline of three, whose middle sees no tokens, in both orders;
    texts; steps that are computed twice; traces, their page, and who is slow."""
    runs = {"one": [], "zigzag": TWO, "documents": [*TWO, "parallel.cp_order=documents"]}
    for name, overrides in runs.items():
        run = Run(tmp_path, *TOY, *cache, f"run.dir={tmp_path / name}", *overrides)
        assert run.wait() == 0, run.output
    rows = [metrics(tmp_path / name) for name in runs]
    for key in ("train/loss", "train/grad_norm", "val/loss"):
        one, *others = ([row[key] for row in each if key in row] for each in rows)
        assert one and all(other == pytest.approx(one, rel=1e-5) for other in others)
    assert [row["integrity/verified_steps"] for row in rows[2]] == [0, 1, 1, 2]
    assert len({row["comm/bytes_cp"] for other in rows[1:] for row in other}) == 1  # fixed shapes
    assert all(row["straggler/slower"] == 1.0 for row in rows[2])  # they wait for each other
    page = Run(tmp_path, "report", str(tmp_path / "documents"))
    assert page.wait() == 0 and (tmp_path / "documents" / "report.html").exists(), page.output
    for command in ("compare", "trace"):
        shown = Run(tmp_path, command, str(tmp_path / "documents"))
        assert shown.wait() == 0, shown.output

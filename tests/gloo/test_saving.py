"""Runs whose disk fails them: what they say, what they leave, and with which status they end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from functools import partial

import pytest

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests.running import metrics

TOY = ["train", "configs/toy.yaml", "model.layers=4", "model.hidden=32", "model.seq_len=32",
       "model.vocab=300", "parallel.dp=2",
       "parallel.tp=1", "parallel.pp=1", "train.global_batch_size=4", "train.micro_batch_size=2",
       "train.eval_every=0",
       "monitor.wandb=disabled", "monitor.trace_every=0", "optimizer.warmup_steps=0"]


@pytest.fixture
def start(begin):
    return partial(begin, TOY)


def fill(folder, leave: int = 0) -> None:
    """Use up the space of a small file system."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            file.truncate(max(0, file.tell() - leave))


def test_a_request_to_stop_on_a_full_disk(start, mount):
    """The message does not promise a resume from the last step, and the status is not 0; once there is room,
    the run resumes from the last saved checkpoint."""
    small = mount("size=4m")
    run = start(f"run.dir={small}", "train.steps=100000", "checkpoint.every=5")
    run.wait_for("saved ")
    fill(small)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(60) == 1, run.output
    assert "its last checkpoint could not be saved" in run.output and "No space left" in run.output
    assert "goes on from here" not in run.output and "Traceback" not in run.output
    (small / "filler").unlink()
    last = int(sorted((small / "checkpoints").glob("step-*"))[-1].name.removeprefix("step-"))
    again = start(f"run.dir={small}", f"train.steps={last + 2}")
    assert again.wait() == 0, again.output
    assert f"after step {last}" in again.output
    assert not list((small / "checkpoints").glob("*.tmp"))


def test_a_disk_for_two(start, mount):
    """A disk with room for `keep` checkpoints and no more: older ones make room, all but the newest."""
    small = mount("size=1800k")
    run = start(f"run.dir={small}", "train.steps=12", "checkpoint.every=3", "checkpoint.keep=2")
    assert run.wait() == 0, run.output
    kept = sorted(path.name for path in (small / "checkpoints").glob("step-*"))
    assert kept[-1] == "step-00000012" and len(kept) == 2, (kept, run.output)
    size = sum(file.stat().st_size for file in (small / "checkpoints" / kept[0]).iterdir())
    assert 2 * size < 1800 << 10 < 3 * size, (
        f"a checkpoint has {size} bytes: the test's disk has another size than it should"
    )


def test_a_read_only_disk(start, mount):
    """Checkpoints that come due are missed with a warning; the run ends without its last one, and says so."""
    small = mount("size=8m")
    run = start(f"run.dir={small}", "train.steps=60", "checkpoint.every=4")
    run.wait_for("saved ")
    folder = small / "checkpoints"
    try:
        for options in (f"--bind {folder} {folder}", f"-o remount,bind,ro {folder}"):
            subprocess.run(["mount", *options.split()], check=True)
        assert run.wait(60) == 1, run.output
    finally:
        subprocess.run(["umount", "-l", folder], check=False)
    assert "Read-only file system" in run.output and "Traceback" not in run.output
    assert "its last checkpoint could not be saved" in run.output


def test_steps_that_are_left_out(start, tmp_path):
    """A run that learns nothing ends, and does not push good checkpoints out."""
    run = start(f"run.dir={tmp_path / 'run'}", "train.steps=40", "checkpoint.every=2",
                "train.on_nonfinite=skip",
                "train.max_skipped=5", "optimizer.lr=1e30", "optimizer.clip_grad=0",
                "optimizer.weight_decay=0")
    assert run.wait() == 1, run.output
    assert "5 steps in a row were left out (train.max_skipped)" in run.output
    assert "Traceback" not in run.output
    assert "no checkpoint of step" in run.output and "had gradients that are not finite" in run.output
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        assert json.loads((path / "manifest.json").read_text())["skipped"] == 0


def test_what_a_save_cost(start, tmp_path):
    """`checkpoint/blocked_s` and `checkpoint/written_s` are on the step at which the checkpoint was there."""
    run = start(f"run.dir={tmp_path / 'run'}", "train.steps=12", "checkpoint.every=4")
    assert run.wait() == 0, run.output
    rows = [row for row in metrics(tmp_path / "run") if "checkpoint/written_s" in row]
    assert len(rows) >= 1
    for row in rows:
        assert row["checkpoint/blocked_s"] >= 0 and row["checkpoint/written_s"] > 0
    assert run.output.count("of which the run stood still for") == 3

"""Whole runs whose checkpoints are copied to a local S3 server or another disk: what they say, and what a
failing copy costs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import time

import pytest

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests.running import Run, losses, metrics
from tests.s3_server import BUCKET, Server
from threed.training import checkpoints

TOY = ["train", "configs/toy.yaml", "model.layers=4", "model.hidden=32", "model.seq_len=32",
       "model.vocab=300", "parallel.dp=2",
       "parallel.tp=1", "parallel.pp=1", "train.global_batch_size=4", "train.micro_batch_size=2",
       "train.eval_every=0",
       "monitor.wandb=disabled", "monitor.trace_every=0", "optimizer.warmup_steps=0",
       "optimizer.decay_steps=8"]
PLACE = f"s3://{BUCKET}/run"
LOUD = "THE LAST CHECKPOINT IS NOT AT"

needs_server = pytest.mark.skipif(any(importlib.util.find_spec(name) is None
                                      for name in ("moto", "flask", "boto3", "s3fs")),
                                  reason="needs moto[s3], flask, flask-cors, boto3 and s3fs (make install)")


@pytest.fixture
def start(tmp_path, cache):
    runs = []

    def begin(*overrides: str, env: dict[str, str] | None = None) -> Run:
        runs.append(Run(tmp_path, *TOY, *cache, f"run.dir={tmp_path / 'run'}", *overrides, env=env))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


@pytest.fixture
def serve():
    servers = []

    def begin(deadly: str = "") -> Server:
        servers.append(Server(deadly))
        return servers[-1]

    yield begin
    for server in servers:
        server.kill()


def same_as_a_local_one(run: Run, folder) -> None:
    """Nothing has been lost: the run ended well, and its last checkpoint is in its folder."""
    assert run.wait() == 0, run.output
    assert "Traceback" not in run.output
    assert (folder / "run" / "checkpoints" / "step-00000004" / "manifest.json").exists()


@needs_server
def test_there_and_back(start, serve, tmp_path):
    """Copied while it runs, kept by its own rule; after the loss of the disk the run goes on from the copy,
    to the bit; a step that is named is fetched for another mesh, and a restart goes on from what came after
    it."""
    server = serve()
    to = f"checkpoint.copy_to={PLACE}"
    whole = start("train.steps=8", f"run.dir={tmp_path / 'whole'}")
    assert whole.wait() == 0, whole.output
    run = start("train.steps=6", "checkpoint.every=2", to, "checkpoint.copy_keep=2", env=server.env)
    assert run.wait() == 0, run.output
    assert f"copied step-00000006 to {PLACE}: " in run.output and LOUD not in run.output
    names = {name.split("/")[1] for name in server.objects()}
    assert "step-00000006" in names and len(names - {"latest"}) <= 2
    assert server.objects("run/step-00000006/") == {
        f"run/step-00000006/{path.name}": path.stat().st_size
        for path in (tmp_path / "run" / "checkpoints" / "step-00000006").iterdir()
    }
    shutil.rmtree(tmp_path / "run")
    again = start("train.steps=8", to, env=server.env)
    assert again.wait() == 0, again.output
    assert f"fetching {PLACE}/step-00000006: " in again.output and "after step 6" in again.output
    assert [row["step"] for row in metrics(tmp_path / "run")] == [7, 8]
    assert {step: losses(tmp_path / "whole")[step] for step in (7, 8)} == losses(tmp_path / "run")
    named = [f"train.resume={PLACE}/step-00000006", f"run.dir={tmp_path / 'named'}", "parallel.dp=1",
             "parallel.tp=2"]
    job = {**server.env, "SLURM_JOB_ID": "17"}
    other = start(*named, "train.steps=7", env=job)
    assert other.wait() == 0, other.output
    unbroken = losses(tmp_path / "whole")[7][0]
    assert metrics(tmp_path / "named")[0]["train/loss"] == pytest.approx(unbroken, rel=1e-5)
    restarted = start(*named, "train.steps=8", env={**job, "SLURM_RESTART_COUNT": "1"})
    assert restarted.wait() == 0, restarted.output
    assert "fetch" not in restarted.output and "after step 7" in restarted.output


@needs_server
def test_a_server_that_dies_in_the_middle(start, serve, tmp_path, monkeypatch):
    """The run ends as if nothing had been, and says what is not there; started again, it copies that
    first."""
    monkeypatch.setattr(checkpoints, "TRIES", 1)  # of which each lasts, with those of the store's client
    server = serve("step-00000004/rank-00001")
    overrides = ["train.steps=4", "checkpoint.every=2", f"checkpoint.copy_to={PLACE}"]
    run = start(*overrides, env=server.env)
    same_as_a_local_one(run, tmp_path)
    assert f"warning: step-00000004 was not copied to {PLACE}: " in run.output and LOUD in run.output
    server = serve()
    again = start(*overrides, env=server.env)
    assert again.wait() == 0, again.output
    assert f"copied step-00000004 to {PLACE}" in again.output
    assert "run/step-00000004/manifest.json" in server.objects()
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4]


@needs_server
def test_a_server_that_refuses(start, serve, tmp_path):
    """No such bucket: each copy is a warning, and nobody makes the bucket."""
    server = serve()
    run = start("train.steps=4", "checkpoint.every=2", "checkpoint.copy_to=s3://other/run", env=server.env)
    same_as_a_local_one(run, tmp_path)
    assert "was not copied to s3://other/run: The specified bucket does not exist" in run.output
    assert LOUD in run.output
    assert [bucket["Name"] for bucket in server.client().list_buckets()["Buckets"]] == [BUCKET]


@needs_server
def test_asked_to_stop_while_a_server_hangs(start, serve, tmp_path):
    """Steps and saves go on; the run stays for its last copy as long as it was told to, and no longer."""
    server = serve()
    run = start("train.steps=100000", "checkpoint.every=2", f"checkpoint.copy_to={PLACE}",
                "checkpoint.copy_wait_s=1",
                "train.resume=never", env=server.env)
    run.wait_for("copied step-")
    server.signal(signal.SIGSTOP)
    before = run.output.count("is not copied: the copy of an older one still goes on")
    while run.output.count("is not copied: the copy of an older one still goes on") < before + 3:
        assert run.process.is_alive(), run.output
        time.sleep(0.01)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(30) == 0, run.output
    assert "takes longer than checkpoint.copy_wait_s=1" in run.output and LOUD in run.output
    assert "goes on from here" in run.output


@needs_server
def test_a_store_that_cannot_be_asked(start, tmp_path, serve):
    """Whether an empty run.dir has copies to go on from is not known: one message, and the run does not begin
    anew over them."""
    server = serve()
    server.kill()
    run = start("train.steps=4", f"checkpoint.copy_to={PLACE}", env=server.env)
    assert run.wait() == 2, run.output
    assert f"checkpoints at {PLACE} cannot be fetched: " in run.output and "Traceback" not in run.output
    assert run.output.count("threed: ") == 1 and "train.resume=never" in run.output


def test_another_disk(start, tmp_path, mount):
    """A folder on another disk has copies, of which any is a checkpoint to resume from; once it is full, that
    is said, and halves do not stay there."""
    small = mount("size=3m")
    run = start("train.steps=2", f"checkpoint.copy_to={small / 'copies'}")
    assert run.wait() == 0, run.output
    assert f"copied step-00000002 to {small / 'copies'}: " in run.output
    again = start("train.steps=3", f"run.dir={tmp_path / 'other'}",
                  f"train.resume={small / 'copies' / 'step-00000002'}")
    assert again.wait() == 0 and "after step 2" in again.output, again.output
    with (small / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    run = start("train.steps=4", f"checkpoint.copy_to={small / 'copies'}")
    same_as_a_local_one(run, tmp_path)
    assert "step-00000004 was not copied" in run.output
    assert "No space left" in run.output
    assert LOUD in run.output
    assert not (small / "copies" / "step-00000004").exists()
    assert (small / "copies" / "step-00000002" / "manifest.json").exists()

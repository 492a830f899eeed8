"""Runs with loggers, as their own libraries read them; what happens to a run around them; and goodput of a
run that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from functools import partial

import psutil
import pytest

from tests.running import losses, metrics, wandb_records
from threed.monitor.goodput import FILE, spent

SMALL = ["train", "configs/toy.yaml", "model.layers=2", "model.hidden=32", "model.seq_len=32",
         "model.vocab=300", "train.global_batch_size=8", "train.micro_batch_size=1", "train.eval_every=0",
         "monitor.wandb=disabled", "optimizer.warmup_steps=0", "parallel.dp=1", "parallel.tp=1",
         "parallel.pp=2", "monitor.trace_every=0", "monitor.report=false"]


@pytest.fixture
def start(begin):
    return partial(begin, SMALL)


def test_all_five(start, tmp_path):
    """The same names and numbers as metrics.jsonl everywhere; a resume from an earlier step doubles none."""
    all_five = ("monitor.loggers=[wandb,tensorboard,mlflow,trackio,prometheus]", "monitor.prometheus_port=0",
                f"monitor.prometheus_file={tmp_path / 'threed.prom'}", "monitor.wandb=offline",
                "checkpoint.every=4", "monitor.timeline_every=4")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    env = {"TMPDIR": str(scratch), "MLFLOW_TRACKING_URI": ""}
    run = start(*all_five, "train.steps=1000", env=env)
    run.wait_for("saved")
    _await_loggers(run, tmp_path / "run")
    address = re.search(r"prometheus reads (\S+)", run.output)
    assert address, run.output
    text = urllib.request.urlopen(address[1], timeout=20).read().decode()
    assert re.search(r'threed_train_loss\{run="run pp2 dp1 tp1"\} \d', text)
    assert re.search(r'threed_time_compute_by_position\{position="1",run="run pp2 dp1 tp1"\} \d', text)
    for rank in run.ranks():
        rank.send_signal(signal.SIGKILL)
    run.wait()
    done = max(row["step"] for row in metrics(tmp_path / "run"))
    run = start(*all_five, f"train.steps={done + 4}", env=env)
    assert run.wait() == 0, run.output
    assert "resumed from" in run.output and "warning" not in run.output
    rows, expected = metrics(tmp_path / "run"), losses(tmp_path / "run")
    _read_tensorboard(tmp_path / "run", rows)
    _read_mlflow(tmp_path / "run", rows)
    text = (tmp_path / "threed.prom").read_text()
    assert f'threed_step{{run="run pp2 dp1 tp1"}} {done + 4}.0' in text and "threed_running{" in text
    assert list((tmp_path / "run" / "trackio").glob("*.db"))
    for name, place in (("tensorboard", "run/tensorboard"), ("mlflow", "run/mlflow"), ("wandb", "run/wandb"),
                        ("trackio", "run/trackio"), ("prometheus", "threed.prom")):
        assert re.search(rf"^{name} +(\S.*{place}|has not started yet)", run.output, re.M), run.output
    assert not list(scratch.glob("*wandb*")) and len(expected) == done + 4
    assert not (tmp_path / "run" / "wandb" / "tmp").exists()


def _await_loggers(run, folder) -> None:
    """Loggers start beside the run: until each has what has come so far."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        sent = [file.read_text().count("\n") for file in folder.glob("mlflow/*/*/metrics/train/loss")]
        begun = (folder / "mlflow-run").exists() and all(
            list(folder.glob(each)) for each in ("wandb/*run-*/*.wandb", "trackio/*.db"))
        if begun and sent and sent[0] >= len(metrics(folder)) - 1 and "prometheus reads" in run.output:
            return
        time.sleep(0.2)
    raise AssertionError(run.output)


def _read_tensorboard(folder, rows) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert len(list((folder / "tensorboard").iterdir())) == 2
    for name in ("train/loss", "perf/step_s", "time/compute/1", "run/goodput", "spent/steps"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows], name
    names = {name for row in rows for name, value in row.items() if value is not None} - {"step"}
    # A tag stays when all its numbers were of steps that were repeated.
    assert {name for name in events.Tags()["scalars"] if events.Scalars(name)} == names


def _read_mlflow(folder, rows) -> None:
    """One run, which has gone on; it keeps the numbers of repeated steps beside the new ones."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    from mlflow import MlflowClient

    client = MlflowClient((folder / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("threed")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    last = {item.step: item.value for item in client.get_metric_history(run.info.run_id, "train/loss")}
    assert last == {row["step"]: row["train/loss"] for row in rows}
    assert client.list_artifacts(run.info.run_id, "timeline")


def test_wandb_is_killed_and_its_disk_is_full(start, tmp_path, mount):
    """Neither ends the run, nor changes a number of it."""
    small = mount("size=64m")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "wandb").symlink_to(small)
    run = start("train.steps=60", "monitor.wandb=offline")
    run.wait_for("step  3/60")
    with (small / "full").open("wb") as file, pytest.raises(OSError):
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    run.wait_for("step 10/60")
    for child in psutil.Process(run.ranks()[0].pid).children(recursive=True):
        child.kill()
    assert run.wait() == 0, run.output
    assert len(losses(tmp_path / "run")) == 60 and run.output.count("warning: wandb is off: ") == 1
    assert re.search(r"^wandb +off$", run.output, re.M)


def test_a_server_that_refuses(start, tmp_path):
    """With a key in the environment and no server: one line, and the run is not started again."""
    run = start("train.steps=2", "monitor.wandb=auto", "run.restarts=3",
                env={"WANDB_MODE": "", "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": 40 * "a"})
    assert run.wait() == 0, run.output
    assert run.output.count("warning: ") == 1 and "cannot be reached: Connection refused" in run.output
    assert "restart " not in run.output and wandb_records(tmp_path / "run")


def test_goodput_of_a_run_that_is_killed_twice(tmp_path, cache):
    """Once a rank is killed, and the launcher starts it again; once everything is, and a person starts it.
    What the time went into adds up to the time that passed."""
    argv = [sys.executable, "-m", "threed", *SMALL, *cache, f"run.dir={tmp_path / 'run'}",
            "checkpoint.every=5", "run.restarts=2", "run.restart_wait_s=1", "train.eval_every=5"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}

    def wait_for(text: str, process: subprocess.Popen, after: int = 0) -> int:
        until = time.monotonic() + 90
        while text not in log.read_text()[after:]:
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.02)
        return len(log.read_text())

    log = tmp_path / "log.txt"
    begin = time.time()
    with log.open("w") as file:
        first = subprocess.Popen([*argv, "train.steps=100000"], stdout=file, stderr=file, env=env)
    wait_for("saved", first)
    psutil.Process(first.pid).children()[0].kill()
    seen = wait_for("resumed from", first)
    wait_for("saved", first, seen)
    for process in [*psutil.Process(first.pid).children(), psutil.Process(first.pid)]:
        process.kill()
    first.wait()
    killed = time.time()
    time.sleep(2)
    done = metrics_of_whole_lines(tmp_path / "run")
    with log.open("a") as file:
        last = subprocess.run([*argv, f"train.steps={done + 5}"], stdout=file, stderr=file, env=env,
                              timeout=90)
    passed_s = time.time() - begin
    assert last.returncode == 0, log.read_text()
    found = spent(tmp_path / "run")
    assert found is not None
    # less what processes take to end after their last word, on a busy machine
    assert found.wall_s == pytest.approx(passed_s, rel=0.01, abs=0.5)
    assert sum(found.parts.values()) == pytest.approx(found.wall_s)
    assert all(found.parts[part] > 0 for part in ("steps", "repeated", "start", "load", "save", "evaluation"))
    assert 3 < found.parts["down"] < 3 + (time.time() - killed), found.parts  # 1 s by the launcher, 2 s by us
    assert "\ngoodput    " in log.read_text()
    starts = [json.loads(line)["first"] for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    assert sum(starts) == 3
    row = metrics(tmp_path / "run")[-1]
    assert 0 < row["run/goodput"] < 1 and row["spent/steps"] <= found.parts["steps"]
    listed = subprocess.run([*argv[:3], "runs", str(tmp_path), "--json"], capture_output=True, env=env,
                            text=True)
    assert json.loads(listed.stdout)["runs"][0]["goodput"]["share"] == pytest.approx(found.goodput)


def metrics_of_whole_lines(folder) -> int:
    """The last step that is written."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return json.loads(next(line for line in reversed(lines) if line.endswith("\n")))["step"]

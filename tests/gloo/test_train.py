"""Whole runs over real processes, from the command line: parity, resume, signals, failures, bad input."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests.running import Run, losses, metrics, wandb_records

TOY = ["train", "configs/toy.yaml", "model.layers=6", "model.hidden=32", "model.seq_len=32",
       "model.vocab=300",
       "train.global_batch_size=8", "train.micro_batch_size=1", "train.eval_every=0",
       "monitor.wandb=disabled",
       "optimizer.warmup_steps=0"]


@pytest.fixture
def start(begin):
    return partial(begin, TOY)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, cache):
    """A run of 12 steps without faults."""
    folder = tmp_path_factory.mktemp("unbroken")
    run = Run(folder, *TOY, *cache, f"run.dir={folder / 'run'}", "train.steps=12", "checkpoint.every=4",
              "checkpoint.keep=0",
              "train.eval_every=6", "monitor.wandb=offline")
    assert run.wait() == 0, run.output
    return folder / "run", run.output


def test_metrics_and_summary(unbroken):
    """Every documented key on every step, on one scale with the others, and the summary's lines."""
    folder, output = unbroken
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, 13))
    keys = {"train/loss", "train/lr", "train/grad_norm", "perf/step_s", "perf/tokens_per_s",
            "perf/tokens_per_s_per_device",
            "perf/model_tflops_per_device", "perf/mfu", "pipeline/bubble_measured",
            "pipeline/bubble_predicted",
            "pipeline/bubble_measured/0", "pipeline/bubble_measured/1", "pipeline/bubble_predicted/0",
            "pipeline/bubble_predicted/1", "comm/bytes_dp", "comm/bytes_tp", "comm/bytes_pp",
            "memory/peak_bytes"}
    for row in rows:
        assert keys <= row.keys()
        assert ("val/loss" in row) == (row["step"] % 6 == 0)
        assert row["perf/mfu"] is None
        assert 0 <= row["pipeline/bubble_measured"] < 1 and 0 <= row["pipeline/bubble_predicted"] < 1
        assert min(row[f"comm/bytes_{axis}"] for axis in ("dp", "tp", "pp")) > 0
    for word in ("loss  ", "speed  ", "bubble  ", "checkpoint ", "metrics  ", "wandb  "):
        assert word in output


def test_wandb_holds_the_same(unbroken):
    """The offline wandb run, read back, holds the numbers of metrics.jsonl."""
    folder, _ = unbroken
    history = {item["history"]["item"]["_step"]: item["history"]["item"] for item in wandb_records(folder)
               if item.get("type") == "history"}
    for row in metrics(folder):
        logged = history[row["step"]]
        assert {key: value for key, value in row.items() if key != "step" and value is not None} == {
            key: value for key, value in logged.items() if not key.startswith(("_", "report."))}


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 1, 8), (1, 8, 1), (4, 1, 2)])
def test_same_numbers_on_every_mesh(mesh, start, tmp_path, unbroken):
    """Loss to 1e-5 and norm to 1e-4 against dp=2 x tp=2 x pp=2, validation loss included."""
    dp, tp, pp = mesh
    run = start("train.steps=6", "optimizer.decay_steps=12", f"parallel.dp={dp}", f"parallel.tp={tp}",
                f"parallel.pp={pp}",
                "train.eval_every=6")
    assert run.wait() == 0, run.output
    want, got = losses(unbroken[0]), losses(tmp_path / "run")
    for step in range(1, 7):
        assert got[step][0] == pytest.approx(want[step][0], rel=1e-5)
        assert got[step][1] == pytest.approx(want[step][1], rel=1e-4)
    evaluated = metrics(unbroken[0])[5]["val/loss"]
    assert metrics(tmp_path / "run")[5]["val/loss"] == pytest.approx(evaluated, rel=1e-5)


@pytest.mark.parametrize("victims", ["one", "all"])
def test_killed_and_resumed(victims, start, tmp_path, unbroken):
    """SIGKILL at some step; the run ends soon; resumed, its losses are equal to the bit to the run never
    stopped."""
    run = start("train.steps=12", "checkpoint.every=4")
    run.wait_for("step  7/12")
    ranks = run.ranks()
    for process in ranks[5:6] if victims == "one" else ranks:
        process.kill()
    status = run.wait(20)
    assert status == 128 + 9, (status, run.output)
    assert "was killed by SIGKILL" in run.output
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "train/lo')  # what a kill in the middle of a line leaves
    again = start("train.steps=12", "checkpoint.every=4")
    assert again.wait() == 0, again.output
    assert "resumed from" in again.output and "after step 4" in again.output
    assert losses(tmp_path / "run") == losses(unbroken[0])


def test_killed_in_the_middle_of_a_save(start, tmp_path, unbroken):
    """A checkpoint that was being written is not taken for one; the one before is."""
    run = start("train.steps=12", "checkpoint.every=4")
    until = time.monotonic() + 60
    while (
        not list((tmp_path / "run" / "checkpoints").glob("step-00000008.*.tmp")) and time.monotonic() < until
    ):
        time.sleep(0.0005)
    for process in run.ranks():
        process.kill()
    assert run.wait(20) != 0
    again = start("train.steps=12", "checkpoint.every=4")
    assert again.wait() == 0, again.output
    assert "resumed from" in again.output
    assert losses(tmp_path / "run") == losses(unbroken[0])
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp"))
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text().split()[0] == "step-00000012"


def test_resume_on_another_mesh(start, tmp_path, unbroken):
    """A checkpoint of dp=2 x tp=2 x pp=2 goes on on other meshes, within the fp32 tolerance."""
    source = unbroken[0] / "checkpoints" / "step-00000004"
    for dp, tp, pp in ((1, 4, 2), (4, 1, 1), (1, 1, 3)):
        name = f"run-{dp}{tp}{pp}"
        run = start("train.steps=8", "optimizer.decay_steps=12", f"train.resume={source}",
                    f"parallel.dp={dp}",
                    f"parallel.tp={tp}", f"parallel.pp={pp}", name=name)
        assert run.wait() == 0, run.output
        got = losses(tmp_path / name)
        assert sorted(got) == [5, 6, 7, 8]
        for step, (loss, norm) in got.items():
            assert loss == pytest.approx(losses(unbroken[0])[step][0], rel=1e-5)
            assert norm == pytest.approx(losses(unbroken[0])[step][1], rel=1e-4)


def test_signals(start, tmp_path, unbroken):
    """SIGUSR1 saves and goes on; SIGTERM saves and ends with status 0; the run goes on to the same bits."""
    run = start("train.steps=12")
    run.wait_for("step  2/12")
    os.kill(run.process.pid, signal.SIGUSR1)
    run.wait_for("saved ")
    run.wait_for("step  6/12")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(20) == 0, run.output
    assert "stopped on request after step" in run.output and run.output.count("saved ") == 2
    again = start("train.steps=12")
    assert again.wait() == 0, again.output
    assert losses(tmp_path / "run") == losses(unbroken[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_no_rank_outlives_its_launcher(number, start, tmp_path):
    """A launcher that is killed, or whose terminal closes: no rank trains on unseen."""
    run = start("train.steps=100000")
    run.wait_for("step      2/100000")
    ranks = run.ranks()
    os.kill(run.process.pid, number)
    run.process.join(20)
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert len(ranks) == 8 and not alive
    if number == signal.SIGHUP:
        assert "stopped on request" in run.output


def test_one_run_a_folder(start, tmp_path):
    """A second run in the same run.dir is refused; the first goes on."""
    first = start("train.steps=100000")
    first.wait_for("step      1/100000")
    second = start("train.steps=2")
    assert second.wait() == 2 and "Traceback" not in second.output, second.output
    assert f"is in use by another run (on {socket.gethostname()}, process " in second.output
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.wait(20) == 0, first.output


def test_other_settings_on_resume(start, tmp_path, unbroken):
    """Another batch size goes on at the sample where the data was, and what changed is said."""
    source = unbroken[0] / "checkpoints" / "step-00000004"
    run = start("train.steps=6", f"train.resume={source}", "train.global_batch_size=16", "train.seed=7")
    assert run.wait() == 0, run.output
    assert "note: train.global_batch_size was 8" in run.output and "note: train.seed was 1234" in run.output
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-00000006" / "manifest.json").read_text())
    assert manifest["samples"] == 4 * 8 + 2 * 16


@pytest.mark.core
def test_bad_folders(start, tmp_path):
    """A run.dir that cannot be used: one message, exit status 2."""
    (tmp_path / "file").write_text("")
    run = start("train.steps=2", f"run.dir={tmp_path / 'file'}")
    assert run.wait() == 2 and "cannot be used" in run.output and "Traceback" not in run.output, run.output


def test_a_validation_loss_that_is_not_finite(start):
    run = start("train.steps=1", "optimizer.lr=1e30", "optimizer.clip_grad=0", "train.eval_every=1")
    assert run.wait() == 1 and "val/loss after step 1 is" in run.output, run.output


def test_a_rank_that_leaves(start, monkeypatch):
    """A rank that ends without a message of its own is named."""
    import threed.engine.engine as engine

    def leave(self, batch):
        if self.comm.rank == 3:
            os._exit(7)
        return original(self, batch)

    original = engine.Engine.train_step
    monkeypatch.setattr(engine.Engine, "train_step", leave)
    run = start("train.steps=3")
    assert run.wait(30) == 7, run.output
    assert "rank 3" in run.output


def test_a_rank_that_raises(start, monkeypatch):
    """All ranks end within seconds, and the message is that rank's."""
    import threed.features.pipeline.run as pipeline

    def fail(self, instruction, slots):
        if self.comm.rank == 6 and instruction.microbatch == 1:
            raise RuntimeError("the seventh seal")
        return original(self, instruction, slots)

    original = pipeline.PipelineRun.backward
    monkeypatch.setattr(pipeline.PipelineRun, "backward", fail)
    begin = time.monotonic()
    run = start("train.steps=3")
    assert run.wait(40) == 1, run.output
    assert run.output.count("the seventh seal") == 1 and "rank 6 (pp1 dp1 tp0)" in run.output, run.output
    assert "BACKWARD u" in run.output and time.monotonic() - begin < 40


def test_a_rank_that_stops_answering(start):
    """SIGSTOP: within run.timeout_s every other rank says which op, unit, micro-batch and peer it waits
    for."""
    run = start("train.steps=10000", "run.timeout_s=8", "monitor.console_every=1000000")
    until = time.monotonic() + 60
    while not (Path(run.log.parent) / "run" / "metrics.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(2.0)
    ranks = run.ranks()
    os.kill(ranks[5].pid, signal.SIGSTOP)
    stopped = time.monotonic()
    assert run.wait(30) != 0
    # the launcher's grace for the last to end comes on top
    assert time.monotonic() - stopped < 8 + 6, run.output
    for rank in (0, 1, 2, 3, 4, 6, 7):
        assert f"rank {rank} (pp" in run.output or f"rank {rank} for" in run.output, run.output
    assert run.output.count(" at '") == 7, run.output
    assert run.output.count("with rank") + run.output.count("with all ranks") == 7, run.output


def test_a_loss_that_is_not_finite(start, tmp_path, unbroken):
    """The run ends and names the step, the rank and the unit; or skips and counts, as configured."""
    run = start("train.steps=40", "optimizer.lr=1e30", "optimizer.clip_grad=0", "optimizer.weight_decay=0")
    assert run.wait() == 1, run.output
    assert "not finite" in run.output and "first in the" in run.output and "on rank" in run.output
    assert run.output.count("threed: step") == 1
    skip = start("train.steps=4", "optimizer.lr=1e30", "optimizer.clip_grad=0", "optimizer.weight_decay=0",
                 "train.on_nonfinite=skip", name="skip")
    assert skip.wait() == 0, skip.output
    assert "the step is skipped" in skip.output
    assert metrics(tmp_path / "skip")[-1]["train/skipped_steps"] > 0


def test_full_disk(start, mount):
    """A save that finds no room says so, leaves the older checkpoint valid and nothing half-written; the run
    goes on. It does not end with status 0: its last checkpoint is missing. With checkpoint.keep older ones
    make room."""
    small = mount("size=3m")
    run = start("train.steps=12", "checkpoint.every=2", "checkpoint.keep=0", f"run.dir={small}",
                "monitor.trace_every=0")
    status = run.wait()
    assert status == 1, run.output
    assert "no checkpoint of step" in run.output and "No space left" in run.output
    assert "the run ends after step 12, and its last checkpoint could not be saved" in run.output
    kept = sorted(path.name for path in (small / "checkpoints").glob("step-*"))
    assert kept and not any(name.endswith(".tmp") for name in kept)
    assert (small / "checkpoints" / "latest").read_text().split()[0] == kept[-1]
    again = start("train.steps=12", "checkpoint.every=0", f"run.dir={small}", "monitor.trace_every=0")
    assert again.wait() == 0, again.output
    assert (small / "checkpoints" / "latest").read_text().split()[0] == "step-00000012"


@pytest.mark.parametrize(("damage", "words"), [
    ("truncate", "is damaged: rank-00003.safetensors has"),
    ("remove", "is incomplete: rank-00003.safetensors cannot be read"),
    ("manifest", "manifest.json cannot be read"),
    ("model", "is of another model: model.hidden=32 there, 64 here; give the model its sizes, or a new run"),
    ("nothing", "there is no checkpoint here"), ("flip", "is damaged")])
def test_bad_checkpoints(damage, words, start, tmp_path, unbroken):
    """One clear message, exit status 2, no traceback."""
    source = tmp_path / "step"
    shutil.copytree(unbroken[0] / "checkpoints" / "step-00000004", source)
    file = source / "rank-00003.safetensors"
    if damage == "truncate":
        os.truncate(file, 100)
    elif damage == "remove":
        file.unlink()
    elif damage == "manifest":
        os.truncate(source / "manifest.json", 50)
    elif damage == "nothing":
        source = tmp_path / "nowhere"
    elif damage == "flip":
        content = bytearray(file.read_bytes())
        content[4:12] = b"\xff" * 8
        file.write_bytes(content)
    run = start("train.steps=12", f"train.resume={source}",
                *(["model.hidden=64"] if damage == "model" else []))
    assert run.wait() == 2, run.output
    assert words in run.output and "Traceback" not in run.output
    assert run.output.count("threed: ") == 1, run.output


@pytest.mark.parametrize(("overrides", "words"), [
    (["data.source=/nowhere/at/all"], "/nowhere/at/all"),
    (["data.tokenizer=/nowhere/tokenizer.json"], "tokenizer.json"),
    (["model.seq_len=100000000"], "model.seq_len"), (["model.heads=7"], "not divisible by model.heads=7"),
    (["train.stepz=3"], "did you mean train.steps?")])
def test_bad_input(overrides, words, start, tmp_path):
    run = start("train.steps=2", *overrides)
    assert run.wait() == 2, run.output
    assert words in run.output and "Traceback" not in run.output
    assert not (tmp_path / "run" / "checkpoints").exists()


def free_port() -> int:
    """A port below those that the system hands out: between this and its use nobody else gets it by
    chance."""
    for port in random.sample(range(20000, 30000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def test_two_nodes(tmp_path, cache, unbroken):
    """launch/torchrun.sh twice on this machine, four ranks each: the same numbers as one launcher's."""
    port, processes = str(free_port()), []
    for node in range(2):
        env = {**os.environ, "NNODES": "2", "NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": port,
               "GPUS_PER_NODE": "4", "PYTHON": sys.executable}
        argv = ["launch/torchrun.sh", *TOY[1:], *cache, f"run.dir={tmp_path / 'run'}", "train.steps=3",
                "optimizer.decay_steps=12"]
        processes.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                          text=True))
    outputs = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n----\n".join(outputs)
    assert losses(tmp_path / "run") == {step: pair for step, pair in losses(unbroken[0]).items() if step <= 3}


def test_torchrun(tmp_path, cache, unbroken):
    """torchrun itself: one agent, two ranks that it starts as processes of their own."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2",
            "--master-addr=127.0.0.1",
            f"--master-port={free_port()}", "-m", "threed", *TOY, *cache, f"run.dir={tmp_path / 'run'}",
            "train.steps=3",
            "optimizer.decay_steps=12", "parallel.dp=1", "parallel.tp=2", "parallel.pp=1"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180)
    assert done.returncode == 0, done.stdout
    for step, (loss, _) in losses(tmp_path / "run").items():
        assert loss == pytest.approx(losses(unbroken[0])[step][0], rel=1e-5)


def test_torchrun_starts_again(tmp_path, cache, unbroken):
    """--max-restarts: its agent serves the store of the start before, where the failure of that one is."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2",
            "--max-restarts=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}", "-m", "threed",
            *TOY, *cache, f"run.dir={tmp_path / 'run'}", "train.steps=12", "checkpoint.every=1",
            "optimizer.decay_steps=12", "parallel.dp=1", "parallel.tp=2", "parallel.pp=1"]
    agent = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    latest, until = tmp_path / "run" / "checkpoints" / "latest", time.monotonic() + 120
    while not (latest.exists() and latest.read_text().startswith("step-")):
        assert time.monotonic() < until and agent.poll() is None
        time.sleep(0.05)
    ranks = [each for each in psutil.Process(agent.pid).children(recursive=True)
             if each.environ().get("RANK") == "1"]
    ranks[0].kill()
    output, _ = agent.communicate(timeout=180)
    assert agent.returncode == 0, output
    assert "resumed from" in output, output
    assert max(losses(tmp_path / "run")) == 12
    for step, (loss, _) in losses(tmp_path / "run").items():
        assert loss == pytest.approx(losses(unbroken[0])[step][0], rel=1e-5)


def test_no_rank_outlives_torchrun(tmp_path, cache):
    """Its agent is killed: so are the ranks that it has started."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2",
            "--master-addr=127.0.0.1",
            f"--master-port={free_port()}", "-m", "threed", *TOY, *cache, f"run.dir={tmp_path / 'run'}",
            "train.steps=100000", "parallel.dp=1", "parallel.tp=2", "parallel.pp=1"]
    agent = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        file, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
        while not file.exists() or not file.read_text():
            assert time.monotonic() < until and agent.poll() is None
            time.sleep(0.1)
        ranks = psutil.Process(agent.pid).children(recursive=True)
        agent.kill()
        agent.wait()
        _, alive = psutil.wait_procs(ranks, timeout=20)
        assert len(ranks) >= 2 and not alive
    finally:
        agent.kill()

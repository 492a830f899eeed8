"""What happens around a run: its console goes away, it is asked to stop once and twice, its time is over."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests.gloo.test_train import free_port
from tests.running import Forked, _main, losses, metrics
from threed.engine import watch
from threed.engine.engine import Engine

ONE = ["train", "configs/toy.yaml", "model.layers=1", "model.hidden=16", "model.heads=2", "model.seq_len=16",
       "model.vocab=300", "train.global_batch_size=4", "train.micro_batch_size=1", "train.eval_every=0",
       "parallel.dp=1", "parallel.tp=1", "parallel.pp=1", "monitor.wandb=disabled",
       "optimizer.warmup_steps=0",
       "run.timeout_s=60"]


@pytest.fixture
def start(begin):
    return partial(begin, ONE)


@pytest.fixture
def slow_at(monkeypatch):
    """slow_at(step, seconds): this step takes so long, without a look at signals' handlers."""
    original = Engine.train_step

    def set_up(step, seconds):
        def train_step(self, batch):
            if self.zero.step_number + 1 == step:
                time.sleep(seconds)
            return original(self, batch)

        monkeypatch.setattr(Engine, "train_step", train_step)

    return set_up


def state(folder: Path) -> dict:
    return json.loads((folder / "state.json").read_text())


def said(run: Forked) -> list[str]:
    return [line for line in run.output.splitlines() if line.startswith("threed: ")]


@pytest.mark.core
@pytest.mark.parametrize("ranked", [False, True], ids=["launcher", "as of torchrun"])
def test_a_second_request(ranked, start, slow_at, tmp_path):
    """The first is answered at once, in one line; the second ends the run, and is said to have been asked
    for. Two signals within a moment, as `timeout` and torchrun send, are one."""
    slow_at(3, 40.0)
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if ranked else None
    run = start("train.steps=9", "checkpoint.every=1", env=env)
    run.wait_for("step 2/9")
    time.sleep(0.3)
    for _ in range(2):
        os.kill(run.process.pid, signal.SIGINT)
        time.sleep(0.1)
    run.wait_for("once more to stop now", 5.0)
    time.sleep(1.2)
    assert run.process.is_alive()
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(10) == 128 + 15, run.output
    answer, end = said(run)
    assert answer.startswith("threed: stopping after step 3 (started "), run.output
    assert "; a step takes about " in answer
    newest = tmp_path / "run" / "checkpoints" / "step-0000000"
    assert end.startswith(f"threed: stopped at once, as asked; the newest checkpoint is {newest}"), end
    assert state(tmp_path / "run")["state"] == "stopped" and state(tmp_path / "run")["step"] == 2


def test_signs_of_life(start, slow_at, monkeypatch):
    """Of a first step that takes long; a later one is known by then."""
    monkeypatch.setattr(watch, "SIGN_S", 0.5)
    slow_at(1, 2.2)
    run = start("train.steps=2")
    assert run.wait() == 0, run.output
    assert 1 <= len(said(run)) <= 3
    assert all(line.startswith("threed: step 1 has run for ") for line in said(run)), run.output


@pytest.mark.core
def test_the_log_has_what_was_said(start, tmp_path):
    """All lines of the console, with the time; a refused start of a new run leaves no folder; --quiet says
    warnings and the summary alone, and the log has the rest."""
    run = start("train.steps=3")
    assert run.wait() == 0, run.output
    log = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert [line[20:] for line in log] == [line.rstrip() for line in run.output.splitlines()]
    assert "K parameters" in run.output and "left" in run.output.split("step 1/3")[1].split("\n")[0]
    assert "exposed traffic" in run.output and "bubble" not in run.output
    refused = start("model.heads=2", "data.tokenizer=/nowhere/tokenizer.json", name="new")
    assert refused.wait() == 2 and not (tmp_path / "new").exists(), refused.output
    before = (tmp_path / "run" / "config.json").read_text()
    refused = start("data.tokenizer=/nowhere/tokenizer.json")
    assert refused.wait() == 2
    assert (tmp_path / "run" / "log.txt").read_text().count("/nowhere/tokenizer.json") >= 1
    assert (tmp_path / "run" / "config.json").read_text() == before
    quiet = start("train.steps=5", "--quiet")
    assert quiet.wait() == 0
    shown = quiet.output.strip().splitlines()
    assert shown[0].startswith("mean of the last 2 steps") and "step 4/5" not in quiet.output, quiet.output
    assert "step 4/5" in (tmp_path / "run" / "log.txt").read_text()


class Terminal(Forked):
    """`threed ...` with a terminal of its own, which `close` takes away."""

    def __init__(self, folder: Path, argv: list[str]):
        self.master, slave = pty.openpty()

        def body() -> int:
            os.dup2(slave, 1)
            os.dup2(slave, 2)
            os.close(self.master)
            os.close(slave)
            return _main(tuple(argv), {})

        super().__init__(folder, body)
        os.close(slave)

    def close_after(self, text: bytes) -> None:
        seen = b""
        while text not in seen:
            seen += os.read(self.master, 4096)
        os.close(self.master)


@pytest.mark.core
@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_terminal_that_goes_away(hangs_up, cache, tmp_path):
    """Without a signal, as under nohup, the run goes on to its end; a hang-up saves and ends it."""
    run = Terminal(tmp_path, [*ONE, *cache, "train.steps=60", f"run.dir={tmp_path / 'run'}",
                              "run.restarts=0"])
    run.close_after(b"step  5/60")
    if hangs_up:
        os.kill(run.process.pid or 0, signal.SIGHUP)
    assert run.wait() == 0
    steps = [row["step"] for row in metrics(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1)) and (len(steps) < 60) == hangs_up
    assert (tmp_path / "run" / "checkpoints" / f"step-{len(steps):08}").is_dir()
    assert state(tmp_path / "run")["state"] == ("stopped" if hangs_up else "ended")
    assert f"step {len(steps):2}/60" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("closed", [(1,), (1, 2), (0, 1, 2)])
def test_closed_streams(closed, cache, tmp_path):
    """`>&-`: no file of the run takes their numbers."""
    def body() -> int:
        sys.stdout = sys.__stdout__ = None  # as Python starts
        sys.stderr = None if 2 in closed else sys.stderr
        for number in closed:
            os.close(number)
        return _main((*ONE, *cache, "train.steps=2", f"run.dir={tmp_path / 'run'}"), {})

    run = Forked(tmp_path, body)
    assert run.wait() == 0, run.output
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]


def test_a_run_ends_before_its_time_is_over(start, tmp_path):
    """With a checkpoint and status 0; started again it goes on; on two ranks, whose deadline rank 0's is."""
    run = start("train.steps=1000000", "run.stop_after=14s", "parallel.dp=2", "monitor.console_every=1000")
    assert run.wait(90) == 0, run.output
    assert "before run.stop_after=14s is over; the same command goes on from here" in run.output
    done = state(tmp_path / "run")
    assert done["state"] == "stopped" and done["step"] > 0
    assert (tmp_path / "run" / "checkpoints" / f"step-{done['step']:08}").is_dir()
    again = start(f"train.steps={done['step'] + 2}", "run.stop_after=1d", "parallel.dp=2")
    assert again.wait() == 0, again.output
    assert max(losses(tmp_path / "run")) == done["step"] + 2


@pytest.mark.core
def test_no_time_at_all(start, tmp_path, monkeypatch):
    """Loading took it: no step begins, and a chain of jobs sees it by the status. After a failure of the same
    start, which may have made steps, it is no mistake."""
    run = start("train.steps=9", "run.stop_after=1", "parallel.dp=2")
    assert run.wait() == 2, run.output
    assert "threed: run.stop_after=1 leaves no time before step 1: " in run.output
    assert "nothing to do" not in run.output and not (tmp_path / "run").exists()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again = start("train.steps=9", "run.stop_after=1")
    assert again.wait() == 0, again.output
    assert "run.stop_after=1 leaves no time before step 1; nothing in " in again.output


def test_a_quiet_run(start, tmp_path):
    """monitor.quiet: the console has the summary, and log.txt has all lines."""
    run = start("train.steps=2", "monitor.quiet=true")
    assert run.wait() == 0, run.output
    lines = run.output.splitlines()
    assert not [line for line in lines if line.startswith("step ")] and "mean of the last 2 steps:" in lines
    assert "step 2/2" in (tmp_path / "run" / "log.txt").read_text()

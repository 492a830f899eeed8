"""A run that fails is started again by itself, where that promises something; and nothing of a failure is
left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

import threed.launcher.local  # noqa: F401  (imported before the runs fork)
from tests.running import Run, losses, metrics
from threed.base.errors import InputError

SMALL = ["train", "configs/toy.yaml", "model.layers=2", "model.hidden=32", "model.seq_len=32",
         "model.vocab=300",
         "train.global_batch_size=8", "train.micro_batch_size=1", "train.eval_every=0",
         "monitor.wandb=disabled",
         "optimizer.warmup_steps=0", "parallel.dp=2", "parallel.tp=1", "parallel.pp=2",
         "monitor.trace_every=2"]
AGAIN = ["run.restarts=2", "run.restart_wait_s=0.1"]


@pytest.fixture
def start(begin):
    return partial(begin, SMALL)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, cache):
    """The losses of a run without faults."""
    folder = tmp_path_factory.mktemp("unbroken")
    run = Run(folder, *SMALL, *cache, f"run.dir={folder / 'run'}", "train.steps=12")
    assert run.wait() == 0, run.output
    return losses(folder / "run")


@pytest.fixture
def fail_at(monkeypatch):
    """fail_at(step, rank, what): before its step `step`, a rank calls `what` with the number of restarts so
    far."""
    from threed.engine.engine import Engine

    original = Engine.train_step

    def set_up(step, rank, what):
        def train_step(self, batch):
            if self.comm.rank == rank and self.zero.step_number + 1 == step:
                what(int(os.environ["THREED_RESTARTS"]))
            return original(self, batch)

        monkeypatch.setattr(Engine, "train_step", train_step)

    return set_up


def kill_once(restarts: int) -> None:
    if not restarts:
        os.kill(os.getpid(), signal.SIGKILL)


def said(run: Run) -> list[str]:
    """The lines of the output about failures."""
    return [line for line in run.output.splitlines() if line.startswith("threed: ")]


@pytest.mark.parametrize("every", [0, 4])
def test_a_killed_rank(every, start, fail_at, tmp_path, unbroken):
    """The run goes on by itself, from the newest checkpoint or from the start: one line says why, no echo of
    other ranks follows, and each step stands once in metrics.jsonl and in the traces, with the numbers of a
    run that nothing happened to."""
    fail_at(7, 1, kill_once)
    # In the foreground: a background save is complete some steps later on a busy machine.
    saves = [f"checkpoint.every={every}", "checkpoint.background=false"]
    run = start("train.steps=12", *saves, *AGAIN)
    assert run.wait() == 0, run.output
    assert said(run) == ["threed: rank 1 was killed by SIGKILL",
                         "threed: restart 1 of 2 since the newest checkpoint, in 0.1 s: rank 1 was killed by "
                         "SIGKILL at step 7"]
    assert "Traceback" not in run.output and "gloo" not in run.output
    assert (f"after step {every}" in run.output) == bool(every)
    assert losses(tmp_path / "run") == unbroken
    undone = (tmp_path / "run" / "metrics.undone.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in undone] == list(range(every + 1, 7))
    for rank in range(4):
        lines = [json.loads(line)
                 for line in (tmp_path / "run" / "trace" / f"rank-{rank:05d}.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "step" in line] == [2, 4, 6, 8, 10, 12]


def test_all_ranks_killed_again_and_again(start, fail_at, tmp_path, unbroken):
    """The count begins anew at each new checkpoint; here it would not do otherwise. (In the foreground: a
    background save may not be complete when the kill comes.)"""
    def kill(restarts: int) -> None:
        parent = psutil.Process(os.getppid())
        if restarts < 3:
            for child in parent.children():
                child.kill()

    # Each start gets two steps further than the one before.
    from threed.engine.engine import Engine

    original = Engine.train_step

    def train_step(self, batch):
        restarts = int(os.environ["THREED_RESTARTS"])
        if self.comm.rank == 2 and self.zero.step_number + 1 == 4 + 2 * restarts:
            kill(restarts)
        return original(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "train_step", train_step)
        run = start("train.steps=12", "checkpoint.every=2", "checkpoint.background=false", "run.restarts=1",
                    "run.restart_wait_s=0.1")
    assert run.wait() == 0, run.output
    assert run.output.count("threed: restart 1 of 1 since the newest checkpoint") == 3, run.output
    assert losses(tmp_path / "run") == unbroken


def test_the_same_again(start, fail_at):
    """A failure at the same step for the same reason is the run's own: the run ends with the failure's status
    and message."""
    def fail(_: int) -> None:
        raise RuntimeError("the seventh seal")

    fail_at(3, 2, fail)
    run = start("train.steps=6", "run.restarts=5", "run.restart_wait_s=0.1")
    assert run.wait() == 1, run.output
    lines = said(run)
    assert "RuntimeError: the seventh seal" in run.output and "restart 1 of 5" in lines[1]
    assert lines[1].endswith("RuntimeError: the seventh seal at step 3")
    assert lines[-1] == ("threed: not started again: it failed twice with the same error at step 3, so the "
                         "machine is not the cause")
    assert "restart 2" not in run.output


def test_a_loss_that_is_not_finite_again(start):
    run = start("train.steps=40", "optimizer.lr=1e30", "optimizer.clip_grad=0", "optimizer.weight_decay=0",
                *AGAIN)
    assert run.wait() == 1, run.output
    assert run.output.count("threed: step") == 2
    assert "not started again: it failed twice with the same error at step" in run.output


def test_a_mistake_is_not_repeated(start, fail_at):
    """Exit status 2: starting again cannot help."""
    def fail(_: int) -> None:
        raise InputError("this cannot be honoured")

    fail_at(2, 0, fail)
    run = start("train.steps=6", *AGAIN)
    assert run.wait() == 2 and said(run) == ["threed: this cannot be honoured"], run.output


def test_an_error_of_the_code_before_the_first_step(start, monkeypatch):
    """A new start would meet it again: there is none."""
    from threed.training.trainer import Trainer

    def fail(*_: object) -> None:
        raise AttributeError("'NoneType' object has no attribute 'flush'")

    monkeypatch.setattr(Trainer, "run", fail)
    run = start("train.steps=6", *AGAIN)
    assert run.wait() == 1 and "restart 1" not in run.output, run.output
    assert "has no attribute 'flush'" in run.output
    assert said(run)[-1] == "threed: not started again: a new start would fail in the same way"


def test_it_gives_up(start, fail_at):
    """No more than run.restarts starts from one checkpoint; longer waits from one to the next."""
    fail_at(3, 0, lambda restarts: os.kill(os.getpid(), signal.SIGKILL))
    run = start("train.steps=6", *AGAIN)
    assert run.wait() == 128 + 9, run.output
    assert "restart 1 of 2 since the newest checkpoint, in 0.1 s" in run.output
    assert "restart 2 of 2 since the newest checkpoint, in 0.2 s" in run.output
    assert said(run)[-1].startswith("threed: not started again: run.restarts=2 starts from the newest "
                                    "checkpoint have failed")


def test_a_rank_that_hangs(start, fail_at, tmp_path, unbroken):
    """SIGSTOP: found by the watch, and the run goes on."""
    fail_at(5, 3, lambda restarts: os.kill(os.getpid(), signal.SIGSTOP) if not restarts else None)
    run = start("train.steps=12", "checkpoint.every=2", "run.timeout_s=8", *AGAIN)
    assert run.wait() == 0, run.output
    assert ("restart 1 of 2 since the newest checkpoint, in 0.1 s: no answer within "
            "run.timeout_s=8") in run.output
    assert losses(tmp_path / "run") == unbroken


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_while_it_waits(number, start, fail_at):
    """A request to stop ends the wait for a restart."""
    fail_at(2, 0, kill_once)
    run = start("train.steps=6", "run.restarts=2", "run.restart_wait_s=1000")
    run.wait_for("in 1000 s")
    os.kill(run.process.pid, signal.SIGUSR1)  # nothing to save: no effect
    os.kill(run.process.pid, number)
    assert run.wait(20) == 128 + number, run.output
    assert said(run)[-1] == f"threed: stopped by {number.name} before it started again"


def test_no_restart_after_a_request(start, fail_at):
    """A rank that fails after the run was asked to stop."""
    def stop_and_fail(_: int) -> None:
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)

    fail_at(3, 1, stop_and_fail)
    run = start("train.steps=6", *AGAIN)
    assert run.wait() == 128 + 9, run.output
    answer, *others = said(run)
    assert answer.startswith("threed: stopping after step ") and others == [
        "threed: rank 1 was killed by SIGKILL"]


def test_wandb_goes_on(start, fail_at, tmp_path):
    """A run that fails before its first checkpoint goes on under the same wandb id."""
    fail_at(3, 1, kill_once)
    run = start("train.steps=4", "monitor.wandb=offline", *AGAIN)
    assert run.wait() == 0, run.output
    names = [path.name for path in (tmp_path / "run" / "wandb").glob("offline-run-*")]
    assert len({name.rpartition("-")[2] for name in names}) == 1 and len(names) == 2, names


def test_the_folder_is_removed(start, tmp_path):
    """Metrics went to a file that nobody sees, without a word. With the folder there again, all steps are."""
    run, folder = start("train.steps=200", "monitor.console_every=1000"), tmp_path / "run"
    until = time.monotonic() + 60
    while not (folder / "metrics.jsonl").exists() or len(metrics(folder)) < 3:
        assert time.monotonic() < until and run.process.is_alive(), run.output
        time.sleep(0.05)
    folder.rename(tmp_path / "gone")
    run.wait_for("metrics.jsonl cannot be written (No such file or directory): the run goes on")
    folder.mkdir()
    run.wait_for("metrics.jsonl is written again, with all steps")
    assert run.wait() == 0, run.output
    assert sorted(losses(folder)) == list(range(1, 201))


# ---------------------------------------------------------------- what is left behind


@pytest.fixture
def endless(monkeypatch):
    """Preparation of data that never ends."""
    from threed.data import tokens

    def fill(folder: Path, *_: object) -> None:
        (folder / "unordered.bin").write_bytes(b"half")
        while True:
            time.sleep(0.1)

    monkeypatch.setattr(tokens, "_fill", fill)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_stopped_while_data_are_prepared(number, start, endless, tmp_path):
    """No process goes on and no half-made folder stays; after SIGKILL, no longer than until the next
    start."""
    folder = tmp_path / "cache"
    run = start("train.steps=2", f"data.cache={folder}", env={"TMPDIR": str(tmp_path)})
    until = time.monotonic() + 30
    while not list(folder.glob("*.tmp/unordered.bin")):
        assert time.monotonic() < until, run.output
        time.sleep(0.02)
    assert run.process.pid is not None
    os.kill(run.process.pid, signal.SIGUSR1)  # nothing to save: no effect
    children = psutil.Process(run.process.pid).children()
    os.kill(run.process.pid, number)
    run.process.join(20)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert children and not alive
    if number == signal.SIGKILL:
        again = start("train.steps=2", f"data.cache={folder}")
        until = time.monotonic() + 30
        while not [path for path in folder.glob("*.tmp") if not list(path.parent.glob("*.tmp"))[1:]]:
            assert time.monotonic() < until, again.output
            time.sleep(0.02)
    else:
        assert run.process.exitcode == 128 + number and not list(folder.iterdir())
        assert said(run) == [f"threed: stopped by {number.name} before the first step"]


def test_no_scratch_folder(start, tmp_path):
    """SIGKILL of the launcher: nothing is left where temporary files go."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    run = start("train.steps=100000", env={"TMPDIR": str(scratch)})
    run.wait_for("step      2/100000")
    ranks = run.ranks()
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.join(20)
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert len(ranks) == 4 and not alive and not list(scratch.glob("threed*"))


EARLY = """
import os, signal, sys
class Finder:  # torch is asked for: the first seconds of a start
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Finder())
sys.argv = ["threed", "train", "configs/toy.yaml"]
from threed.__main__ import main
main()
"""


@pytest.mark.parametrize("rank", [None, "0", "3"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_while_libraries_are_imported(number, rank):
    """SIGUSR1 is let be, a request to stop is answered with one line a run, as the launcher and as a rank."""
    place = {"RANK": rank, "WORLD_SIZE": "8", "LOCAL_RANK": rank} if rank else {}
    done = subprocess.run([sys.executable, "-c", EARLY.format(number=int(number))],
                          env={**os.environ, **place}, timeout=60,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 128 + number and not done.stdout
    line = f"threed: stopped by {number.name} before the first step\n"
    assert done.stderr == ("" if rank == "3" else line)

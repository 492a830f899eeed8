"""The library trains: a script's callbacks on every rank, their order among the others, what they may do, and
how they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import threed
import threed.launcher.local  # imported before the runs fork
from tests.guides import ROOT, code
from tests.running import Forked, losses, metrics
from threed.training.callbacks import (
    ORDER,
    Evaluation,
    Guarded,
    Logging,
    Reporting,
    Saving,
    Timeline,
    Tracing,
    Writing,
)

TOY = ["model.layers=2", "model.hidden=32", "model.seq_len=32", "model.vocab=300",
       "parallel.pp=2", "parallel.tp=1", "parallel.dp=1",
       "train.global_batch_size=4", "train.micro_batch_size=1", "train.steps=4",
       "train.eval_every=2", "train.eval_batches=1", "optimizer.warmup_steps=0",
       "checkpoint.every=2", "checkpoint.background=false", "monitor.wandb=disabled", "run.restarts=0"]


class Notes(threed.Callback):
    """Writes down what it is told, a file a rank; adds a metric; may fail or ask to stop."""

    def __init__(self, folder: Path, fails_at: int = 0, stops_at: int = 0, fails_last: bool = False):
        self.folder, self.fails_at, self.stops_at, self.fails_last = folder, fails_at, stops_at, fails_last

    def note(self, trainer, *words):
        with (self.folder / f"notes-{trainer.rank}").open("a") as file:
            print(*words, file=file)

    def on_start(self, trainer):
        assert trainer.plan.digest and trainer.config.train.steps
        assert trainer.mesh.coordinate(trainer.rank) == trainer.here
        self.note(trainer, "start", trainer.step_number)

    def on_step_begin(self, trainer):
        self.note(trainer, "begin", trainer.step_number)

    def on_step_end(self, trainer, step):
        assert step.number == trainer.step_number
        step.metrics["mine/twice"] = 2 * step.loss
        known = [name for name in ("val/loss", "perf/step_s") if name in step.metrics]
        self.note(trainer, "end", step.number, *known)
        if step.number == self.stops_at and trainer.rank == 1:
            trainer.stop()
        if step.number == self.fails_at and trainer.rank == 1:
            raise KeyError("nowhere")

    def on_save(self, trainer, path):
        self.note(trainer, "save", path.name, (path / "manifest.json").exists())

    def on_end(self, trainer):
        if self.fails_last and trainer.rank == 1:
            raise KeyError("nowhere")
        self.note(trainer, "over", trainer.step_number)


def train(folder: Path, cache: list[str], *overrides: str, **kwargs) -> Forked:
    """`threed.train` in a process of its own, as a script would call it."""
    def script() -> int:
        before = signal.getsignal(signal.SIGTERM)
        try:
            run = threed.train("configs/toy.yaml", [*TOY, *cache, f"run.dir={folder / 'run'}", *overrides],
                               callbacks=[Notes(folder, **kwargs)])
        except threed.ThreedError as error:
            print(f"raised {type(error).__name__}: {error}")
            return error.status
        assert signal.getsignal(signal.SIGTERM) is before, "the script has its handlers back"
        print(f"returned {run} after {run.metrics[-1]['step']} steps of {run.config.train.steps}")
        return 0

    return Forked(folder, script)


@pytest.fixture(scope="module")
def noted(tmp_path_factory, cache):
    folder = tmp_path_factory.mktemp("noted")
    run = train(folder, cache)
    assert run.wait() == 0, run.output
    return folder, run.output


def test_order_is_data():
    """Saving exchanges what ranks know first; a script's callbacks see val/loss, and what they add is
    logged."""
    assert (Saving, Tracing, Timeline, Evaluation, Writing, Guarded, Logging, Reporting) == ORDER


def test_a_callback_is_told_everything(noted):
    """On both ranks alike: each step, what is saved after it, the last checkpoint before the end."""
    folder, output = noted
    expected = ["start 0", "begin 0", "end 1", "begin 1", "end 2 val/loss",
                "save step-00000002 True", "begin 2", "end 3", "begin 3",
                "end 4 val/loss", "save step-00000004 True", "over 4"]
    for rank in range(2):
        assert (folder / f"notes-{rank}").read_text().splitlines() == expected
    assert "after 4 steps of 4" in output


def test_numbers_are_those_of_the_command_line(noted, begin, tmp_path):
    """A callback changes no number, and its metric is logged, after the evaluation and before what was
    measured."""
    folder, _ = noted
    rows = metrics(folder / "run")
    assert all(row["mine/twice"] == 2 * row["train/loss"] for row in rows)
    names = list(rows[1])
    assert names.index("val/loss") < names.index("mine/twice") < names.index("perf/step_s")
    run = begin(["train", "configs/toy.yaml"], *TOY)
    assert run.wait() == 0, run.output
    assert losses(tmp_path / "run") == losses(folder / "run")
    assert [row.get("val/loss") for row in metrics(tmp_path / "run")] == [row.get("val/loss") for row in rows]


def test_a_finished_run_is_read(noted):
    """Its metrics, config and traces, and the comparison."""
    run = threed.Run(noted[0] / "run")
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert run.config.parallel.pp == 2 and run.traces.digest == threed.plan(run.config).digest
    assert run.compare()["step"]["measured"] > 0


def test_a_callback_asks_to_stop(tmp_path, cache):
    """On one rank: all hear of it with the next step, save and end."""
    run = train(tmp_path, cache, stops_at=1)
    assert run.wait() == 0, run.output
    assert "stopped on request after step 2" in run.output and "after 2 steps of 4" in run.output
    assert (tmp_path / "notes-0").read_text().splitlines()[-2:] == ["save step-00000002 True", "over 2"]


@pytest.mark.parametrize("fails, where", [({"fails_at": 3}, "on_step_end after step 3"),
                                          ({"fails_last": True}, "on_end after step 4")])
def test_a_callback_that_fails(fails, where, tmp_path, cache):
    """The run ends on all ranks and does not restart, with one line that names callback, method, step, rank
    and place; the script hears of it."""
    run = train(tmp_path, cache, "run.restarts=3", "run.restart_wait_s=0.1", **fails)
    assert run.wait() == 2, run.output
    said = [line for line in run.output.splitlines() if line.startswith("threed: ")]
    assert len(said) == 1
    assert f"callback Notes: {where} has failed on rank 1: KeyError: 'nowhere'" in said[0]
    assert f"{__file__}, line " in said[0] and "Traceback" not in run.output
    assert "raised RunError: the run has failed, with exit status 2" in run.output
    for rank in range(2):
        assert (tmp_path / f"notes-{rank}").read_text().count("start") == 1
    assert "over" not in (tmp_path / "notes-1").read_text()


class Exchange(threed.Callback):
    """Rank 1 dies while rank 0 waits for it in a callback."""

    def on_step_end(self, trainer, step):
        if step.number == 3 and os.environ["THREED_RESTARTS"] == "0":
            if trainer.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.comm.all_gather(0)


def test_a_connection_that_breaks_in_a_callback(tmp_path, cache):
    """The machine is at fault, not the callback: the run restarts."""
    def script() -> int:
        threed.train("configs/toy.yaml", [*TOY, *cache, f"run.dir={tmp_path / 'run'}", "run.restarts=1",
                                          "run.restart_wait_s=0.1"], callbacks=[Exchange()])
        return 0

    run = Forked(tmp_path, script)
    assert run.wait() == 0, run.output
    assert run.output.count("restart 1 of 1") == 1 and len(metrics(tmp_path / "run")) == 4


@pytest.mark.parametrize("before, status", [("torch.ones(800, 800) @ torch.ones(800, 800)", 2), ("pass", 0)])
def test_threads_before_the_run(before, status, tmp_path, cache):
    """Threads that torch has started do not survive the fork: the script is told, where ranks would hang. A
    torch that has not computed, or a run before this one, starts none."""
    script = tmp_path / "script.py"
    overrides = [*TOY, *cache, f"run.dir={tmp_path / 'run'}", "train.steps=1"]
    script.write_text("import sys, torch, threed, threed.api.plans\nthreed.api.PROBE_S = 2\n"
                      f"{before}\nassert torch.get_num_threads() == 2\n"
                      "try:\n    for _ in range(2):\n"
                      f"        threed.train('configs/toy.yaml', {overrides} + ['train.resume=never'])\n"
                      "except threed.ThreedError as error:\n    print(error); sys.exit(error.status)\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, script], cwd=ROOT, env=env, text=True, timeout=120,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == status, done.stdout
    assert ("has computed with torch on several threads" in done.stdout) == bool(status)


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_a_script(launcher, tmp_path, cache):
    """The guide's, as a file, with plain python and under torchrun: there each rank comes back from `train`.
    The learning rate is 0, so that the second and the third evaluation are no better than the first."""
    (script,) = code("callback")
    (tmp_path / "patience.py").write_text(script)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    overrides = [*TOY, *cache, f"run.dir={tmp_path / 'run'}", "train.steps=20", "train.eval_every=1",
                 "optimizer.lr=0", "optimizer.min_lr=0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, *(torchrun if launcher == "torchrun" else []), str(tmp_path / "patience.py"),
            *overrides]
    done = subprocess.run(argv, cwd=ROOT, env=env, text=True, timeout=120, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    assert all(f"rank {rank} of 2 ends after step 4" in done.stdout for rank in range(2))
    assert done.stdout.count("4 steps, last loss") == (2 if launcher == "torchrun" else 1)
    assert [row["patience/waited"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3]


def test_a_script_with_a_logger(tmp_path, cache):
    """The guide's: each step's loss and time are in its table."""
    (tmp_path / "table.py").write_text(*code("logger"))
    argv = [sys.executable, str(tmp_path / "table.py"), *TOY, *cache, f"run.dir={tmp_path / 'run'}",
            "train.steps=3", "monitor.loggers=[table]"]
    done = subprocess.run(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, timeout=120,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    rows = [line.split(",") for line in (tmp_path / "run" / "steps.csv").read_text().splitlines()]
    assert [[int(step), float(loss), float(took)] for step, loss, took in rows] == [
        [row["step"], row["train/loss"], row["perf/step_s"]] for row in metrics(tmp_path / "run")]

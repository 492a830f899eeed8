"""What a start does to a run that exists: nothing at all where it is refused, or has nothing to do."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from pathlib import Path

import pytest

import threed
import threed.launcher.local
from tests.running import Forked, Run, losses, wandb_records
from threed.monitor import runs

TINY = ["model.layers=2", "model.hidden=32", "model.heads=4", "model.seq_len=16", "model.vocab=300",
        "parallel.dp=1", "train.global_batch_size=4", "train.micro_batch_size=1", "run.device=cpu",
        "monitor.trace_every=1", "monitor.report=false", "run.restarts=0"]
ADAPTERS = ["model.lora_rank=2"]


@pytest.fixture(scope="module")
def base(tmp_path_factory, cache):
    """A finished run of 4 steps, with wandb, and the arguments that started it."""
    folder = tmp_path_factory.mktemp("base")
    argv = ["train", "configs/toy.yaml", *TINY, "parallel.tp=1", "parallel.pp=1", "train.eval_every=0",
            "optimizer.warmup_steps=0", *cache]
    run = Run(folder, *argv, "run.dir=" + str(folder / "run"), "train.steps=4", "train.resume=never",
              "monitor.wandb=offline")
    assert run.wait() == 0, run.output
    return folder / "run", argv


def content(folder: Path) -> dict[str, str]:
    """Every file below a folder, with a hash. Not of log.txt, which keeps what each start has said."""
    return {str(file.relative_to(folder)): hashlib.md5(file.read_bytes()).hexdigest()
            for file in sorted(folder.rglob("*")) if file.is_file() and file.name != "log.txt"}


@pytest.fixture
def again(base, tmp_path):
    """again(*overrides) -> a start in a copy of the finished run, after which the copy must be as before."""
    folder = tmp_path / "run"
    shutil.copytree(base[0], folder)
    before = content(folder)

    def start(*overrides: str, status: int, says: str) -> Run:
        run = Run(tmp_path, *base[1], f"run.dir={folder}", "train.steps=4", "monitor.wandb=offline",
                  *overrides)
        assert run.wait() == status, run.output
        assert says in run.output and "Traceback" not in run.output, run.output
        assert content(folder) == before
        return run

    return start


@pytest.mark.core
def test_nothing_to_do(again, tmp_path):
    """On the same mesh and on another; what was measured can still be compared with the plan."""
    run = again(status=0, says="nothing to do: 4 steps are done, and train.steps=4; nothing in ")
    assert "note:" not in run.output
    again("parallel.dp=2", status=0, says="nothing to do: 4 steps are done")
    assert threed.Run(tmp_path / "run").compare()["step"]
    assert runs.find(tmp_path / "run")[0]["state"] == "ended"


@pytest.mark.core
def test_refused(again):
    again("model.hidden=64", "train.steps=8", status=2, says="is of another model: model.hidden=32 there")


@pytest.mark.parametrize(("overrides", "says"), [
    (["model.hidden=64"], "is of another model"),
    (["model.family=tests/families/parallel_block.py:PARALLEL"], "is of another model"),
    (["model.lora_rank=2"], "in the run.dir of the run that trained the base model"),
    (["parallel.dp=3"], "train.global_batch_size"),
    (["run.device=cuda"], "torch sees no GPU here"),
    (["data.source=nowhere"], "data.source=nowhere does not exist"),
    (["data.source={here}/words.txt"], "was trained on other data: the content of "),
    (["data.tokenizer={here}/none.json"], "cannot be read as a tokenizer"),
    (["train.resume={here}/step-00000003"], "there is no checkpoint here"),
    (["offload.optimizer=nvme", "offload.nvme_path={here}/none"], "is not a folder"),
])
def test_each_way_to_be_refused(overrides, says, again, tmp_path):
    (tmp_path / "words.txt").write_text("some other words\n" * 400)
    given = [word.format(here=tmp_path) for word in overrides]
    again("train.steps=8", *given, status=2, says=says)


def test_a_damaged_checkpoint(base, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(base[0], folder)
    (folder / "checkpoints" / "step-00000004" / "rank-00000.safetensors").write_bytes(b"short")
    before = content(folder)
    run = Run(tmp_path, *base[1], f"run.dir={folder}", "train.steps=8")
    assert run.wait() == 2 and "none of the checkpoints can be used" in run.output
    assert content(folder) == before


class Early(threed.Callback):
    """Ends the start before its first step, on one of two ranks."""

    def __init__(self, how: str):
        self.how = how

    def on_start(self, trainer):
        if trainer.rank == 1 and self.how == "fails":
            raise KeyError("nowhere")
        if trainer.rank == 1 and self.how == "is stopped":
            os.kill(os.getpid(), signal.SIGTERM)
        if trainer.rank == 1 and self.how == "stops":
            trainer.stop()


@pytest.mark.parametrize("how", ["fails", "is stopped", "stops"])
def test_before_the_first_step(how, base, tmp_path):
    """A callback's on_start fails on another rank than 0, or the run is asked to stop."""
    folder = tmp_path / "run"
    shutil.copytree(base[0], folder)
    before = content(folder)
    words = [*base[1][2:], "train.steps=8", "parallel.dp=2", "monitor.wandb=disabled"]

    def body(folder: Path) -> int:
        try:
            threed.train("configs/toy.yaml", [*words, f"run.dir={folder}"], [Early(how)])
        except threed.ThreedError as error:
            return error.status
        return 0

    run = Forked(tmp_path, lambda: body(folder))
    assert run.wait() == (2 if how == "fails" else 0), run.output
    assert content(folder) == before
    if how != "fails":
        assert f"stopped on request before step 5; nothing in {folder} has changed" in run.output
    new = Forked(tmp_path, lambda: body(tmp_path / "in" / "new"))
    new.wait()
    assert (not runs.find(tmp_path / "in")) if how != "fails" else not (tmp_path / "in").exists(), new.output


def test_a_new_run_that_is_refused(base, tmp_path):
    """It leaves no folder, or what was in it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for folder in (tmp_path / "a" / "new", tmp_path / "mine"):
        run = Run(tmp_path, *base[1], f"run.dir={folder}", "model.hidden=64", "train.steps=8",
                  f"train.resume={base[0] / 'checkpoints' / 'step-00000004'}")
        assert run.wait() == 2 and "is of another model" in run.output
    assert not (tmp_path / "a").exists() and list(content(tmp_path / "mine")) == ["notes.txt"]


def test_other_data_that_are_accepted(base, tmp_path):
    """They are said once; the checkpoint after them is of the new data. No tokenizer is overwritten, and each
    checkpoint has its own."""
    folder = tmp_path / "run"
    shutil.copytree(base[0], folder)
    (tmp_path / "words.txt").write_text("some other words\n" * 400)
    kept = content(folder)["tokenizer.json"]
    own = [f"data.source={tmp_path / 'words.txt'}", "monitor.wandb=disabled", "data.on_change=accept"]
    run = Run(tmp_path, "train", str(folder), *own, "train.steps=6", "checkpoint.keep=0")
    assert run.wait() == 0, run.output
    assert "note: data.on_change=accept: from step 5 on the run has others than step-00000004" in run.output
    assert content(folder)["tokenizer.json"] == kept
    (other,) = folder.glob("tokenizer-*/tokenizer.json")
    run = Run(tmp_path, "train", str(folder), "train.steps=7", "data.on_change=error")
    assert run.wait() == 0 and "data.on_change" not in run.output, run.output
    assert other.is_file() and list(losses(folder)) == [1, 2, 3, 4, 5, 6, 7]
    for step, word in (("4", "argparse"), ("7", "some other")):
        run = Run(tmp_path, "generate", str(folder), "--checkpoint", step, "--prompt", word, "--max-tokens",
                  "2", "--json")
        assert run.wait() == 0, run.output
        assert f'"prompt": "{word}"' in run.output


def test_a_folder_goes_on(base, tmp_path):
    """`threed train RUN`, after it was moved, and though it was started with train.resume=never."""
    folder = tmp_path / "a: b" / "moved run"
    shutil.copytree(base[0], folder)
    before = wandb_records(folder)
    run = Run(tmp_path, "train", str(folder), "train.steps=6", "optimizer.lr=2e-3", "monitor.wandb=disabled")
    assert run.wait() == 0, run.output
    assert list(losses(folder)) == [1, 2, 3, 4, 5, 6] and wandb_records(folder) == before
    assert "note: optimizer.lr was 0.003, is 0.002" in run.output
    assert "note: optimizer.schedule=cosine ends at train.steps, so train.steps=6 stretches it" in run.output
    assert not list(base[0].glob("checkpoints/step-00000006")), "the folder that config.json names"
    assert threed.Run(folder).config.train.steps == 6

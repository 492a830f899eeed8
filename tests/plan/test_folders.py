"""A command that wants a config and gets a run, or the other way round, says what to give."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import threed
from threed.base.errors import InputError
from threed.cli import main as cli
from threed.config.load import load
from threed.monitor.folders import as_run, to_train


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A run, an import, and a config, in the working directory."""
    monkeypatch.chdir(tmp_path)
    config = load("configs/toy.yaml", ["run.dir=runs/old", "train.resume=never", "train.steps=7"])
    for folder in ("runs/x/checkpoints/step-00000004", "runs/mine/huggingface", "empty"):
        Path(folder).mkdir(parents=True)
    Path("runs/x/config.json").write_text(json.dumps(config.to_dict()))
    Path("runs/x/checkpoints/step-00000004/manifest.json").write_text("{}")
    Path("runs/mine/config.yaml").write_text("run: {dir: runs/before}\ntrain: {steps: 9}\n")
    Path("my.yaml").write_text("run: {dir: runs/x}\n")
    Path("new.yaml").write_text("run: {dir: runs/new}\n")
    return tmp_path


@pytest.mark.parametrize(("run", "steps"), [("runs/x", 7), ("runs/mine", 9)])
def test_a_run_is_trained_where_it_is(run, steps, here):
    """By the config of its last start, or of its import; wherever it was, and however it was started."""
    for given in (run, f"{run}/", str(here / run), Path(run)):
        path, overrides = to_train(given, ["optimizer.lr=1"])
        config = load(path, overrides)
        assert (config.train.steps, config.train.resume, config.optimizer.lr) == (steps, "auto", 1)
        assert Path(config.run.dir).resolve() == here / run
    path, overrides = to_train(run, ["run.dir=runs/other", "train.resume=never"])
    assert (load(path, overrides).run.dir, load(path, overrides).train.resume) == ("runs/other", "never")


@pytest.mark.parametrize("name", ["a: b", "007", "true", 'q"uote', "$x", "ünder"])
def test_names_of_folders(name, here):
    Path("runs/x").rename(name)
    path, overrides = to_train(name, None)
    assert load(path, overrides).run.dir == name


def test_a_file_is_taken_as_it_is(here):
    file = "runs/x/config.json"
    assert to_train(file, ["train.steps=8"]) == (Path(file), ["train.steps=8"])
    assert load(*to_train(file, [])).run.dir == "runs/old"


CONFIGS = ("show", "check", "predict", "search --devices 2", "memory", "data")
RUNS = ("trace", "compare", "generate --prompt a", "eval", "export", "report")


@pytest.mark.parametrize("command", CONFIGS)
def test_a_run_for_a_config(command, here):
    assert said(command, "runs/x") == ("runs/x is the folder of a run; give a YAML config such as "
                                       "runs/x/config.json")
    assert said(command, "empty") == "empty is not a file; give a YAML config such as configs/toy.yaml"


@pytest.mark.parametrize("command", RUNS)
def test_a_config_for_a_run(command, here):
    give = "give the folder that run.dir named"
    assert said(command, "runs") == (f"runs holds runs, and is none itself; {give}, such as runs/x; threed "
                                     "runs runs lists them")
    if command == "report":  # which takes a config, too
        return
    assert said(command, "my.yaml") == f"my.yaml is a config; {give}: its run.dir is runs/x"
    assert said(command, "new.yaml").endswith(": its run.dir is runs/new, which is not there yet")
    assert said(command, "runs/x/config.json") == f"runs/x/config.json is a file of a run; {give}: runs/x"
    assert said(command, "nowhere") == f"nowhere: there is no such run; {give}"


def test_what_cannot_be_trained(here):
    give = "give a YAML config, or the folder of a run"
    assert said("train", "runs/x/checkpoints/step-00000004") == (
        f"runs/x/checkpoints/step-00000004 is a checkpoint; {give}, such as runs/x, and "
        "train.resume=runs/x/checkpoints/step-00000004")
    assert said("train", "empty") == f"empty is a folder and no run: it has no config.json; {give}"
    assert said("train", "runs").startswith("runs holds runs, and is none itself; ")
    with pytest.raises(InputError, match="is a folder and no run"):
        threed.train("empty")
    with pytest.raises(InputError, match=r"is a checkpoint; .* such as runs/x$"):
        as_run("runs/x/checkpoints/step-00000004")


def test_another_word_for_train():
    done = subprocess.run([sys.executable, "-m", "threed", "resume", "runs/x"], capture_output=True,
                          text=True, check=False)
    assert done.returncode == 2 and "No such command 'resume'" in done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith("threed: threed train RUN goes on from the newest checkpoint")


def said(command: str, given: str) -> str:
    """The message of a command that refuses what it is given."""
    verb, *options = command.split()
    more = ["out"] if verb == "export" else []
    with pytest.raises(InputError) as refused:
        cli.app([verb, given, *more, *options], standalone_mode=False)
    return str(refused.value)

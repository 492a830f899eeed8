"""Which checkpoint train.resume names, and what it says where it names none."""

from __future__ import annotations

import pytest

from threed.base.errors import InputError
from threed.checkpoint.lineage import Lineage, text_of_latest
from threed.checkpoint.named import named
from threed.schema import Config, RunConfig, TrainConfig


def complete(folder, *steps):
    for step in steps:
        path = folder / f"step-{step:08d}"
        path.mkdir(parents=True)
        (path / "manifest.json").write_text("{}")
        (path / "rank-00000.safetensors").write_text("")


@pytest.fixture
def runs(tmp_path):
    """a: steps 1, 2, 4; b: 1 and 3, of which `latest` names the first; empty: none."""
    complete(tmp_path / "a" / "checkpoints", 1, 2, 4)
    (tmp_path / "a" / "checkpoints" / "step-00000009.12ab34cd.tmp").mkdir()
    complete(tmp_path / "b" / "checkpoints", 1, 3)
    (tmp_path / "b" / "checkpoints" / "latest").write_text(text_of_latest("step-00000001", Lineage("x")))
    complete(tmp_path / "copies", 5)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    return tmp_path


def of(runs, resume, own="b"):
    return named(Config(run=RunConfig(dir=str(runs / own)), train=TrainConfig(resume=resume)))


@pytest.mark.parametrize(("resume", "path"), [
    ("a", "a/checkpoints/step-00000004"),
    ("a/", "a/checkpoints/step-00000004"),
    ("a/checkpoints", "a/checkpoints/step-00000004"),
    ("a/checkpoints/step-00000002", "a/checkpoints/step-00000002"),
    ("a/checkpoints/step-00000002/manifest.json", "a/checkpoints/step-00000002"),
    ("a/checkpoints/step-00000002/rank-00000.safetensors", "a/checkpoints/step-00000002"),
    ("b", "b/checkpoints/step-00000001"),  # as `latest` says
    ("b/checkpoints/latest", "b/checkpoints/step-00000001"),
    ("copies", "copies/step-00000005")])
def test_a_path(resume, path, runs):
    assert of(runs, str(runs / resume)) == runs / path


@pytest.mark.parametrize("resume", ["3", "step-00000003"])
def test_in_run_dir(resume, runs, monkeypatch):
    assert of(runs, resume) == runs / "b" / "checkpoints" / "step-00000003"


def test_a_link_into_run_dir(runs):
    """It is the run's own checkpoint, which the run may remove."""
    (runs / "link").symlink_to(runs / "b")
    assert of(runs, str(runs / "link")) == runs / "b" / "checkpoints" / "step-00000001"


@pytest.mark.parametrize(("resume", "says"), [
    ("nowhere", "there is no checkpoint here"),
    ("7", "there is no checkpoint here"),
    ("empty", "saved no complete checkpoint yet"),
    ("", "this folder holds runs; give one of them, such as"),
    ("hf", "threed import"),
    ("torch/model.pt", "of another program"),
    ("deepspeed", "of another program"),
    ("megatron", "of another program"),
    ("text", "there is no checkpoint in it")])
def test_none(resume, says, runs):
    for file in ("hf/config.json", "hf/model.safetensors", "torch/model.pt", "text/readme.txt",
                 "megatron/latest_checkpointed_iteration.txt"):
        (runs / file).parent.mkdir(exist_ok=True)
        (runs / file).write_text("")
    (runs / "deepspeed" / "global_step10").mkdir(parents=True)
    with pytest.raises(InputError, match=says) as caught:
        of(runs, resume if resume.isdecimal() else str(runs / resume))
    assert str(caught.value).startswith("train.resume=")

"""The page at the end of a run: when it is made, and that nothing about it ends the run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from threed.training import callbacks
from threed.training.callbacks import Reporting


@pytest.fixture
def trainer(tmp_path) -> Any:
    said: list[str] = []
    log = SimpleNamespace(say=said.append, said=said, sent=[], has=lambda name: True)
    log.report = log.sent.append
    config = SimpleNamespace(run=SimpleNamespace(dir=str(tmp_path)), monitor=SimpleNamespace(report=True),
                             model=SimpleNamespace(family="gpt"))
    return SimpleNamespace(log=log, config=config, hurried=False)


def ends(monkeypatch, status: int = 0, said: str = "", error: Exception | None = None) -> list[list[str]]:
    """Commands that are started from now on, each of which ends like this."""
    started: list[list[str]] = []

    def run(argv: list[str], **_: Any) -> Any:
        started.append(argv)
        if error is not None:
            raise error
        return subprocess.CompletedProcess(argv, status, "", said)

    monkeypatch.setattr(subprocess, "run", run)
    return started


def test_wandb_gets_the_page(trainer, monkeypatch, tmp_path):
    started = ends(monkeypatch)
    Reporting().on_end(trainer)
    (argv,) = started
    assert argv[1:] == ["-m", "threed", "report", str(tmp_path), "-o", str(tmp_path / "report.html")]
    assert trainer.log.sent == [Path(tmp_path / "report.html")]
    assert trainer.log.said == [f"report     {tmp_path / 'report.html'}"]


@pytest.mark.parametrize(("how", "words"), [
    ({"status": 2, "said": "threed: the config is gone"}, "the config is gone"),
    ({"error": subprocess.TimeoutExpired("threed", 120)}, "timed out after 120 seconds"),
    ({"error": OSError("no memory")}, "no memory")])
def test_a_page_that_fails(how, words, trainer, monkeypatch, tmp_path):
    """A warning with the command that draws it."""
    ends(monkeypatch, **how)
    Reporting().on_end(trainer)
    (line,) = trainer.log.said
    assert line.startswith(f"warning: no report for wandb; threed report {tmp_path} draws it: ")
    assert words in line and not trainer.log.sent


@pytest.mark.parametrize("why", ["no wandb", "not asked for", "hurried", "another rank"])
def test_none_is_made(why, trainer, monkeypatch):
    started, log = ends(monkeypatch), trainer.log
    if why == "no wandb":
        log.has = lambda name: False
    elif why == "not asked for":
        trainer.config.monitor.report = False
    elif why == "hurried":  # a run that is to stop has seconds
        trainer.hurried = True
    else:
        trainer.log = None
    Reporting().on_end(trainer)
    assert not started and not log.said


def test_without_plotly(trainer, monkeypatch):
    started = ends(monkeypatch)
    monkeypatch.setattr(callbacks, "find_spec", lambda name: None)
    Reporting().on_end(trainer)
    assert not started and "pip install plotly" in trainer.log.said[0]

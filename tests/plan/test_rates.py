"""Schedules of the learning rate that a person cannot have meant: a warning each, and none for the others."""

from __future__ import annotations

import pytest

from threed.config.load import load
from threed.config.validate import warnings
from threed.optim.rate import learning_rate


def said(*words: str) -> list[str]:
    config = load(None, ["train.steps=10", *(f"optimizer.{word}" for word in words)])
    return [line for line in warnings(config) if line.startswith("optimizer.")]


@pytest.mark.parametrize("words", [
    [], ["warmup_steps=9"], ["warmup_steps=10", "decay_steps=100"],
    ["warmup_steps=2", "decay_steps=10"], ["decay_steps=20"], ["schedule=constant"],
    ["decay_steps=6", "min_lr=1e-5"], ["schedule=wsd", "wsd_decay_steps=8", "warmup_steps=2"],
    ["schedule=wsd", "warmup_steps=10", "decay_steps=100"], ["schedule=constant", "warmup_steps=10"],
    ["schedule=wsd", "decay_steps=200", "wsd_decay_steps=150", "warmup_steps=10"],
    ["warmup_steps=4", "decay_steps=5", "schedule=linear", "min_lr=1e-6"]])
def test_as_it_should_be(words):
    assert not said(*words)


@pytest.mark.parametrize(("words", "says"), [
    (["warmup_steps=4", "decay_steps=2"], "decay_steps=2 is over when optimizer.warmup_steps=4 are"),
    (["warmup_steps=4", "decay_steps=4"], "falls from optimizer.lr=0.0003 to optimizer.min_lr=0 in one step"),
    (["warmup_steps=4", "decay_steps=3", "schedule=linear"], "is over when"),
    (["warmup_steps=4", "decay_steps=3", "schedule=wsd"], "is over when"),
    (["warmup_steps=10"], "in the last step, and never decays"),
    (["warmup_steps=11"], "never reaches optimizer.lr"),
    (["decay_steps=4"], "the last 6 of the steps change no weight"),
    (["schedule=constant", "decay_steps=4"], "decay_steps=4 does nothing here"),
    (["schedule=constant", "min_lr=1e-5"], "min_lr=1e-05 does nothing here"),
    (["wsd_decay_steps=4"], "wsd_decay_steps=4 does nothing here: optimizer.schedule=cosine"),
    (["schedule=wsd", "wsd_decay_steps=8", "warmup_steps=5"], "the decay has the last 5"),
    (["schedule=wsd", "wsd_decay_steps=0"], "in one step, after optimizer.decay_steps=10"),
    (["lr=0"], "no step changes a weight")])
def test_a_warning(words, says):
    found = said(*words)
    assert len(found) == 1 and says in found[0], found


def test_it_is_true():
    """Where the decay is over within the warm-up, the rate is what the warning says."""
    config = load(None, ["train.steps=6", "optimizer.warmup_steps=4", "optimizer.decay_steps=2"]).optimizer
    assert [learning_rate(config, step, 6) for step in range(3, 6)] == [config.lr, 0.0, 0.0]

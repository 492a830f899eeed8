"""What wandb is told of a run besides its numbers."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from threed.config import load
from threed.monitor import charts


@pytest.fixture
def told(monkeypatch) -> dict[str, Any]:
    """What `wandb.init` was given, and the metrics that were defined."""
    found: dict[str, Any] = {"metrics": {}}

    def define(name: str, **how: Any) -> None:
        found["metrics"][name] = how

    def init(**given: Any) -> Any:
        found.update(given)
        return SimpleNamespace(define_metric=define)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    return found


def test_a_run_has_a_name(told):
    """Two runs side by side can be told apart, found by their settings, and put into a group."""
    charts.start(load("configs/toy.yaml", ["run.dir=runs/first", "monitor.wandb=offline", "parallel.pp=4"]),
                 None)
    assert told["name"] == "first pp4 dp2 tp2" and told["group"] is None and told["id"] is None
    assert told["tags"] == ["pp4", "dp2", "tp2", "1f1b", "zero1", "fp32"]
    assert told["config"]["facts"] == {"parameters": 1_651_968, "world_size": 16, "tokens_per_step": 4096,
                                       "micro_batches": 4}
    charts.start(load("configs/toy.yaml", ["monitor.wandb=offline", "monitor.name=mine", "monitor.group=all",
                                           "monitor.tags=[a,b]"]), "id7")
    assert (told["name"], told["group"], told["tags"][:2], told["id"]) == ("mine", "all", ["a", "b"], "id7")


def test_disabled(told):
    assert charts.start(load("configs/toy.yaml", ["monitor.wandb=disabled"]), None) is None
    assert told == {"metrics": {}}


def test_single_positions_get_no_charts(told):
    """At pp=16 they would be 128; their means over positions have charts."""
    charts.start(load("configs/toy.yaml", ["monitor.wandb=offline"]), None)
    hidden = {name for name, how in told["metrics"].items() if how.get("hidden")}
    assert {"time/compute/*", "time/idle/*", "pipeline/bubble_measured/*", "run/*"} <= hidden
    assert not {"time/compute", "train/loss", "time/*", "pipeline/*"} & hidden
    assert told["metrics"]["train/loss"] == {"summary": "min"}
    assert all("*" not in name[:-1] for name in told["metrics"])  # wandb knows a star at the end only

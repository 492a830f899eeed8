"""Cluster tests need root, and packages that `make cluster` installs: elsewhere they are skipped, with the
reason."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.gloo.conftest import cache  # noqa: F401 (a fixture)

TINY = ["train", "configs/toy.yaml", "model.layers=2", "model.hidden=16", "model.heads=2", "model.seq_len=16",
        "model.vocab=300",
        "parallel.dp=auto", "parallel.tp=1", "parallel.pp=1", "train.global_batch_size=12",
        "train.micro_batch_size=1",
        "train.eval_every=0", "monitor.wandb=disabled", "monitor.trace_every=0", "optimizer.warmup_steps=0",
        "optimizer.decay_steps=100", "run.timeout_s=20", "run.connect_timeout_s=20"]


@pytest.fixture
def measured(request):
    """measured(scenario, observed, seconds): a row of bench/results/cluster.md, where CLUSTER_ROWS names a
    file for them."""

    def note(scenario: str, observed: str, seconds: float | None) -> None:
        if path := os.environ.get("CLUSTER_ROWS"):
            with Path(path).open("a") as file:
                file.write(json.dumps([scenario, observed, None if seconds is None else round(seconds, 1)])
                           + "\n")

    return note


class Clock:
    """Seconds since a fault."""

    def __init__(self) -> None:
        self.begin = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

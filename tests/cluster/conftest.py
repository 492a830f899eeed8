"""Cluster tests need root, and packages that `make cluster` installs: elsewhere they are skipped, with the
reason."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported, as threed.torchrun sets it

from tests.cluster.cluster import TINY, Cluster
from tests.cluster.hosts import Hosts
from tests.gloo.conftest import cache  # noqa: F401 (a fixture)
from tests.running import Run, losses

__all__ = ["TINY"]


@pytest.fixture(scope="session")
def alone(tmp_path_factory, cache):  # noqa: F811
    """Losses of 70 steps on this machine alone, with dp=2 and dp=3."""
    results = {}
    for dp in (2, 3):
        folder = tmp_path_factory.mktemp(f"alone-{dp}")
        run = Run(folder, *TINY, *cache, f"run.dir={folder / 'run'}", "train.steps=70", f"parallel.dp={dp}")
        assert run.wait(300) == 0, run.output
        results[dp] = losses(folder / "run")
    return results


@pytest.fixture
def two(tmp_path, cache):  # noqa: F811
    with Hosts(2, tmp_path) as hosts:
        yield Cluster(hosts, tmp_path, cache)


@pytest.fixture
def three(tmp_path, cache):  # noqa: F811
    with Hosts(3, tmp_path) as hosts:
        yield Cluster(hosts, tmp_path, cache)


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

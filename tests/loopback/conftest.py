"""Ranks as threads."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def one_core(worker_id):
    """Ranks share Python's lock, and so take turns. On several cores most of their time goes into waking one
    another: a cell of the contract takes 3 to 5 times as much of a processor."""
    allowed = os.sched_getaffinity(0)
    number = int(worker_id.removeprefix("gw")) if worker_id.startswith("gw") else 0
    os.sched_setaffinity(0, {sorted(allowed)[number % len(allowed)]})
    yield
    os.sched_setaffinity(0, allowed)

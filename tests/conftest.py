"""Shared fixtures. One thread a process: many-process tests on few cores would fight for them otherwise."""

from __future__ import annotations

import gc
import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

import pytest

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what is started here must not see that pytest is under nohup


def pytest_collection_finish():
    """What was imported stays: Python's collector, here and in what is forked from here, need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def workers():
    """Eight processes over gloo, started at first use."""
    import tests.harness  # noqa: F401  (imported before the fork: the workers start with everything)
    from tests.workers import Workers

    pool = Workers(8)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def references():
    """Reference runs by what changes them, each made once."""
    from tests import reference

    made = {}

    def get(config, steps: int = 5):
        key = (str(config.model), str(config.precision), str(config.optimizer), str(config.train),
               config.offload.delayed_update, config.offload.warmup, steps)
        if key not in made:
            made[key] = reference.run(config, steps)
        return made[key]

    return get

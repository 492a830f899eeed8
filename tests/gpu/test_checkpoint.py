"""Checkpoints of ranks on a GPU, written while training goes on: read again, on the same mesh and on others.

Without a GPU the same ranks are on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.staged import on_ranks
from tests.harness import FP32
from tests.loopback.test_checkpoint import COUNTERS, DP, PP, TP, at, named, step
from threed.checkpoint.lineage import Lineage
from threed.checkpoint.load import resume
from threed.checkpoint.save import Saver
from threed.comm.group import Comm
from threed.engine.engine import Engine

pytestmark = pytest.mark.gpu

WAYS = {
    "alone": [], "zero-1": [*DP, "zero.stage=1"], "zero-3": [*DP, "zero.stage=3", "zero.prefetch=1"],
    "halves": [*PP, "parallel.schedule=zb-h1", "precision.dtype=bf16", "model.dropout=0.1"],
    "cpu": [*DP, "zero.stage=2", "offload.optimizer=cpu"],
    "parameters": [*DP, "zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"],
}
OTHERS = {"pp": PP, "tp": TP, "cpu": WAYS["cpu"], "alone": []}
Went = tuple[Path | None, list[float], dict[int, torch.Tensor]]


def weights(engine: Engine) -> dict[int, torch.Tensor]:
    return {unit: state.optimizer_state.master.cpu() for unit, state in engine.states.items()}


def saved(engine: Engine, comm: Comm) -> Went:
    """Two steps, a checkpoint, and two steps while it is written."""
    step(engine, comm, 2)
    saver = Saver(engine, Lineage("test-0"), lambda: None)
    saver.begin(COUNTERS)
    losses = step(engine, comm, 2)
    outcome = saver.drain()
    assert outcome is not None and outcome.problem is None, outcome
    done = outcome.path, losses, weights(engine)
    engine.close()
    return done


def resumed(engine: Engine, comm: Comm) -> Went:
    """The two steps after a checkpoint."""
    path = resume(engine.config, engine.zero).path
    done = path, step(engine, comm, 2), weights(engine)
    engine.close()
    return done


def source(tmp_path: Path, *others: str) -> tuple[Any, list[Went]]:
    config = at(tmp_path, "run.deterministic=true", *others)
    return config, on_ranks(config, saved)


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_to_the_bit(way, tmp_path):
    """A snapshot that a step overwrites while it is copied, and an optimizer state that is not what it
    was."""
    config, went = source(tmp_path, *WAYS[way])
    path = went[0][0]
    assert path is not None
    for (_, losses, parts), (read, again, others) in zip(went, on_ranks(named(config, path), resumed),
                                                         strict=True):
        assert read == path and losses == again
        for unit, part in parts.items():
            assert torch.equal(part, others[unit]), unit


@pytest.mark.parametrize("other", OTHERS)
def test_it_goes_on_on_another_mesh(other, tmp_path):
    _, went = source(tmp_path, *WAYS["zero-3"])
    path, wanted, _ = went[0]
    assert path is not None
    config = named(at(tmp_path / "other", *OTHERS[other]), path)
    for _, losses, _ in on_ranks(config, resumed):
        assert losses == pytest.approx(wanted, rel=FP32.loss)

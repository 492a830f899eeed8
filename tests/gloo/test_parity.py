"""A covering subset of tests/loopback/test_parity.py over real processes and gloo."""

from __future__ import annotations

import pytest

from tests.harness import assert_parity, collect, loopback, over_gloo, tiny

# Together these meet every pair of: axis used or not, schedule, ZeRO stage, sp, tied, uneven stages, clipping.
CASES = {
    "alone": [],
    "dp": ["parallel.dp=4", "zero.stage=0"],
    "dp-zero": ["parallel.dp=3", "train.global_batch_size=9"],
    "tp": ["parallel.tp=4", "parallel.sequence_parallel=true", "zero.stage=0"],
    "pp": ["parallel.pp=4", "parallel.schedule=gpipe", "model.tie_embeddings=false"],
    "pp-each-unit": ["parallel.pp=8"],
    "dp-pp": ["parallel.dp=2", "parallel.pp=3", "zero.stage=0", "optimizer.clip_grad=1.0"],
    "dp-tp": ["parallel.dp=2", "parallel.tp=2", "model.tie_embeddings=false", "optimizer.clip_grad=1.0"],
    "tp-pp": ["parallel.tp=2", "parallel.pp=2", "parallel.stage_units=[1,7]", "parallel.schedule=gpipe"],
    "3d": ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2"],
    "3d-gpipe-sp": ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "parallel.schedule=gpipe",
                    "parallel.sequence_parallel=true", "optimizer.clip_grad=1.0"],
    "3d-untied-zero-0": ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "zero.stage=0", "model.tie_embeddings=false",
                         "parallel.sequence_parallel=true", "parallel.axis_order=dp-pp-tp"],
    "3d-dropout": ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "model.dropout=0.1"],
}


@pytest.mark.parametrize("name", CASES)
def test_parity(name, workers, references):
    config = tiny(*CASES[name])
    ranks = collect(config, workers.run(over_gloo, config.world_size, config, 5))
    assert_parity(ranks, references(config))


def test_bf16_and_bytes(workers):
    """Gloo and loopback agree on the numbers (sums of two are exact in any order) and on every byte sent."""
    config = tiny("parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "precision.dtype=bf16")
    real, threads = collect(config, workers.run(over_gloo, 8, config, 3)), loopback(config, 3)
    assert real.losses == pytest.approx(threads.losses, rel=1e-4)
    assert real.sent == threads.sent

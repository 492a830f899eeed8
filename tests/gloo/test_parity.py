"""A covering subset of tests/loopback/test_parity.py over real processes and gloo."""

from __future__ import annotations

import pytest

from tests.harness import assert_parity, collect, loopback, over_gloo, schedule_config, tiny

# Together these meet every pair of: axis used or not, schedule, ZeRO stage, sp, tied, uneven stages,
# clipping.
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
    "3d-untied-zero-0": ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "zero.stage=0",
                         "model.tie_embeddings=false",
                         "parallel.sequence_parallel=true", "parallel.axis_order=dp-pp-tp"],
    "3d-dropout": ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "model.dropout=0.1"],
    "3d-parts": ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "parallel.split_messages=on"],
    "tp-pp-parts": ["parallel.tp=4", "parallel.pp=2", "parallel.schedule=zb-v",
                    "parallel.split_messages=on"],
}

# Meets every pair of schedule, pp, tp, ZeRO stage and count of micro-batches that 8 processes allow, in few
# runs.
PAIRS = [("gpipe", 2, 2, 0, "1"), ("1f1b", 4, 1, 1, "p+1"), ("interleaved", 4, 2, 0, "3p+1"),
         ("interleaved", 2, 1, 1, "2"),
         ("zb-h1", 4, 2, 1, "p"), ("zb-h1", 2, 1, 0, "3p+1"), ("zb-h2", 8, 1, 1, "2p"),
         ("zb-h2", 2, 2, 0, "p+1"),
         ("zb-v", 4, 1, 0, "1"), ("zb-v", 2, 2, 1, "3p+1"), ("zb-v", 8, 1, 0, "p"),
         ("dualpipe-v", 4, 2, 1, "2p"),
         ("dualpipe-v", 2, 1, 0, "3p+1"), ("breadth-first", 8, 1, 1, "2"), ("breadth-first", 4, 2, 0, "2p"),
         ("auto", 4, 1, 1, "2p"), ("auto", 2, 2, 0, "2")]


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: "-".join(map(str, case)))
def test_schedules(case, workers, references):
    """Every schedule over real processes."""
    config = schedule_config(*case)
    ranks = collect(config, workers.run(over_gloo, config.world_size, config, 3))
    assert_parity(ranks, references(config, 3))


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

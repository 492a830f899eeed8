"""Bytes that `comm` counts on real runs equal the plan's, to the byte."""

from __future__ import annotations

import pytest

from tests.harness import loopback, tiny
from threed.planner import make_mesh, make_plan
from threed.program.summary import stages

CASES = {
    "dp": ["parallel.dp=4"],
    "dp-zero-0": ["parallel.dp=4", "zero.stage=0"],
    "tp": ["parallel.tp=4"],
    "tp-sequence-parallel": ["parallel.tp=4", "parallel.sequence_parallel=true"],
    "3d": ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2"],
    "3d-sequence-parallel": ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "parallel.sequence_parallel=true"],
    "3d-bf16": ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "precision.dtype=bf16"],
    "3d-untied-llama": ["parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "model.tie_embeddings=false",
                        "model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false", "model.kv_heads=4"],
}


@pytest.mark.parametrize("name", CASES)
def test_counted_is_predicted(name):
    config = tiny(*CASES[name])
    ranks, mesh, rows = loopback(config, steps=2), make_mesh(config), stages(make_plan(config))
    for rank, sent in enumerate(ranks.sent):
        expected = rows[mesh.coordinate(rank).pp]["sent_bytes"]
        assert {axis: sent.get(axis, 0) for axis in expected} == {axis: 2 * size for axis, size in expected.items()}, rank


def test_zero_formulas():
    """DP and ZeRO-1 send 2 Psi (N-1)/N elements a step, up to padding."""
    for zero in (0, 1):
        config = tiny("parallel.dp=4", f"zero.stage={zero}")
        table = make_plan(config).table
        psi = sum(unit.numel for unit in table.parameters.values())
        padding = sum(unit.padding for unit in table.parameters.values())
        assert loopback(config, steps=1).sent[0]["dp"] == pytest.approx(2 * psi * 4 * 3 / 4, abs=64)
        assert padding < 0.01 * psi

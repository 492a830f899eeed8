"""A kind of parameter unit that is a row of KINDS alone: a sample of the contract with it."""

from __future__ import annotations

import pytest

from tests.harness import assert_contract, tiny
from threed.planner import make_plan, unit_kinds
from threed.planner.unit_kinds import UnitKind

CELLS = {
    "zero-0": ["parallel.dp=2", "zero.stage=0"],
    "zero-3-persistent": ["parallel.dp=2", "zero.stage=3", "zero.persist_below=100", "parallel.tp=2",
                          "parallel.sequence_parallel=true"],
    "zb-v-offload": ["parallel.pp=2", "parallel.schedule=zb-v", "zero.stage=2", "offload.optimizer=cpu",
                     "precision.dtype=bf16", "parallel.dp=2"],
    "tied-full": ["model.tie_embeddings=true", "activation.policy=full", "parallel.pp=2"],
}


@pytest.mark.parametrize("cell", CELLS)
def test_a_kind_is_a_row(cell, references, monkeypatch):
    """Matrices of MLPs are units of their own: whose gradients would be counted twice, or not at all."""
    mlp = UnitKind(lambda config, parameter: ".mlp" in parameter.name and parameter.decay, False)
    monkeypatch.setitem(unit_kinds.KINDS, "mlp", mlp)
    config = tiny("model.layers=2", *CELLS[cell])
    units = make_plan(config).table.parameters.values()
    assert [unit.name for unit in units if unit.kind == "mlp"] == ["blocks.0, mlp", "blocks.1, mlp"]
    assert "tied" in {unit.kind for unit in units} or not config.model.tie_embeddings
    assert ("small" in {unit.kind for unit in units}) == ("persistent" in cell)
    assert_contract(config, references)

"""A kind of parameter unit that is a row of KINDS alone: a sample of the contract with it."""

from __future__ import annotations

import pytest
import torch

from tests import reference
from tests.harness import assert_contract, tiny
from threed.comm.process import initialized
from threed.planner import make_plan, unit_kinds
from threed.planner.unit_kinds import UnitKind
from threed.schema import Config

CELLS = {
    "zero-0": ["parallel.dp=2", "zero.stage=0"],
    "zero-3-persistent": ["parallel.dp=2", "zero.stage=3", "zero.persist_below=100", "parallel.tp=2",
                          "parallel.sequence_parallel=true"],
    "zb-v-offload": ["parallel.pp=2", "parallel.schedule=zb-v", "zero.stage=2", "offload.optimizer=cpu",
                     "precision.dtype=bf16", "parallel.dp=2"],
    "tied-full": ["model.tie_embeddings=true", "activation.policy=full", "parallel.pp=2"],
}


class Both(torch.optim.Optimizer):
    """Two optimizers, each with parameters of its own."""

    def __init__(self, *both: torch.optim.Optimizer):
        self.both, self.param_groups = both, [group for each in both for group in each.param_groups]

    def step(self, closure: None = None) -> None:
        for each in self.both:
            each.step()


class Reference(reference.Reference):
    """MLPs' matrices are stepped by SGD."""

    def __init__(self, config: Config):
        super().__init__(config)
        mine = [self.masters[name] for name in self.trained if of_mlp(name, self.masters[name].dim())]
        for group in self.optimizer.param_groups:
            group["params"] = [each for each in group["params"] if not any(each is other for other in mine)]
        decay = config.optimizer.weight_decay
        self.optimizer = Both(self.optimizer, torch.optim.SGD(mine, lr=1.0, weight_decay=decay))


def of_mlp(name: str, dims: int) -> bool:
    return ".mlp" in name and dims > 1


@pytest.mark.parametrize("cell", [*CELLS, "overlap", "no-overlap", "nvme"])
def test_a_kind_has_an_optimizer(cell, monkeypatch, tmp_path):
    """It keeps the buffers of its own optimizer, in memory, on tiers and in snapshots."""
    mlp = UnitKind(lambda config, parameter: of_mlp(parameter.name, len(parameter.shape)), False, "sgd")
    monkeypatch.setitem(unit_kinds.KINDS, "mlp", mlp)
    more = {"overlap": ["offload.optimizer=cpu", "parallel.dp=2"],
            "no-overlap": ["offload.optimizer=cpu", "offload.overlap=none", "parallel.dp=2"],
            "nvme": ["offload.optimizer=nvme", f"offload.nvme_path={tmp_path}", "zero.stage=3"]} | CELLS
    config = tiny("model.layers=2", "optimizer.lr=0.02", *more[cell])
    table = make_plan(config).table
    sizes = {unit.kind: table.size(table.shards.state(p)) // table.shards.numel(p)
             for p, unit in table.parameters.items()}
    assert sizes["own"] - sizes["mlp"] == 8  # AdamW's two buffers
    assert {unit.optimizer for unit in table.parameters.values()} == {"", "sgd"}

    def run(same: Config, steps: int) -> reference.Result:
        with initialized():
            return Reference(same).run(steps)

    assert_contract(config, run)


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

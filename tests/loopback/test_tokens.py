"""An axis whose ranks share a sample and divide its tokens, in a toy in which no token sees another one."""

from __future__ import annotations

import pytest

import threed
from tests.harness import assert_contract, tiny
from tests.loopback.test_axis import train
from threed.base import mesh
from threed.base.errors import ThreedError
from threed.base.mesh import GroupRow, Mesh
from threed.config.load import checked
from threed.planner import make_plan
from threed.program import summary
from threed.program.analysis import Analysis
from threed.schema import Config, ParallelConfig

FAMILY = "model.family=tests/families/pointwise.py:POINTWISE"
SMALL = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16", "train.global_batch_size=6"]
PP, DP, SP = ["parallel.pp=2"], ["parallel.dp=2"], ["parallel.tp=2", "parallel.sequence_parallel=true"]
CELLS = {"alone": [], "dp": DP, "sp": SP, "dp-sp-zb-h1": [*DP, *SP, *PP, "parallel.schedule=zb-h1"],
         "tp": ["parallel.tp=2"], "full-offload": ["activation.policy=full", "offload.optimizer=cpu", *DP],
         "bf16": ["precision.dtype=bf16", *DP], "dropout": ["model.dropout=0.2", *DP],
         "tiles": ["model.tile_linears=1KiB", "model.tie_embeddings=false", *SP]}


@pytest.fixture(autouse=True)
def tokens(monkeypatch):
    monkeypatch.setitem(mesh.AXES, "xp", "tokens")
    mesh.QUIET.add("xp")
    monkeypatch.setitem(mesh.GROUPS, "xp", GroupRow(("xp",), "xp", "compute"))
    monkeypatch.setattr(ParallelConfig, "xp", 1, raising=False)
    yield
    mesh.QUIET.discard("xp")


def with_xp(size: int, *overrides: str) -> Config:
    config = tiny(*SMALL, FAMILY, *overrides)
    config.parallel.xp = size  # pyright: ignore[reportAttributeAccessIssue]
    return config


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("cell", CELLS)
def test_contract(cell, stage, references):
    assert_contract(with_xp(2, *CELLS[cell], f"zero.stage={stage}"), references)


@pytest.mark.parametrize("shard, stage", [(1, 3), (2, 1), (2, 2), (4, 3)])
def test_shard_groups(shard, stage, references):
    """They count ranks of dp and of the axis."""
    config = with_xp(2, *DP, f"zero.stage={stage}")
    config.zero.shard_size = shard
    plan = make_plan(config)
    assert {unit.shards for unit in plan.table.parameters.values()} == {shard}
    assert_contract(config, references)


def test_mesh():
    """The group dp spans the axis, which is shown where it has ranks, and is inside dp by itself."""
    one, two = Mesh(("pp", "dp", "tp"), dp=2, tp=2), Mesh(("pp", "dp", "tp"), dp=2, tp=2, xp=2)
    assert one.text() == "pp 1 x dp 2 x tp 2" and two.text() == "pp 1 x dp 2 x tp 2 x xp 2"
    assert two.order == ("pp", "dp", "cp", "xp", "tp")
    assert two.group("xp", 0) == (0, 2) and two.group("dp", 0) == (0, 2, 4, 6)
    assert two.shard_size == 4 and Mesh(shard=2, dp=2, xp=2).copies == 2
    assert [two.tokens_of(two.coordinate(rank)) for rank in (0, 2, 4)] == [(0, 2), (1, 2), (0, 2)]
    assert str(one.coordinate(3)) == "pp0 dp1 tp1" and str(two.coordinate(3)) == "pp0 dp0 tp1 xp1"
    assert "xp" not in one.draw()


def test_pages_do_not_change():
    """With one rank on it, what is printed of a plan is what was printed before."""
    plan = make_plan(with_xp(1, *SP, *DP))
    rows = summary.stages(Analysis(plan))
    assert "xp" not in threed.show(plan) and "sends xp" not in summary.show(rows)


def test_a_rank_has_its_tokens():
    """Half of the bytes of activations, and of the products."""
    whole, half = (make_plan(with_xp(size, *SP)).table for size in (1, 2))
    assert half.act_bytes * 2 == whole.act_bytes
    assert half.units[1].forward_flops * 2 == whole.units[1].forward_flops
    assert half.units[1].saved_bytes * 2 == whole.units[1].saved_bytes


@pytest.mark.parametrize("saved, resumed", [(2, 1), (1, 2), (2, 4)])
def test_resumes_on_another_size(saved, resumed, tmp_path, references):
    path = "auto"
    runs = (saved, [*PP, *SP, "zero.stage=1"], [0, 1]), (resumed, [*DP, "zero.stage=3"], [2, 3])
    for size, chosen, steps in runs:
        config = with_xp(size, *chosen, f"run.dir={tmp_path}", f"train.resume={path}")
        losses, path = train(config, len(steps))
        want = references(with_xp(1), 4).losses
        assert losses == pytest.approx([want[step] for step in steps], rel=1e-5)


def test_bad_input():
    where = r"model.seq_len=8 with parallel.xp=3 and parallel.tp=2: each .* multiple of 6"
    with pytest.raises(ThreedError, match=where):
        checked(with_xp(3, *SP))
    config = tiny(*SMALL)
    config.parallel.xp = 2  # pyright: ignore[reportAttributeAccessIssue]
    where = r"0\.attention: it attends to all tokens .* over cp alone; .* \(xp\)"
    with pytest.raises(ThreedError, match=where):
        make_plan(config)

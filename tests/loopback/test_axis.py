"""A fourth axis of rows in the tables of `threed.base.mesh` alone: a sample of the contract with it.

Ranks along `xp` divide parameters, as those along tp do. All ranks of xp hold layers that know nothing of it;
the family of tests/families/second_axis.py cuts its MLPs over it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import assert_contract, batches, tiny
from threed.base import mesh
from threed.base.mesh import GroupRow
from threed.checkpoint.lineage import Lineage
from threed.checkpoint.load import resume
from threed.checkpoint.save import Saver
from threed.comm.group import Comm
from threed.comm.process import initialized
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.models.measure import Measured
from threed.models.tiling import layers_of, share_of
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.schema import Config, ParallelConfig
from threed.spec.parameter import Cost

SECOND_AXIS = "model.family=tests/families/second_axis.py:SECOND_AXIS"
SMALL = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16", "train.global_batch_size=6"]
PP, DP, TP = ["parallel.pp=2"], ["parallel.dp=2"], ["parallel.tp=2"]
SP, ZBV = [*TP, "parallel.sequence_parallel=true"], [*PP, "parallel.schedule=zb-v"]
TILED = ["model.tile_linears=1KiB", "model.tie_embeddings=false"]
SAMPLE = {
    "1f1b-zero-0": [*PP, *DP, "zero.stage=0"], "zb-v-zero-1": [*ZBV, *DP, "zero.stage=1"],
    "zb-v-tp-zero-2": [*ZBV, *TP, "zero.stage=2"], "1f1b-tp-zero-3": [*PP, *TP, *DP, "zero.stage=3"],
    "full": [*PP, "activation.policy=full", "zero.stage=3", *DP],
    "selective": [*TP, "activation.policy=selective", "activation.pieces=[attention,norm,mlp_act]"],
    "sp": [*SP, *ZBV, "zero.stage=2"], "groups": ["parallel.dp=2", "zero.shard_size=1", "zero.stage=3", *PP],
    "tiles": [*TILED, *TP],
    "bf16-offload": ["precision.dtype=bf16", "offload.optimizer=cpu", *DP, "zero.stage=2"],
}


def add_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for the axis, and one for each group: the ranks along it, and all who hold one block together,
    over which nothing is cut."""
    monkeypatch.setitem(mesh.AXES, "xp", "parameters")
    monkeypatch.setitem(mesh.GROUPS, "xp", GroupRow(("xp",), "xp", "compute"))
    monkeypatch.setitem(mesh.GROUPS, "block", GroupRow(("tp", "xp"), "xp", "compute"))
    # A real axis has a key: `xp: int = 1` in schema.ParallelConfig, and its place in the default axis_order.
    monkeypatch.setattr(ParallelConfig, "xp", 1, raising=False)


def with_xp(size: int, *overrides: str) -> Config:
    config = tiny("parallel.axis_order=pp-dp-tp-xp", *overrides)
    config.parallel.xp = size  # pyright: ignore[reportAttributeAccessIssue]
    return config


@pytest.mark.parametrize("cut", [False, True], ids=["held-by-all", "cut"])
@pytest.mark.parametrize("cell", SAMPLE)
def test_contract(cell, cut, references, monkeypatch):
    add_axis(monkeypatch)
    config = with_xp(2, *SMALL, *([SECOND_AXIS] if cut else []), *SAMPLE[cell])
    sent = {axis for unit in make_plan(config).table.units for axes in unit.traffic.values() for axis in axes}
    assert ("xp" in sent) == cut
    assert_contract(config, references)


@pytest.mark.parametrize("cut", [SMALL, [*SMALL, *SP], [*SMALL, *TILED, *SP]], ids=["xp", "sp", "tiles-sp"])
def test_layers_cost_what_they_declare(cut, monkeypatch):
    """Bytes sent over the new axis included."""
    add_axis(monkeypatch)
    config = with_xp(2, SECOND_AXIS, *cut)
    all_layers = layers_of(config)
    blocks = [layer for layer in all_layers if layer.name.startswith("blocks.0")]
    sent = {axis for layer in blocks for (_, axis), size in layer.cost(share_of(config)).sent.items() if size}
    assert sent == {"xp", "tp"} if SP[0] in cut else {"xp"}
    for layer in blocks:
        with initialized():
            cost = Measured(layer, config.model, share_of(config)).cost()
        assert shown(layer.cost(share_of(config))) == shown(cost), layer.name


def shown(cost: Cost) -> dict[str, object]:
    sent = {where: size for where, size in cost.sent.items() if size.bytes}
    return {"flops": cost.flops, "saved": cost.saved_bytes(), "operands": cost.operands, "sent": sent}


# ---------------------------------------------------------------- checkpoints


def train(config: Config, steps: int) -> tuple[list[float], Path]:
    """Resume where `train.resume` says, take some steps, and save."""
    plan = make_plan(config)

    def work(comm: Comm) -> tuple[list[float], Path]:
        engine = Engine(Analysis(plan), comm)
        resume(config, engine.zero)
        losses = [engine.train_step(batches(config, comm, engine.zero.step_number))[0].loss
                  for _ in range(steps)]
        saver = Saver(engine, Lineage("test-0"), lambda: None)
        saver.begin({"samples": 0, "skipped": 0, "wandb_id": None})
        outcome = saver.drain()
        assert outcome is not None and outcome.problem is None, outcome
        return losses, outcome.path

    return run_loopback(plan, make_mesh(config), work)[0]


@pytest.mark.parametrize("saved, resumed", [(2, 1), (1, 2), (2, 2)])
def test_resumes_on_another_size(saved, resumed, tmp_path, references, monkeypatch):
    add_axis(monkeypatch)
    path = "auto"
    runs = (saved, [*PP, *TP, "zero.stage=1"], [0, 1]), (resumed, [*DP, "zero.stage=3"], [2, 3])
    for size, chosen, steps in runs:
        config = with_xp(size, *SMALL, SECOND_AXIS, *chosen, f"run.dir={tmp_path}", f"train.resume={path}")
        losses, path = train(config, len(steps))
        want = references(with_xp(1, *SMALL, SECOND_AXIS), 4).losses
        assert losses == pytest.approx([want[step] for step in steps], rel=1e-5)


def test_resumes_from_before_the_axis(tmp_path, monkeypatch):
    """A checkpoint that was written before the axis existed."""
    _, path = train(tiny(*SMALL, *TP, f"run.dir={tmp_path}"), 2)
    first, _ = train(tiny(*SMALL, *TP, f"train.resume={path}", f"run.dir={tmp_path}/alone"), 2)
    add_axis(monkeypatch)
    losses, _ = train(with_xp(2, *SMALL, *DP, f"train.resume={path}", f"run.dir={tmp_path}/xp"), 2)
    assert losses == pytest.approx(first, rel=1e-5)

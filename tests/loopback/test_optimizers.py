"""Optimizers beside AdamW: what they keep is all that is kept, on every tier and in checkpoints; and their
numbers are the reference's under every ZeRO stage."""

from __future__ import annotations

import re

import pytest

from tests.harness import assert_contract, loopback, same_bits, tiny
from tests.loopback.test_checkpoint import (
    DP,
    FILES,
    at,
    manifest,
    named,
    on_ranks,
    saved_after,
    step,
)
from threed.base.errors import InputError
from threed.checkpoint.load import resume
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.optim.registry import OPTIMIZERS, kept_by, turning
from threed.planner import make_plan
from threed.prediction.memory import model_states
from threed.program.instruction import Slot, Tier

# Without biases: the gradient of a key's bias is zero but for rounding, and Lion takes its sign.
PLAIN = ["model.bias=false", "model.norm=rmsnorm", "parallel.pp=2", *DP]
WAYS = {
    **{f"zero-{stage}": [*PLAIN, f"zero.stage={stage}"] for stage in range(4)},
    "tp": [*PLAIN, "parallel.tp=2", "zero.stage=2"],
    "cpu": [*PLAIN, "zero.stage=2", "offload.optimizer=cpu"],
    "cpu-parameters": [*PLAIN, "zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"],
    "disk": [*PLAIN, "zero.stage=1", "offload.optimizer=nvme", FILES],
    "disk-parameters": [*PLAIN, "zero.stage=3", "offload.optimizer=nvme", "offload.parameters=nvme", FILES],
    "no-overlap": [*PLAIN, "zero.stage=2", "offload.optimizer=cpu", "offload.overlap=none"],
    "gradients": [*PLAIN, "zero.stage=2", "offload.optimizer=cpu", "offload.gradients=host"],
    "no-master": [*PLAIN, "zero.stage=1", "precision.dtype=bf16", "precision.master=none"],
}
OTHERS = [name for name in OPTIMIZERS if name != "adamw"]
TURNING = [name for name in OTHERS if turning(name) is not None]
# Ways beside those of all optimizers, of those that turn whole matrices
MOE = ["model.family=moe", "model.experts=4", "model.expert_ffn_hidden=24", "model.shared_expert_ffn=20",
       "train.seed=4", "model.layers=2", *DP]
SP, LLAMA = "parallel.sequence_parallel=true", ["model.activation=swiglu", "model.kv_heads=4", *PLAIN]
MORE_WAYS = {
    "sp": [*LLAMA, "parallel.tp=2", SP, "zero.stage=3"],
    "tp-4": [*LLAMA, "parallel.tp=4", "parallel.pp=1", "zero.stage=1"],
    "biases": [*DP, "parallel.tp=2", "model.tie_embeddings=true", "model.qk_norm=true", "zero.stage=0"],
    "persistent": [*LLAMA, "zero.stage=3", "zero.persist_below=1500"],
    "groups": [*PLAIN, "parallel.dp=4", "parallel.pp=1", "zero.shard_size=2", "zero.stage=2",
               "parallel.tp=2"],
    "order": [*PLAIN, "parallel.tp=2", "parallel.axis_order=tp-pp-dp", "zero.stage=1"],
    "cp": [*PLAIN, "parallel.cp=2", "zero.stage=1"],
    "heads": [*LLAMA, "optimizer.matrices=heads", "parallel.tp=2"],
    "clipped": [*PLAIN, "zero.stage=2", "optimizer.clip_grad=0.3"],
    "original": [*PLAIN, "optimizer.turn_scale=original", "optimizer.nesterov=false"],
    "beside": [*PLAIN, "optimizer.adamw_lr=5e-3", "optimizer.adamw_weight_decay=0.5"],
    "cpu-half": [*LLAMA, "parallel.tp=2", "zero.stage=1", "offload.optimizer=cpu", "offload.ratio=0.5"],
    "cpu-0": [*PLAIN, "zero.stage=0", "offload.optimizer=cpu"],
    "disk-groups": [*PLAIN, "parallel.dp=4", "parallel.pp=1", "zero.shard_size=2", "zero.stage=3", FILES,
                    "offload.optimizer=nvme", "offload.parameters=cpu"],
    "cpu-experts": [*MOE, "parallel.ep=2", "zero.stage=2", "offload.optimizer=cpu"],
    "bf16": [*PLAIN, "precision.dtype=bf16", "zero.stage=2", "optimizer.turn_dtype=bf16"],
    **{schedule: [*PLAIN, f"parallel.schedule={schedule}", "zero.stage=2"]
       for schedule in ("gpipe", "zb-h1", "zb-v")},
    "experts": [*MOE, "parallel.pp=2"],
    "ep": [*MOE, "parallel.ep=2", "zero.stage=2"],
    "ep-sp": [*MOE, "parallel.ep=4", "parallel.tp=2", SP, "zero.stage=3"],
    "ep-groups": [*MOE, "parallel.dp=4", "parallel.ep=2", "zero.shard_size=2", "zero.stage=1"],
}


def ways(name: str) -> list[str]:
    """Those that an optimizer has."""
    return [*WAYS, *MORE_WAYS] if name in TURNING else [*WAYS]


def settings(name: str, way: str) -> list[str]:
    """Overrides with which an optimizer's numbers can be compared."""
    # Lion moves every weight by lr: a sign that rounding turns is seen only where it is a large part of the
    # weights. And a turn in bf16 moves by 1e-2 where its input moves by 1e-7.
    own = {"lion": ["optimizer.lr=1e-4"], **{each: ["optimizer.turn_dtype=fp32"] for each in TURNING}}
    return [f"optimizer.name={name}", *own.get(name, []), *{**WAYS, **MORE_WAYS}[way]]


@pytest.mark.parametrize(("name", "way"), [(name, way) for name in OTHERS for way in ways(name)])
def test_the_reference(name, way, references):
    assert_contract(tiny(*settings(name, way)), references)


@pytest.mark.parametrize("name", OTHERS)
def test_stages_have_the_same_bits(name):
    """All stages that sum in one order."""
    once = {2: ["zero.reduce_every=step"], 3: ["zero.reduce_every=step"]}
    clip = ["optimizer.clip_grad=0.5"] if name in TURNING else []
    same_bits([loopback(tiny(*WAYS[f"zero-{stage}"], *once.get(stage, []), f"optimizer.name={name}", *clip),
                        3) for stage in range(4)])


@pytest.mark.parametrize(("name", "way"), [
    (name, way) for name in OTHERS for way in ("zero-0", "zero-1", "zero-2", "zero-3", "cpu", "disk")
    ])
def test_resumed_on_another_mesh(name, way, tmp_path):
    """Only what the optimizer keeps is saved; what goes on has the bits that a run without a stop has."""
    config = at(tmp_path, *settings(name, way))
    path = saved_after(config, 2)
    kinds = {kind for entry in manifest(path)["parameters"].values() for kind in entry["sums"]}
    assert kinds == {"param", *kept_by(name)}
    goes_on = named(config, path)

    def go_on(engine: Engine, comm: Comm) -> list[float]:
        resume(goes_on, engine.zero)
        return step(engine, comm, 2)

    more, *_ = on_ranks(goes_on, go_on)
    whole, *_ = on_ranks(config, lambda engine, comm: step(engine, comm, 4))
    assert more == whole[2:]
    other = named(at(tmp_path, *settings(name, "zero-3")), path)
    moved, *_ = on_ranks(other, lambda engine, comm: (resume(other, engine.zero), step(engine, comm, 2))[1])
    assert moved == pytest.approx(more, rel=1e-6)


@pytest.mark.parametrize(("before", "after", "missing"), [
    ("sgd", "adamw", "exp_avg and exp_avg_sq"), ("lion", "adamw", "exp_avg_sq"), ("sgd", "lion", "exp_avg"),
    ("adamw", "muon", "momentum"), ("muon", "adamw", "exp_avg and exp_avg_sq")])
def test_another_optimizer_wants_more(before, after, missing, tmp_path):
    path = saved_after(at(tmp_path, *DP, f"optimizer.name={before}"), 1)
    goes_on = named(at(tmp_path, *DP, f"optimizer.name={after}"), path)
    words = f"saved with optimizer.name={before}, and has no {missing}, which {after} needs"
    with pytest.raises(InputError, match=re.escape(words)):
        on_ranks(goes_on, lambda engine, comm: resume(goes_on, engine.zero))


def test_another_optimizer_wants_less(tmp_path):
    """AdamW's moments are left behind, and that is said."""
    path = saved_after(at(tmp_path, *DP), 1)
    goes_on = named(at(tmp_path, *DP, "optimizer.name=sgd"), path)
    resumed, *_ = on_ranks(goes_on, lambda engine, comm: resume(goes_on, engine.zero))
    assert any("optimizer.name was adamw" in line for line in resumed.notes)


@pytest.mark.parametrize(("name", "device", "host"), [("adamw", 8, 12), ("lion", 4, 8), ("sgd", 0, 4),
                                                      ("muon", 4, 8)])
def test_bytes(name, device, host):
    """Of an element: on the device without a master, on the host and the disk with one; in formulas and in
    the plan."""
    assert model_states(1.0, 1, "fp32", False, name)["bytes_per_parameter"]["optimizer"] == device
    assert model_states(1.0, 1, "bf16", True, name)["bytes_per_parameter"]["optimizer"] == host
    for overrides, tier, each in (([], Tier.DEVICE, device), (["offload.optimizer=cpu"], Tier.HOST, host),
                                  (["offload.optimizer=nvme", FILES], Tier.DISK, host)):
        table = make_plan(tiny(*DP, "zero.stage=1", f"optimizer.name={name}", *overrides)).table
        for unit in table.parameters:
            if not (own := table.parameters[unit].optimizer):  # else it is AdamW's, or a count's
                assert table.size(Slot("state", unit, tier=tier)) == each * table.shards.numel(unit)
            assert not own or name in TURNING

"""parallel.pair moves instructions and changes no value: paired equals unpaired to the bit."""

from __future__ import annotations

import pytest

from tests.harness import loopback, same_bits
from tests.loopback.test_experts import BIAS, FULL, MESHES, PP, SHARED, SP, moe
from threed.planner import make_plan
from threed.planner.warnings import unpaired
from threed.program.pairs import has_pairs
from threed.schedules.orders import SCHEDULES

PAIR = "parallel.pair=true"
LONG = ["model.layers=4", "model.expert_ffn_hidden=96", "train.global_batch_size=12"]
CELLS = {
    **{name: [f"parallel.schedule={name}", f"zero.stage={index % 4}",
              *(["parallel.virtual_stages=2"] if row.virtual is None else [])]
       for index, (name, row) in enumerate(SCHEDULES.items()) if row.paired},
    "auto": ["parallel.schedule=auto", "zero.stage=2"],
    **{f"zero-{stage}": ["parallel.schedule=zb-v", f"zero.stage={stage}", *SHARED] for stage in range(4)},
    "full": ["parallel.schedule=dualpipe-v", *FULL, "zero.stage=3"],
    "full-1f1b": ["parallel.schedule=1f1b", *FULL, *SHARED],
    "bf16": ["parallel.schedule=zb-h1", "precision.dtype=bf16", *BIAS],
    "bf16-full": ["parallel.schedule=interleaved", "parallel.virtual_stages=2", "precision.dtype=bf16",
                  *FULL],
    "kept-on-host": ["parallel.schedule=zb-v", *FULL, "activation.offload=cpu"],
    "offload": ["parallel.schedule=dualpipe-v", "zero.stage=3", "offload.optimizer=cpu",
                "offload.parameters=cpu", *FULL],
    "two-resident": ["parallel.schedule=interleaved", "parallel.virtual_stages=2", "zero.stage=3",
                     "zero.residency=2", "zero.prefetch=0"],
    "dense-between": ["parallel.schedule=zb-v", "model.moe_every=2"],
    "penalties": ["parallel.schedule=dualpipe-v", "model.balance=sequence", "model.z_loss=0.01", *SHARED],
    "tp": [*SP, "parallel.schedule=1f1b"],
    "tied": ["parallel.schedule=v-half", "model.tie_embeddings=true"],
    "tied-one-position": ["parallel.pp=1", "parallel.schedule=zb-h1", "model.tie_embeddings=true", *FULL,
                          "model.vocab=30000", "model.layers=2"],
    "overlap": ["parallel.schedule=zb-v", "offload.optimizer=cpu"],
    "no-overlap": ["parallel.schedule=zb-v", "offload.optimizer=cpu", "offload.overlap=none"],
    "verified": ["parallel.schedule=dualpipe-v", "run.verify_every=1", "train.eval_every=1", "zero.stage=2"],
    "one-position": ["parallel.pp=1", "parallel.schedule=1f1b"],
}


def config_of(name: str, *more: str):
    return moe(*LONG, *PP, *MESHES["ep"], *CELLS[name], *more)


@pytest.mark.parametrize("name", CELLS)
def test_to_the_bit(name):
    same_bits([loopback(config_of(name, *more), 2) for more in ([], [PAIR])])


@pytest.mark.parametrize("name", CELLS)
def test_there_are_pairs(name):
    """But where a schedule would only wait: each pair ends later than its first part would."""
    plan, plain = (make_plan(config_of(name, *more)) for more in ([PAIR], []))
    assert not any(has_pairs(program, plain.table) for program in plain.programs["train"])
    waits = name in ("v-half", "v-min", "tied")
    assert [has_pairs(program, plan.table) for program in plan.programs["train"]] == (
        [not waits] * len(plan.programs["train"]))
    assert bool(unpaired(plan)) == waits and not unpaired(plain)

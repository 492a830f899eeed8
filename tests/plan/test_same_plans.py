"""Plans, checks, predictions and pictures of a spread of configs are what they were, to the bit.

tests/golden/plans.json has their hashes. They change only on purpose: then write them anew with

    python -m tests.plan.test_same_plans
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import threed

GOLDEN = Path(__file__).parents[1] / "golden" / "plans.json"
SIZE = ("model.layers=14", "model.hidden=64", "model.heads=4", "model.vocab=500", "parallel.pp=4",
        "parallel.dp=2", "train.global_batch_size=26", "train.eval_every=1", "run.verify_every=10")
V_2, FULL, HALF = "parallel.virtual_stages=2", "activation.policy=full", "precision.dtype=bf16"
NVME = "offload.nvme_path=/disk"
CASES: dict[str, tuple[str, ...]] = {
    "gpipe": ("parallel.schedule=gpipe", "zero.stage=0"),
    "1f1b": ("zero.stage=1", "parallel.tp=2", "parallel.sequence_parallel=true", HALF),
    "interleaved": ("parallel.schedule=interleaved", V_2, "zero.stage=2", FULL),
    "breadth-first": ("parallel.schedule=breadth-first", V_2, "zero.stage=3", "zero.residency=2"),
    "zb-h1": ("parallel.schedule=zb-h1", "zero.stage=3", "zero.prefetch=2", "offload.optimizer=cpu",
              "offload.parameters=cpu", HALF),
    "zb-h2": ("parallel.schedule=zb-h2", "zero.stage=1", "offload.optimizer=nvme", NVME),
    "zb-v": ("parallel.schedule=zb-v", "zero.stage=2", "zero.reduce_every=3", FULL,
             "activation.offload=cpu"),
    "dualpipe-v": ("parallel.schedule=dualpipe-v", "zero.stage=3", "offload.optimizer=nvme",
                   "offload.parameters=nvme", NVME, HALF),
    "auto": ("parallel.schedule=auto", "parallel.activation_limit=1x"),
    "partition": ("parallel.tp=2", FULL, "activation.partition=true", "activation.offload=cpu",
                  "zero.stage=2", "offload.optimizer=cpu", "offload.ratio=0.5"),
    "overlap": ("zero.stage=2", "offload.optimizer=cpu", HALF, "checkpoint.every=5"),
    "no overlap": ("zero.stage=2", "offload.optimizer=cpu", "offload.overlap=none", HALF,
                   "checkpoint.every=5"),
    "gradients": ("zero.stage=2", "offload.optimizer=cpu", "offload.gradients=host", HALF),
    "contiguous": (FULL, "activation.contiguous=true", "activation.every=2", "zero.stage=1", "parallel.dp=4",
                   "zero.shard_size=2", "train.global_batch_size=28"),
    "budget": ("activation.policy=budget", "activation.budget=3MB", "model.tie_embeddings=false"),
    "tiles": ("model.layers=6", "train.global_batch_size=8", "model.tile_linears=60000", "zero.stage=3",
              "model.tie_embeddings=false"),
    "graphs": ("run.cuda_graphs=true", "activation.policy=selective", HALF, "checkpoint.background=false"),
    "one": ("parallel.pp=1", "parallel.dp=1", "train.global_batch_size=3"),
}


def hashes(name: str) -> dict[str, str]:
    """Of what `threed check`, `predict` and `show` say of a case."""
    plan = threed.plan(threed.load(None, [*SIZE, *CASES[name]]))
    said = {"check": threed.check(plan), "predict": threed.predict(plan, "tflops=300,node_us=7"),
            "show": [threed.show(plan, program=program) for program in plan.programs]}
    return {"digest": plan.digest,
            **{verb: hashlib.sha256(json.dumps(_rounded(value)).encode()).hexdigest()[:16]
               for verb, value in said.items()}}


def _rounded(value: Any) -> Any:
    """Since Python 3.12 a sum of numbers loses fewer of their last digits."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.9g}"))


@pytest.mark.parametrize("name", CASES)
def test_as_it_was(name):
    assert hashes(name) == json.loads(GOLDEN.read_text())[name]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: hashes(name) for name in CASES}, indent=1) + "\n")

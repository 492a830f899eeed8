"""Searches try parallel.pair where exchanges are waited for."""

from __future__ import annotations

import pytest

import threed
from threed.base.errors import InputError

# Experts that are large for what the network takes
MOE = ["model.family=moe", "model.layers=8", "model.hidden=1024", "model.heads=8", "model.vocab=512",
       "model.seq_len=1024", "model.experts=8", "model.ffn_hidden=2048", "model.tie_embeddings=false",
       "train.global_batch_size=64", "train.micro_batch_size=1", "precision.dtype=bf16", "run.device=auto"]
FEW = ["parallel.ep=8", "parallel.tp=1", "parallel.pp=2", "zero.stage=1", "activation.policy=none",
       "parallel.schedule=zb-v", "parallel.axis_order=dp-pp-tp"]


def layouts(*overrides: str, file=None):
    return threed.search(file or "configs/toy-moe.yaml", 16, [*MOE, *FEW, *overrides], "h100-sxm")["layouts"]


def test_pairs_are_tried():
    best, alone, fixed = layouts()[0], layouts("parallel.pair=false")[0], layouts("parallel.pair=true")[0]
    assert ", pairs" in best["layout"] and best["changes"]["parallel.pair"] is True
    assert ", pairs" not in alone["layout"] and alone["step_s"] > best["step_s"]
    assert fixed == best
    # What is printed is what `threed predict` says of it.
    config = [f"{key}={value}" for key, value in best["changes"].items()]
    assert threed.predict(threed.load(None, config), "h100-sxm")["step_time"] == pytest.approx(best["step_s"])


def test_nothing_to_pair():
    with pytest.raises(InputError, match="no exchanges, or no schedule"):
        layouts("parallel.pair=true", "parallel.ep=1")
    with pytest.raises(InputError, match="no exchanges, or no schedule"):
        layouts("parallel.pair=true", "parallel.schedule=gpipe")

"""The schedule `vertical` trains as 1F1B does, to the bit: micro-batches add up in the same order. (Not so
the two parts of a tied weight: the head's of a whole group come before the embedding's.)"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.harness import assert_parity, loopback, tiny
from threed.schema import Config

UNTIED = "model.tie_embeddings=false"
SMALL = ["model.layers=3", "model.hidden=16", "model.heads=4", "model.seq_len=8", "model.vocab=30",
         "model.vocab_multiple=16"]
HOST = ["zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"]
CASES = {
    "plain": [],
    "zero-2": ["zero.stage=2", "parallel.dp=2"],
    "zero-3": ["zero.stage=3", "parallel.dp=2", "zero.residency=1"],
    "a reduction a step": ["zero.stage=3", "parallel.dp=2", "zero.reduce_every=step"],
    "on the host": HOST,
    "recomputed, on the host": [*HOST, "activation.policy=full", "activation.offload=cpu"],
    "tp": ["parallel.tp=2", "parallel.sequence_parallel=true"],
    "clipping": ["optimizer.clip_grad=0.5"],
    "dropout": ["model.dropout=0.1", "model.attention_dropout=0.1"],
    "bf16": ["precision.dtype=bf16", *HOST],
}


def config(schedule: str, *others: str, group: str | None = None) -> Config:
    return tiny(*SMALL, "parallel.dp=1", "train.global_batch_size=8", f"parallel.schedule={schedule}",
                "train.eval_every=1", "data.validation_fraction=0.1", *others,
                *([f"parallel.group={group}"] if group else []))


def assert_same_bits(one, other) -> None:
    assert one.losses == other.losses and one.norms == other.norms and one.evaluated == other.evaluated
    for here, there in ((one.first_grads, other.first_grads), (one.weights, other.weights)):
        assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)


@cache
def ran_as_1f1b(case: str):
    return loopback(config("1f1b", UNTIED, *CASES[case]), 3)


@pytest.mark.parametrize("group", ["2",
                                   *(pytest.param(each, marks=pytest.mark.slow) for each in ("1", "auto"))])
@pytest.mark.parametrize("case", CASES)
def test_same_bits_as_1f1b(case, group):
    """Losses, norms, gradients and weights of three steps, and the loss of an evaluation."""
    assert_same_bits(loopback(config("vertical", UNTIED, *CASES[case], group=group), 3), ran_as_1f1b(case))


@pytest.mark.parametrize("group", ["2", "4"])
@pytest.mark.parametrize("case", ["plain", "zero-3", "on the host"])
def test_tied(case, group, references):
    """A weight that embedding and head share."""
    made = config("vertical", *CASES[case], group=group)
    assert_parity(loopback(made, 3), references(made, 3))


@pytest.mark.parametrize("p, group, layers", [(2, "2", 4), (2, "4", 3), (3, "2", 3), (4, "4", 5)])
@pytest.mark.parametrize("others", [[], ["zero.stage=3", "parallel.dp=2", "train.global_batch_size=8"],
                                    [UNTIED, *HOST]], ids=["plain", "zero-3", "host"])
def test_positions(p, group, layers, others, references):
    """On several positions, which need not divide the units, against the reference."""
    made = tiny(*SMALL, f"model.layers={layers}", f"parallel.pp={p}", "parallel.schedule=vertical",
                "train.global_batch_size=4", *others, f"parallel.group={group}")
    assert_parity(loopback(made, 3), references(made, 3))

"""The contract on a GPU: every value of every axis, on several ranks of one GPU, against the reference.

Without a GPU two cells run on the CPU in the same way, so that these tests are known to work.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.staged import ranks
from tests.harness import Ranks, assert_contract, cell_config, collect, covering, each_value, tiny
from tests.reference import Picks
from threed.schema import Config

CELLS = each_value(covering())
GPUS = torch.cuda.device_count()


def run(config: Config, steps: int, picks: Picks | None = None) -> Ranks:
    return collect(config, ranks(config, steps, picks=picks))


@pytest.mark.gpu
@pytest.mark.parametrize("cell", CELLS if GPUS else CELLS[-2:], ids=lambda cell: cell.id)
def test_a_cell_on_the_device(cell, references):
    """A stream that does not wait, memory that is used again too early, a number that the CPU rounds
    otherwise."""
    assert_contract(cell_config(cell, ranks=8), references, run, steps=2)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="NCCL needs a GPU a rank, and two ranks to talk")
@pytest.mark.parametrize("others", [
    ["parallel.dp=2", "zero.stage=3", "zero.prefetch=1"],
    ["parallel.tp=2", "parallel.sequence_parallel=true"],
    ["parallel.pp=2"],
    ["parallel.dp=2", "zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"],
    *([[f"parallel.dp={GPUS}", "zero.stage=2"]] if GPUS in (4, 8) else []),  # all of them
    *([[f"parallel.dp={GPUS // 4}", "parallel.tp=2", "parallel.pp=2"]] if GPUS in (4, 8) else []),
], ids=str)
def test_over_nccl(others, references):
    config = tiny("model.layers=2", *others)
    assert_contract(config, references,
                    lambda config, steps: collect(config, ranks(config, steps, over_nccl=True)))


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason="tests/loopback/test_graphs.py records graphs where there is no GPU")
@pytest.mark.parametrize("others", [
    [], ["parallel.tp=2", "parallel.sequence_parallel=true"], ["parallel.dp=2", "zero.stage=3"],
    ["parallel.pp=2", "parallel.schedule=zb-h1"], ["precision.dtype=bf16", "model.dropout=0.1"],
    ["activation.policy=full", "activation.offload=cpu"],
], ids=str)
def test_cuda_graphs(others, references):
    """The first step runs without, the second records them, the third and fourth replay them."""
    assert_contract(tiny("model.layers=2", "run.cuda_graphs=true", *others), references, run, steps=4)

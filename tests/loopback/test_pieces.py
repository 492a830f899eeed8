# pyright: reportMissingImports=false
"""Pieces with sums over tokens, by kernels (tensor/pieces, tensor/pieces_kernel): the numbers of separate
operations. Triton's interpreter runs the kernels on a CPU, in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from unittest import mock

import pytest
import torch

from tests.harness import loopback, tiny
from tests.loopback import sums_interpreted
from tests.loopback.test_saved import CASES
from threed.tensor.fused import Fused
from threed.tensor.pieces import Separate

interpreted = pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton (on Linux, "
                                 "and without a GPU: make kernels)")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def run():
    """Call a function of `sums_interpreted` there."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1"):
            pool.submit(os.getpid).result()  # it starts
        yield lambda function, *given: pool.submit(function, *given).result()


@interpreted
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("piece", ["gelus", "joins", "ends", "rows"])
def test_numbers(run, piece, dtype):
    run(getattr(sums_interpreted, piece), dtype)


UNTIED, SP = "model.tie_embeddings=false", ["parallel.tp=2", "parallel.sequence_parallel=true"]
LEARNED = "model.position=learned"
RUNS: dict[str, list[str]] = {
    "alone": [],
    "untied": [UNTIED, LEARNED],
    "tp": ["parallel.tp=2", "model.dropout=0.1"],
    "sp": [*SP, "model.dropout=0.1", LEARNED],
    "halves": ["parallel.pp=2", "parallel.schedule=zb-h1", *SP],
    "halves-v": ["parallel.pp=2", "parallel.schedule=zb-v", UNTIED, "model.dropout=0.1"],
    "recomputed": ["activation.policy=full", "parallel.tp=2", "model.dropout=0.1"],
    "pieces": ["activation.policy=selective", "activation.pieces=[attention,norm,mlp_act]", *SP],
    "zero-3": ["zero.stage=3", "parallel.dp=2", "model.dropout=0.1"],
    "branches": ["model.tile_linears=20KiB", UNTIED, "zero.stage=3", "parallel.dp=2"],
    "tiles": ["model.tile_linears=4KiB", UNTIED, "parallel.tp=2"],
    "documents": ["data.document_mask=true", *SP],
    "grouped": ["model.kv_heads=2", "parallel.tp=2"],
    "cp": ["parallel.cp=2", "model.dropout=0.1"],
    "cp-heads": ["parallel.cp=2", "parallel.cp_form=heads"],
    "cp-overlap": ["parallel.cp=2", "parallel.cp_overlap=true"],
    "lora": ["model.lora_rank=4", "parallel.tp=2"],
    "evaluated": ["train.eval_every=1", "parallel.tp=2"],
    "qk-norm": ["model.qk_norm=true", "parallel.tp=2"],
    "llama": ["model.family=llama", "model.kv_heads=4", "model.dropout=0.1"],
    "parallel-bodies": ["model.family=tests/families/parallel_block.py:PARALLEL", "model.dropout=0.1"],
}
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}
RUNS_IN = [(name, dtype) for number, name in enumerate(RUNS)
           for dtype in ("fp32", ("bf16", "fp16")[number % 2])]


@interpreted
@pytest.mark.parametrize(("name", "dtype"), RUNS_IN)
def test_runs(run, name, dtype):
    """Losses, norms and first gradients of a run by separate operations; and what is sent."""
    scale = ["precision.loss_scale=1024"] if dtype == "fp16" else []
    overrides = ["model.layers=2", "train.global_batch_size=4", f"precision.dtype={dtype}", *scale,
                 *RUNS[name]]
    ranks, calls = run(sums_interpreted.compare_runs, overrides)
    plain, limit = loopback(tiny(*overrides, "model.fused=off"), 2), TOLERANCE[dtype]
    assert calls["rows"] > 0 or name == "lora"
    assert ranks.losses == pytest.approx(plain.losses, rel=limit)
    assert ranks.norms == pytest.approx(plain.norms, rel=10 * limit)
    assert (ranks.evaluated or 0.0) == pytest.approx(plain.evaluated or 0.0, rel=limit)
    assert ranks.sent == plain.sent
    for key, grad in plain.first_grads.items():
        distance = float((ranks.first_grads[key] - grad).norm())
        assert distance <= (1 if dtype == "fp32" else 20) * limit * float(grad.norm()), key


@interpreted
@pytest.mark.parametrize("name", ["fp32", "untied-bf16-tp", "learned-bf16-sp", "dropout", "grouped"])
def test_what_is_held_within_an_instruction(run, name):
    """And so what is kept: the plan's sums are of both."""
    run(sums_interpreted.held, CASES[name])


def test_without_triton():
    """Nothing of triton is imported where no kernel runs."""
    code = ("import sys, threed.tensor.context; from threed.tensor.fused import Fused; import torch; "
            "from threed.tensor.pieces import Separate; "
            "assert Fused(True).sums(torch.device('cpu')) is Separate; "
            "assert Fused(False).sums(torch.device('cuda')) is Separate; "
            "assert 'threed.tensor.pieces_kernel' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


@interpreted
def test_with_triton():
    assert Fused(True).sums(torch.device("cuda")) is not Separate

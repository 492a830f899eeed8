# pyright: reportMissingImports=false
"""Pieces with sums over tokens, by kernels (tensor/pieces, tensor/pieces_kernel): the numbers of separate
operations. Triton's interpreter runs the kernels on a CPU, in another process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.harness import loopback, needs_triton, same_bits, tiny
from tests.loopback import sums_interpreted, test_transient
from tests.loopback.test_saved import CASES, FULL, SPLIT, selective
from threed.planner import analyse
from threed.prediction import transient
from threed.program.summary import stages
from threed.tensor.fused import Fused
from threed.tensor.pieces import Kernels, Separate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("piece", ["gelus", "joins", "ends", "wide_ends", "rows"])
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
    "qk-norm": ["model.qk_norm=true", "parallel.tp=2"],
    "llama": ["model.family=llama", "model.kv_heads=4", "model.dropout=0.1"],
    "parallel-bodies": ["model.family=tests/families/parallel_block.py:PARALLEL", "model.dropout=0.1"],
}
TOLERANCE = {"fp32": 1e-6, "bf16": 2e-3, "fp16": 1e-3}
IN_16_BITS = {"alone": "bf16", "tp": "fp16", "sp": "bf16", "halves-v": "bf16"}
RUNS_IN = [(name, dtype) for name in RUNS for dtype in ("fp32", IN_16_BITS.get(name)) if dtype]


def of(name: str, dtype: str) -> list[str]:
    scale = ["precision.loss_scale=1024"] if dtype == "fp16" else []
    return ["model.layers=2", "train.global_batch_size=2", "train.eval_every=0", f"precision.dtype={dtype}",
            *scale, *RUNS[name]]


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name in RUNS for dtype in ("fp32", "bf16")])
def test_same_bits_without_kernels(name, dtype):
    """On a CPU the pieces are separate operations, to the bit."""
    same_bits([loopback(tiny(*of(name, dtype), f"model.fused={fused}"), 2) for fused in ("off", "auto")])


@pytest.mark.parametrize("family", ["NORM", "DROPOUT", "FIRST", "LAST"])
def test_a_part_with_a_forward_of_its_own(family):
    """A piece does not take its place."""
    overrides = [f"model.family=tests/families/overriding.py:{family}", "model.layers=2", "model.dropout=0.1",
                 "train.global_batch_size=2"]
    runs = [loopback(tiny(*overrides, f"model.fused={fused}"), 2) for fused in ("off", "auto")]
    same_bits(runs)
    assert runs[0].losses != loopback(tiny(*overrides[1:]), 2).losses


@needs_triton
@pytest.mark.parametrize(("name", "dtype"), RUNS_IN)
def test_runs(run, name, dtype):
    """Loss, norm and gradients of a step by separate operations; and what is sent."""
    overrides = of(name, dtype)
    ranks, calls = run(sums_interpreted.a_run, overrides)
    plain, limit = loopback(tiny(*overrides, "model.fused=off"), 1), TOLERANCE[dtype]
    assert calls["rows"] > 0 or name == "lora"
    assert ranks.losses == pytest.approx(plain.losses, rel=limit)
    assert ranks.norms == pytest.approx(plain.norms, rel=10 * limit)
    assert ranks.sent == plain.sent
    for key, grad in plain.first_grads.items():
        distance = float((ranks.first_grads[key] - grad).norm())
        assert distance <= (10 if dtype == "fp32" else 15) * limit * float(grad.norm()), key


# Rounding adds up over steps. With kernels and without, curves of fp32 are at most 2.4e-7 apart, where a
# norm's gradient that is 5% wrong makes 3.6e-6. In bf16 they are 2.7e-3 apart, and up to 6.3e-3 from fp32's.
CURVES = {"fp32": 2e-6, "bf16": 6e-3}


@needs_triton
@pytest.mark.parametrize(("dtype", "dropout"), [("fp32", 0.0), ("fp32", 0.1), ("bf16", 0.1)])
def test_loss_curves(run, dtype, dropout):
    """30 steps, in which a model learns a batch."""
    overrides = ["model.layers=1", "model.hidden=16", "model.heads=1", "model.seq_len=4", "optimizer.lr=5e-3",
                 "optimizer.eps=1e-3", "train.global_batch_size=1", "train.eval_every=0",
                 f"precision.dtype={dtype}", f"model.dropout={dropout}"]
    fused = run(sums_interpreted.a_curve, overrides, 30)
    plain = loopback(tiny(*overrides, "model.fused=off"), 30, data=sums_interpreted.again)
    assert plain.losses[-1] < 0.2 * plain.losses[0]
    assert fused.losses == pytest.approx(plain.losses, rel=CURVES[dtype])
    assert fused.losses != plain.losses  # two ways


HELD = {**{name: CASES[name] for name in ("fp32", "untied-bf16-tp", "learned-bf16-sp", "dropout", "grouped",
                                          "llama-bf16-sp", "tiles")},
        "halves": [*SPLIT, *CASES["learned-bf16-sp"]], "pieces": selective("attention,norm,mlp_act"),
        "full-dropout": [*FULL, "model.dropout=0.1"], "documents": ["data.document_mask=true"]}


@pytest.mark.parametrize("name", HELD)
def test_what_is_held_within_an_instruction(name, monkeypatch):
    """Beside its slots, by kernels, is what the plan says. (These write nothing: numbers do not matter.)"""
    test_transient.alike(monkeypatch)
    monkeypatch.setattr(transient._Kernels, "kernels", lambda *_: None)  # the loss has none
    monkeypatch.setattr(Fused, "sums", lambda *_: Kernels(lambda *_, **__: None))
    test_transient.compare(tiny(*test_transient.SIZES, *HELD[name], "model.fused=auto"))


def test_what_is_kept_is_what_separate_operations_keep():
    """But for dropout's masks: no piece keeps a tensor of its own."""
    kept = [max(row.activation_peak_bytes for row in stages(analyse(tiny("precision.dtype=bf16", *SP, LEARNED,
                                                                         "model.loss_chunk=8",
                                                                         f"model.fused={text}"))))
            for text in ("off", "auto")]
    assert kept[0] == kept[1]


def test_without_triton():
    """Nothing of triton is imported where no kernel runs."""
    code = ("import sys, threed.tensor.context; from threed.tensor.fused import Fused; import torch; "
            "from threed.tensor.pieces import Separate; "
            "assert Fused(True).sums(torch.device('cpu')) is Separate; "
            "assert Fused(False).sums(torch.device('cuda')) is Separate; "
            "assert 'threed.tensor.pieces_kernel' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_triton
def test_with_triton():
    assert Fused(True).sums(torch.device("cuda")) is not Separate

# pyright: reportMissingImports=false
"""The loss by kernels (tensor/loss_kernel, tensor/fused_loss): the numbers of the plain one. The kernels run
on a CPU by Triton's interpreter, in another process, and are compiled for an H100 without one."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import loopback, needs_triton, tiny
from tests.loopback import interpreted
from tests.loopback.test_saved import CASES
from threed.tensor.fused import Fused

pytestmark = needs_triton
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Run = Callable[..., Any]


# ((S, B, V), vocab): blocks that are full, one logit more or less, padding of a block and more, one logit
SIZES = [((7, 3, 16), 13), ((1, 1, 1), 1), ((2, 2, 128), 128), ((2, 1, 4096), 4096), ((2, 1, 4097), 4097),
         ((1, 2, 8191), 8190), ((2, 1, 5000), 100)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(run, dtype):
    for sizes, vocab in SIZES:
        run(interpreted.compare, sizes, vocab, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drawn_sizes(run, dtype):
    """A vocabulary cut over tp and into tiles, of which some are padding alone."""
    draw = random.Random(5)
    for _ in range(12):
        tp, tiles = draw.choice((1, 2, 4)), draw.choice((1, 2, 3))
        padded = tp * tiles * draw.choice((1, 3, 16, 40))
        sizes = draw.randint(1, 5), draw.randint(1, 3), padded
        run(interpreted.compare, sizes, draw.randint(1, padded), dtype, tp, tiles)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extremes(run, dtype):
    run(interpreted.compare_extremes, dtype)


@pytest.mark.parametrize("name", ["kernels", "chunks"])
def test_written_in_place(run, name):
    run(interpreted.written_in_place, name)


@pytest.mark.parametrize("name", ["fp32", "untied-bf16-tp", "llama-bf16-sp", "tiles", "tiles-sp"])
def test_what_is_held_within_an_instruction(run, name):
    run(interpreted.held, CASES[name])


UNTIED = ["model.tie_embeddings=false"]
RUNS: dict[str, list[str]] = {
    "alone": [],
    "chunks": ["model.loss_chunk=5"],  # which the kernels do not need
    "tp": ["parallel.tp=2"],
    "sp": ["parallel.tp=4", "parallel.sequence_parallel=true"],
    "halves": ["parallel.pp=2", "parallel.schedule=zb-h1", "parallel.tp=2"],
    "halves-v": ["parallel.pp=2", "parallel.schedule=zb-v", *UNTIED],
    "recomputed": ["activation.policy=full", "parallel.tp=2"],
    "tiles": ["model.tile_linears=8KiB", *UNTIED, "zero.stage=3", "parallel.dp=2"],
    "tiles-tp": ["model.tile_linears=4KiB", *UNTIED, "parallel.tp=2"],
    "masked": ["data.loss_mask=answers", "data.document_mask=true", "parallel.tp=2"],
    "lora": ["model.lora_rank=4", "parallel.tp=2"],
    "evaluated": ["train.eval_every=1", "parallel.tp=2"],
    "padding": ["model.vocab=60", "model.vocab_multiple=128", "parallel.tp=2"],  # all of a rank's ids
}
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3, "fp16": 1e-3}


RUNS_IN = [(name, dtype) for number, name in enumerate(RUNS)
           for dtype in ("fp32", ("bf16", "fp16")[number % 2])]


@pytest.mark.parametrize(("name", "dtype"), RUNS_IN)
def test_runs(run, name, dtype):
    """Losses, norms and first gradients of a run without kernels."""
    scale = ["precision.loss_scale=1024"] if dtype == "fp16" else []
    overrides = ["model.layers=2", "train.global_batch_size=4", f"precision.dtype={dtype}", *scale,
                 *RUNS[name]]
    ranks, calls = run(interpreted.compare_runs, overrides)
    plain, limit = loopback(tiny(*overrides), 2), TOLERANCE[dtype]
    assert calls["statistics"] > 0 and calls["gradient"] > 0
    assert ranks.losses == pytest.approx(plain.losses, rel=limit)
    assert ranks.norms == pytest.approx(plain.norms, rel=10 * limit)
    assert (ranks.evaluated or 0.0) == pytest.approx(plain.evaluated or 0.0, rel=limit)
    assert (ranks.evaluated is None) == (name != "evaluated")
    assert ranks.sent == plain.sent
    for key, grad in plain.first_grads.items():
        distance = float((ranks.first_grads[key] - grad).norm())
        assert distance <= (1 if dtype == "fp32" else 20) * limit * float(grad.norm()), key


# ---------------------------------------------------------------- for an H100, without one

H100 = ("cuda", 90, 32)  # sm_90, warps of 32 threads
ELEMENTS = {"fp32": "*fp32", "bf16": "*bf16", "fp16": "*fp16"}
# Of a thread: an SM has room for 5 and 8 programs at a time.
REGISTERS = {"statistics_kernel": 48, "gradient_kernel": 32}


def compiled(kernel: Any, element: str) -> Any:
    """A kernel with arguments as in a run: all pointers and sizes are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from threed.tensor.loss_kernel import BLOCK, WARPS

    kinds = {"logits": element, "places": "*i64", "width": "i32", "real": "i32", "BLOCK": "constexpr"}
    signature = {name: kinds.get(name, "*fp32") for name in kernel.arg_names}
    even = {(number,): [["tt.divisibility", 16]] for number, name in enumerate(kernel.arg_names)
            if name != "BLOCK"}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index("BLOCK"),): BLOCK}, even)
    return triton.compile(source, target=GPUTarget(*H100), options={"num_warps": WARPS})


def used(ptx: str, folder: Path) -> tuple[int, int]:
    """(registers of a thread, bytes that it spills), as ptxas says."""
    from triton import knobs

    file = folder / "kernel.ptx"
    file.write_text(ptx)
    said = subprocess.run([knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(file), "-o",
                           str(folder / "kernel.cubin")], capture_output=True, text=True, check=True).stderr
    spilled = re.findall(r"(\d+) bytes spill", said)
    return int(re.findall(r"Used (\d+) registers", said)[0]), sum(map(int, spilled))


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="TRITON_INTERPRET is set: nothing is compiled")
@pytest.mark.parametrize("name", REGISTERS)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_compiles_for_an_h100(name, dtype, tmp_path, monkeypatch):
    """To a cubin that spills nothing, whose logits are moved 16 bytes at a time, and with one exponential a
    logit. (A kernel that waits for memory wants many threads: few registers.)"""
    from threed.tensor import loss_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = compiled(getattr(loss_kernel, name), ELEMENTS[dtype])
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    ptx, each = kernel.asm["ptx"], loss_kernel.BLOCK // loss_kernel.WARPS // 32  # logits of a thread
    registers, spilled = used(ptx, tmp_path)
    assert spilled == 0 and registers <= REGISTERS[name], f"{registers} registers, {spilled} bytes spilled"
    loads = each * (4 if dtype == "fp32" else 2) // 16
    moves = [len(re.findall(rf"{op}\.global\S*\.v4\.b32", ptx)) for op in ("ld", "st")]
    assert moves == [loads, loads if name == "gradient_kernel" else 0]
    assert ptx.count("ex2.approx") == each + (name == "statistics_kernel")  # and one of the base's change


def test_without_triton():
    """Nothing of triton is imported where the loss is not computed by kernels."""
    code = ("import sys, threed.tensor.context; from threed.tensor.fused import Fused; import torch; "
            "assert Fused(True).kernels(torch.device('cpu')) is None; "
            "assert Fused(False).kernels(torch.device('cuda')) is None; "
            "assert 'threed.tensor.loss_kernel' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Fused(True).kernels(torch.device("cuda")) is not None

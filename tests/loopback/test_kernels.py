"""Fused pieces compile for an H100, without one (tests/loopback/h100.py)."""

# pyright: reportMissingImports=false
# (triton is not among .venv's packages: make kernels)
from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from tests.harness import needs_triton
from tests.loopback import h100
from threed.models.layers.residual import moved_by_norm
from threed.spec.kernels import WIDEST

pytestmark = needs_triton
# Kernels in forward and in backward, as layers price them. (torch adds up what programs of a norm's backward
# leave by a kernel that is ready.)
NUMBERS = {"SwiGLU": (1, 1), "rotary": (1, 1), "rotary in documents": (1, 1), "dropout": (1, 1),
           "RMS norm": moved_by_norm("", 1, 2, True, "").kernels, "loss": (1, 1),
           # (torch adds up what the strips leave, too; of queries, keys and values each is a start of one)
           "GELU and its bias": (1, 1), "queries, keys, values": (0, 1), "bias and sum": (1, 1),
           "bias, sum, layer norm": (1, 1), "bias, dropout, sum, layer norm": (1, 1),
           **{f"the same, {width} wide": (1, 2) for width in h100.WIDE},
           "rows of a table": (0, 1)}
ONLY_BACKWARD = {name for name, (forward, _) in NUMBERS.items() if not forward}
WAITS = 48  # registers of a thread, up to which an SM has room for 40 warps or more, to wait for memory


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
def kernels(request) -> list[h100.Kernel]:
    """In a process of its own: what torch finds out about a machine, it remembers."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(h100.kernels, request.param).result()


def test_every_piece_is_as_few_kernels_as_its_price_says(kernels):
    """A body that falls apart moves more bytes than the plan counts, and holds what it does not know."""
    numbers = defaultdict(set)
    for kernel in kernels:
        numbers[kernel.piece, kernel.way].add(kernel.number)
    assert numbers.keys() == {(name, way) for name in NUMBERS for way in ("forward", "backward")
                              if way == "backward" or name not in ONLY_BACKWARD}
    for name, most in NUMBERS.items():
        assert len(numbers[name, "forward"]) <= most[0] and len(numbers[name, "backward"]) <= most[1], name


def test_no_kernel_spills(kernels):
    assert not [kernel for kernel in kernels if kernel.spilled]
    many = [kernel for kernel in kernels if kernel.registers > WAITS]
    # Their sums over tokens are kept in registers; and rows of several tokens, to have them sooner. Of the
    # widest tokens, all numbers are.
    with_sums = {"RMS norm", *NUMBERS} - {"SwiGLU", "rotary", "rotary in documents", "dropout", "loss"}
    allowed = {*((name, "backward") for name in with_sums), (f"the same, {WIDEST} wide", "forward")}
    assert {(kernel.piece, kernel.way) for kernel in many} <= allowed, many


def test_the_machine_is_itself_again():
    """Else a later test would compile for a GPU that is not there."""
    def known() -> list[object]:
        from torch._dynamo.device_interface import CudaInterface
        from torch._inductor import config, scheduler
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        return [CudaInterface.get_device_properties, CudaInterface.is_bf16_supported, scheduler.has_triton,
                driver._active, JITFunction.run, hasattr(torch._C, "_cuda_getCurrentRawStream"),
                config.use_static_cuda_launcher]

    before = known()
    with h100.an_h100():
        assert known() != before
    assert known() == before

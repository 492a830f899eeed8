"""Weight gradients of 16-bit products, added in fp32 without being rounded where the device can."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.harness import assert_contract, loopback, tiny
from threed.tensor import products
from threed.tensor.products import add_product, adds_to

CPU = torch.device("cpu")
WIDE = torch.float32


@pytest.fixture
def of_a_gpu(monkeypatch):
    """The operations that torch has on CUDA alone, on the CPU. Counts their calls."""
    calls: Counter[str] = Counter()

    def addmm(sum_, left, right, dtype, *, out):
        calls["addmm"] += 1
        return out.copy_(sum_ + left.to(dtype) @ right.to(dtype))

    def mm(left, right, dtype, *, out):
        calls["mm"] += 1
        return out.copy_(left.to(dtype) @ right.to(dtype))

    monkeypatch.setattr(torch.ops.aten.addmm, "dtype_out", addmm)
    monkeypatch.setattr(torch.ops.aten.mm, "dtype_out", mm)
    adds_to.cache_clear()
    yield calls
    adds_to.cache_clear()


def test_what_a_cpu_can():
    adds_to.cache_clear()
    assert adds_to(WIDE, WIDE, CPU) and adds_to(torch.bfloat16, torch.bfloat16, CPU)
    assert not adds_to(WIDE, torch.bfloat16, CPU) and not adds_to(torch.bfloat16, WIDE, CPU)


def test_an_operation_that_rounds_is_not_used(monkeypatch):
    """A version of torch whose operation exists, and rounds first."""
    def rounds(into, written, left, right):
        product = (left @ right).to(torch.bfloat16)
        into.copy_((into + product).to(torch.bfloat16) if written else product)

    monkeypatch.setattr(products, "add_product", rounds)
    adds_to.cache_clear()
    assert not adds_to(WIDE, torch.bfloat16, CPU)
    adds_to.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_nothing_is_rounded(dtype, of_a_gpu):
    assert adds_to(WIDE, dtype, CPU)
    left, right = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
                   for shape in ((5, 64), (64, 7)))
    into = torch.full((5, 7), torch.nan)
    add_product(into, False, left, right)
    add_product(into, True, left, right)
    torch.testing.assert_close(into, 2 * left.float() @ right.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("others", [
    [], ["parallel.pp=2", "parallel.schedule=zb-h1"], ["zero.stage=3", "parallel.dp=2"],
    ["parallel.tp=2", "parallel.sequence_parallel=true"]])
def test_runs(others, references, of_a_gpu):
    """Nearer to a reference in fp32 than with rounded products, and within the contract of 16 bits."""
    config = tiny("precision.dtype=bf16", "train.global_batch_size=8", *others)
    assert_contract(config, references)
    assert of_a_gpu.total() > 100


def test_nearer(of_a_gpu):
    """Of many micro-batches: what is rounded before it is added loses bits each time."""
    settings = ["train.global_batch_size=32", "model.layers=2"]
    exact = loopback(tiny(*settings), 1).first_grads
    config = tiny(*settings, "precision.dtype=bf16")
    wide = loopback(config, 1).first_grads

    def error(grads: dict[str, torch.Tensor]) -> float:
        return sum((grads[name] - want).square().sum().item() for name, want in exact.items()
                   if want.dim() > 1)

    near, calls = error(wide), of_a_gpu["addmm"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("threed.zero.state.adds_to", lambda *_: False)
        far = error(loopback(config, 1).first_grads)
    assert of_a_gpu["addmm"] == calls and near < far

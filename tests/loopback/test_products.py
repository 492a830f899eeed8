"""Weight gradients of 16-bit products, added in fp32 without being rounded where the device can."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.harness import assert_contract, loopback, tiny
from threed.tensor import products
from threed.tensor.products import Way, add_product, way_of

CPU = torch.device("cpu")
WIDE = torch.float32


@pytest.fixture(autouse=True)
def asked_anew():
    """Which way a product goes."""
    way_of.cache_clear()
    yield
    way_of.cache_clear()


@pytest.fixture
def of_a_gpu(monkeypatch):
    """The operations that torch has on CUDA alone, on the CPU. Counts their calls."""
    calls: Counter[str] = Counter()

    def addmm(sum_, left, right, dtype, *, out):
        calls["addmm"] += 1
        return out.copy_(sum_ + left.to(dtype) @ right.to(dtype))

    def mm(left, right, dtype):
        calls["mm"] += 1
        return left.to(dtype) @ right.to(dtype)

    monkeypatch.setattr(torch.ops.aten.addmm, "dtype_out", addmm)
    monkeypatch.setattr(torch.ops.aten.mm, "dtype", mm)
    monkeypatch.setattr(torch.ops.aten.mm, "dtype_out",
                        lambda left, right, dtype, *, out: out.copy_(mm(left, right, dtype)))
    return calls


@pytest.fixture
def of_an_older_torch(of_a_gpu, monkeypatch):
    """2.8 and 2.9 add a product of 16-bit matrices to a sum of 16 bits alone."""
    def addmm(sum_, left, right, dtype, *, out):
        assert sum_.dtype == dtype and left.dtype != dtype
        raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")

    monkeypatch.setattr(torch.ops.aten.addmm, "dtype_out", addmm)
    return of_a_gpu


def test_what_a_cpu_can():
    assert way_of(WIDE, WIDE, CPU) is way_of(torch.bfloat16, torch.bfloat16, CPU) is Way.IN_PLACE
    assert way_of(WIDE, torch.bfloat16, CPU) is way_of(torch.bfloat16, WIDE, CPU) is Way.ROUNDED


def test_an_operation_that_rounds_is_not_used(monkeypatch):
    """A version of torch whose operation exists, and rounds first."""
    def rounds(way, into, written, left, right):
        product = (left @ right).to(torch.bfloat16)
        into.copy_((into + product).to(torch.bfloat16) if written else product)

    monkeypatch.setattr(products, "_add", rounds)
    assert way_of(WIDE, torch.bfloat16, CPU) is Way.ROUNDED


def nothing_is_rounded(dtype: torch.dtype) -> None:
    left, right = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
                   for shape in ((5, 64), (64, 7)))
    into = torch.full((5, 7), torch.nan)
    add_product(into, False, left, right)
    add_product(into, True, left, right)
    torch.testing.assert_close(into, 2 * left.float() @ right.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_nothing_is_rounded(dtype, of_a_gpu):
    assert way_of(WIDE, dtype, CPU) is Way.IN_PLACE
    nothing_is_rounded(dtype)


@pytest.mark.parametrize("piece", [1, 7, 14, 20, 1 << 24])
def test_an_older_torch_rounds_nothing(piece, of_an_older_torch, monkeypatch):
    """And makes no more of a product at a time than it may."""
    monkeypatch.setattr(products, "PIECE", piece)
    assert way_of(WIDE, torch.bfloat16, CPU) is Way.APART
    of_an_older_torch.clear()
    nothing_is_rounded(torch.bfloat16)
    assert of_an_older_torch == {"mm": 1 + -(-5 // max(1, piece // 7))}


def test_a_run_with_an_older_torch(references, of_an_older_torch):
    assert_contract(tiny("precision.dtype=bf16", "zero.stage=3", "parallel.dp=2"), references)
    assert of_an_older_torch["mm"] > 100


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
        patch.setattr(products, "way_of", lambda *_: Way.ROUNDED)
        far = error(loopback(config, 1).first_grads)
    assert of_a_gpu["addmm"] == calls and near < far

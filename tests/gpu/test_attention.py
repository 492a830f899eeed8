"""What a GPU computes attention and fused pieces with, and that it is the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.harness import tiny
from threed.engine.device import attention, compiles
from threed.tensor.documents import Documents, attend, outside, varlen_call
from threed.tensor.fused import Fused
from threed.tensor.pieces import DropOf, Normed, Separate, Statistics

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
pytestmark = pytest.mark.gpu
kernels = pytest.mark.skipif(not GPU or torch.version.cuda is None, reason="no kernels for a GPU")
LARGE = ("model.heads=8", "model.hidden=1024", "model.seq_len=1024", "precision.dtype=bf16")


def near(got: torch.Tensor, want: torch.Tensor, most: float) -> None:
    """Whether their difference is at most this part of what is wanted."""
    distance = (got.float() - want.float()).norm() / want.float().norm()
    assert distance <= most, f"differs by {distance:.2e} of its size"


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("one_kernel", [False, True])
def test_documents_are_as_under_a_mask(kv_heads, one_kernel):
    """Forward and backward, in bf16, of documents of many lengths, one of them of a single token."""
    if one_kernel and varlen_call(DEVICE, torch.bfloat16, 64, kv_heads < 8) is None:
        pytest.skip("torch has no attention for sequences of varying length here that computes the same")
    sizes = [1, 100, 101, 54]
    positions = torch.cat([torch.arange(size) for size in sizes]).view(1, -1)
    documents, length = Documents.of(positions), sum(sizes)
    q, k, v = (torch.randn(1, heads, length, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
               for heads in (8, kv_heads, kv_heads))
    grad = torch.randn(1, 8, length, 64, device=DEVICE, dtype=torch.bfloat16)
    got = attend(q, k, v, documents, one_kernel)
    wide = [each.detach().double().requires_grad_() for each in (q, k, v)]
    at = torch.arange(length, device=DEVICE)
    future = torch.ones(length, length, dtype=torch.bool, device=DEVICE).triu(1)
    mask = ~(outside(positions.to(DEVICE), at, length) | future)
    want = F.scaled_dot_product_attention(*wide, attn_mask=mask, enable_gqa=kv_heads < 8)
    near(got, want, 0.01)
    for one, other in zip(torch.autograd.grad(got, (q, k, v), grad),
                          torch.autograd.grad(want, wide, grad.double()), strict=True):
        near(one, other, 0.02)


@kernels
@pytest.mark.parametrize("settings", [["run.deterministic=true"], ["data.document_mask=true"]], ids=str)
def test_backends_that_a_run_must_not_take(settings):
    """Those that add with atomics, and those that prepare for each length. (In a process of its own: the
    choice holds for a whole process.)"""
    code = f"""
import torch
from tests.harness import tiny
from threed.engine.device import attention, set_up
config = tiny(*{[*LARGE, *settings]!r})
set_up(config)
print(attention(config, torch.device("cuda")))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True,
                          text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] in ("flash", "varlen"), done.stdout


@kernels
def test_a_fused_kernel_is_there():
    assert attention(tiny(*LARGE), DEVICE) in ("flash", "cudnn")


@pytest.fixture
def compiler():
    """Pieces are compiled for this device."""
    if not compiles(tiny("model.fused=auto"), DEVICE):
        pytest.skip("no compiler is found for this device")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_pieces_are_as_the_plain_ones(dtype):
    angles = torch.outer(torch.arange(64.0), torch.rand(32)).repeat(1, 2).to(DEVICE)
    weight = torch.rand(256, device=DEVICE, dtype=dtype)
    samples, rows = torch.tensor([5, 6], device=DEVICE), ((range(7, 71),),)
    pieces = {
        "swiglu": ((64, 2, 256), lambda fused, x: fused.swiglu(x)),
        "rotate": ((2, 4, 64, 64), lambda fused, x: fused.rotate(x, angles.cos().to(dtype),
                                                                 angles.sin().to(dtype))),
        "drop": ((64, 2, 256), lambda fused, x: fused.drop(x, 0.25, (3, "here"), samples, rows)),
        "rms_norm": ((64, 2, 256), lambda fused, x: fused.rms_norm(x, weight, 1e-5)),
    }
    for shape, piece in pieces.values():
        x = torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True)
        results = []
        for fused in (Fused(compile=True), Fused()):
            y = piece(fused, x)
            results.append((y, *torch.autograd.grad(y, x, torch.ones_like(y))))
        for got, want in zip(*results, strict=True):
            near(got, want, 1e-5 if dtype == torch.float32 else 0.01)


@kernels
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("width", [1024, 5120, 12288])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pieces_with_sums_are_as_separate_operations(dtype, width):
    """Those of models with biases and layer norms, of narrow tokens and of wide ones."""

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=DEVICE, dtype=dtype)

    kernels, tokens = Fused(compile=True).sums(DEVICE), (70, 2)
    x, part, grad, of_normed = (drawn(*tokens, width) for _ in range(4))
    drop = DropOf(0.25, (3, "here"), torch.tensor([5, 6], device=DEVICE), ((range(7, 77),),))
    bias, norm = drawn(width), Normed(drawn(width), drawn(width), 1e-5)
    heads = [drawn(2, width // 64, 70, 64).permute(2, 0, 1, 3).unflatten(2, (-1, 1)) for _ in range(3)]
    ids, table = torch.randint(50, tokens, device=DEVICE), drawn(40, width).float()
    stream, *normed = kernels.ended(x, part, bias, drop, norm)
    kept = Statistics(stream, *normed[1:])
    results = []
    for by, wide in ((kernels, lambda each: each), (Separate, lambda each: each.double())):
        into = wide(table.clone())
        by.add_rows(into, ids, wide(grad))
        far = Normed(wide(norm.weight), wide(norm.shift), norm.eps)
        # the norm is of the stream as it was stored
        sums = by.ended(wide(x), wide(part), wide(bias), drop, None)[:1]
        normed = by.ended(wide(stream), None, None, None, far)[1:]
        results.append((
            by.gelu(wide(x)), *by.gelu_backward(wide(x), wide(grad), True),
            *by.joined([wide(each) for each in heads], True), *sums, *normed, into,
            *by.ended_backward(wide(grad), wide(of_normed), Statistics(*map(wide, kept)), far, drop,
                               (True, True))))
    for got, want in zip(*results, strict=True):
        near(got, want, 1e-5 if dtype == torch.float32 else 0.01)

"""The compiled AdamW: against its formula in double precision, torch's conversions, and itself in other
pieces."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from threed.optim import native
from threed.optim import step as optimizer
from threed.optim.base import Update, View
from threed.schema import OptimizerConfig

pytestmark = pytest.mark.core

NARROW = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.skipif(native.ADAMW is None and shutil.which("cc") is None,
                                reason="no C compiler: nothing was compiled")


def test_it_was_compiled():
    assert native.ADAMW is not None, native.MISSING


def view(weight: torch.Tensor, grad: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> View:
    return View(weight, grad, {"exp_avg": first, "exp_avg_sq": second})


def tensors(numel: int, grad_dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Weights, gradients, both moments."""
    generator = torch.Generator().manual_seed(0)
    weight, grad, first, second = (torch.randn(numel, generator=generator) for _ in range(4))
    return [weight, grad.to(grad_dtype), first, second.square() * 1e-3]


def update(scale: float = 1.0, decay: bool = True, lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.95),
           number: int = 3) -> Update:
    config = OptimizerConfig(name="adamw", weight_decay=0.1, eps=1e-6, betas=list(betas))
    return Update(config, lr, number, decay, scale)


@pytest.mark.parametrize(("grad_dtype", "copy_dtype", "decay", "scale"), [*itertools.product(
    NARROW, [None, *NARROW], [True, False], [1.0, 0.37])])
def test_its_formula(grad_dtype, copy_dtype, decay, scale):
    """On a slice of 5000 unaligned elements, not a multiple of a block; the elements beside it are
    unchanged."""
    stepped = weight, grad, first, second = tensors(6001, grad_dtype)
    copy = torch.full((6001,), 7.0, dtype=copy_dtype) if copy_dtype is not None else None
    everything = [*stepped, *([copy] if copy is not None else [])]
    before = [tensor.clone() for tensor in everything]
    piece = slice(501, 5501)
    optimizer.step(update(scale, decay), view(*(tensor[piece] for tensor in stepped)),
                   copy[piece] if copy is not None else None)
    for tensor, old in zip(everything, before, strict=True):
        assert torch.equal(tensor[:501], old[:501]) and torch.equal(tensor[5501:], old[5501:])
    w, g, m, v = (tensor[piece].double() for tensor in before[:4])
    g = g * scale
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    w = w * (1 - 0.1 * 0.1 if decay else 1.0) - 0.1 * (m / (1 - 0.9**3)) / ((v / (1 - 0.95**3)).sqrt() + 1e-6)
    for tensor, wanted in ((first, m), (second, v), (weight, w)):
        torch.testing.assert_close(tensor[piece].double(), wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(grad, before[1])
    if copy is not None:
        assert torch.equal(copy[piece], weight[piece].to(copy_dtype))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal values; NaN equals NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one[~one.isnan()], other[~other.isnan()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_gradient(dtype):
    """All 65,536, as torch widens them: with beta1=0 the first moment is the gradient."""
    grad = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    zeros = [torch.zeros(len(grad)) for _ in range(3)]
    optimizer.step(update(betas=(0.0, 0.5)), view(zeros[0], grad, *zeros[1:]))
    assert same(zeros[1], grad.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_are_rounded_as_torch_does(dtype):
    """A million floats of any bits, all that lie between or on 16-bit numbers near their limits; with lr=0
    weights stay."""
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(1 << 31), 1 << 31, (1 << 20,),
                             generator=generator).to(torch.int32).view(torch.float32)
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).float()
    middle = (numbers.double() + numbers.roll(1).double()).div(2).float()  # ties
    above, below = (torch.nextafter(middle, torch.tensor(way)) for way in (torch.inf, -torch.inf))
    limits = torch.tensor([65519.99, 65520.0, -65520.0, 2**-25, 2**-24 * 1.5])
    weight = torch.cat([anything, numbers, middle, above, below, limits])
    before, copy = weight.clone(), torch.empty(len(weight), dtype=dtype)
    zeros = [torch.zeros(len(weight)) for _ in range(3)]
    optimizer.step(update(lr=0.0), view(weight, *zeros), copy)
    assert same(weight, before)
    assert same(copy.float(), before.to(dtype).float())


def test_pieces_and_threads_give_the_same_bits():
    """What ranks share out, and in which threads, is not seen in the numbers."""
    def in_thread(edges: list[int], threads: int) -> list[torch.Tensor]:
        """In a thread of its own: OpenMP's others belong to it, and would be missing in what later tests
        fork."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run, edges, threads).result()

    def run(edges: list[int], threads: int) -> list[torch.Tensor]:
        made = weight, _, first, second = tensors(400_001, torch.bfloat16)
        copy = torch.empty(len(weight), dtype=torch.bfloat16)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            for piece in itertools.starmap(slice, itertools.pairwise(edges)):
                optimizer.step(update(0.5), view(*(tensor[piece] for tensor in made)), copy[piece])
        finally:
            torch.set_num_threads(before)
        return [weight, first, second, copy]

    whole = in_thread([0, 400_001], 1)
    for edges, threads in (([0, 400_001], 3), ([0, 1, 7, 33_000, 33_000, 399_999, 400_001], 1),
                           ([0, 140_003, 400_001], 2)):
        pieces = in_thread(edges, threads)
        assert all(torch.equal(one, other) for one, other in zip(whole, pieces, strict=True))


def test_it_is_torchs_to_rounding(monkeypatch):
    compiled, plain = tensors(10_000), tensors(10_000)
    optimizer.step(update(0.5), view(*compiled))
    monkeypatch.setattr(native, "ADAMW", None)
    optimizer.step(update(0.5), view(*plain))
    torch.testing.assert_close(compiled[0], plain[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(compiled[3], plain[3], rtol=1e-6, atol=1e-9)


def test_why_there_is_none(monkeypatch, tmp_path: Path):
    """No compiler; a library that does not load, or that was built from an older native.c."""
    def load(path: Path | None):
        spec = None
        if path is not None:
            spec = importlib.machinery.ModuleSpec("threed._native", None, origin=str(path))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        return native._load()

    assert load(None) == (None, None, "threed was installed where there was no C compiler with OpenMP")
    (tmp_path / "text.so").write_text("no library")
    *functions, why = load(tmp_path / "text.so")
    assert functions == [None, None] and why == f"{tmp_path / 'text.so'}: file too short"
    monkeypatch.undo()
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    *functions, why = native._load()
    assert functions == [None, None] and "is of another version of threed" in why

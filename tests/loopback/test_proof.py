"""The checksum of a whole tensor: the same however it is cut, another for any wrong element."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from threed.base.hashing import splitmix64
from threed.checkpoint.proof import MASK, checksum
from threed.features.zero.boxes import Box, rectangles
from threed.optim import native

pytestmark = pytest.mark.core


def slowly(values: np.ndarray) -> int:
    """The formula, an element at a time."""
    elements = values.view(np.uint32).ravel().tolist()
    return sum((bits + 1) * (splitmix64(index) | 1) for index, bits in enumerate(elements)) & MASK


def parts(tensor: torch.Tensor, cut: int, count: int, flats: int):
    """(box, values) of a tensor that is cut on a dim, each part then as a flat array into ranges."""
    for index, part in enumerate(tensor.chunk(count, cut)):
        ends = sorted({0, part.numel(), *(random.randrange(part.numel()) for _ in range(flats))})
        flat = part.contiguous().view(-1)
        for start, stop in zip(ends, ends[1:], strict=False):
            at = start
            for offset, shape in rectangles(tuple(part.shape), start, stop):
                moved = tuple(first + (index * (tensor.shape[cut] // count) if dim == cut else 0)
                              for dim, first in enumerate(offset))
                size = int(np.prod(shape))
                yield Box("w", moved, shape, tuple(tensor.shape), at, ()), flat[at:at + size]
                at += size


@pytest.fixture(params=["compiled", "numpy"])
def either(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(native, "SUM", None)
    elif native.SUM is None:
        pytest.skip("no C compiler: nothing was compiled")


@pytest.mark.parametrize("shape", [(7,), (1,), (6, 10), (3, 4, 6), (2, 3, 4, 5), (1, 9), (8, 1)])
def test_however_it_is_cut(shape, either):
    """On every dim, and each part in flat ranges, as ranks own them."""
    random.seed(str(shape))
    tensor = torch.randn(shape)
    want = slowly(tensor.numpy())
    for cut, size in enumerate(shape):
        for count in (n for n in range(1, size + 1) if size % n == 0):
            total = sum(checksum(values, box) for box, values in parts(tensor, cut, count, 3))
            assert total & MASK == want, (cut, count)


def test_any_single_bit(either):
    """Of any element; also two elements that change places."""
    tensor = torch.randn(4, 5)
    box = Box("w", (0, 0), (4, 5), (4, 5), 0, ())
    want = checksum(tensor.view(-1), box)
    for place in range(20):
        for bit in range(32):
            wrong = tensor.view(-1).clone().numpy()
            wrong.view(np.uint32)[place] ^= np.uint32(1 << bit)
            assert checksum(torch.from_numpy(wrong), box) != want
    assert checksum(tensor.flip(0).contiguous().view(-1), box) != want
    zeros, beside = torch.zeros(20), Box("w", (1, 0), (4, 5), (5, 5), 0, ())
    assert checksum(zeros, box) != checksum(zeros, beside)


@pytest.mark.parametrize("chunk", [3, 7, 16, 1 << 20])
def test_narrow_values_are_widened(chunk, either, monkeypatch):
    """16-bit weights are summed as the fp32 values that a checkpoint holds, a piece at a time."""
    monkeypatch.setattr("threed.checkpoint.proof._CHUNK", chunk)
    tensor = torch.randn(6, 10).bfloat16()
    box = Box("w", (2, 10), (6, 10), (8, 30), 0, ())
    assert checksum(tensor.view(-1), box) == checksum(tensor.float().view(-1), box)

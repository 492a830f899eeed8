"""The norm of a gradient, as CLIP sums it up."""

from __future__ import annotations

import math

import pytest
import torch

from threed.features.zero.clip import Clipped, Limits
from threed.features.zero.part import BLOCK, squared_norm

pytestmark = pytest.mark.core


@pytest.fixture
def careless(monkeypatch):
    """A library of products that leaves its result as it was where there is nothing to add up."""
    dot = torch.Tensor.dot

    def product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return dot(one, other) if len(one) else torch.tensor(torch.nan, dtype=one.dtype)

    monkeypatch.setattr(torch.Tensor, "dot", product)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_any_length(size, dtype, careless):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    got = squared_norm(values)
    assert got.dtype == torch.float64 and got.dim() == 0
    torch.testing.assert_close(got, values.double().square().sum(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("value, place", [
    (torch.inf, 0), (torch.nan, BLOCK), (1e20, 3), (torch.inf, 2 * BLOCK + 3), (torch.nan, 2 * BLOCK)])
def test_what_is_not_finite_is_seen(value, place):
    values = torch.ones(2 * BLOCK + 9)
    values[place] = value
    assert not torch.isfinite(squared_norm(values))


def test_its_root_is_the_nearest_number():
    # torch's square root in fp64 is one bit off for one number of a hundred, on some CPUs
    for squared in torch.rand(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64):
        sums = torch.zeros(8, dtype=torch.float64)
        sums[0], sums[2] = squared, 1
        assert Clipped(sums, Limits(1, 1.0, 0.0, False)).grad_norm == math.sqrt(squared)


@pytest.mark.parametrize("squared", [torch.inf, torch.nan, -1.0])
def test_no_norm_is_no_step(squared):
    sums = torch.tensor([squared, 0, 1, 0, 0, 0, 0, 0], dtype=torch.float64)
    assert not Clipped(sums, Limits(1, 1.0, 1.0, False)).finite

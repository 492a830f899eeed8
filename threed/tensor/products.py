"""Products of matrices that are added to a sum without being rounded to the dtype of the matrices first."""

from __future__ import annotations

from enum import Enum
from functools import cache

import torch

PIECE = 1 << 24  # elements of a product that are made at a time, where it is added afterwards


class Way(Enum):
    """How the product of two matrices gets into a sum."""

    IN_PLACE = "by one kernel, which adds: without a tensor in between"
    APART = "a piece at a time as a tensor in the sum's dtype, which is added"  # torch 2.8 and 2.9, on a GPU
    ROUNDED = "as a tensor in the matrices' dtype, which is added"  # 16-bit matrices on a CPU


def add_product(into: torch.Tensor, written: bool, left: torch.Tensor, right: torch.Tensor) -> None:
    """into += left @ right, or = where nothing is written yet."""
    way = way_of(into.dtype, left.dtype, left.device)
    if way is Way.ROUNDED:
        product = left @ right
        into.add_(product) if written else into.copy_(product)
    else:
        _add(way, into, written, left, right)


def _add(way: Way, into: torch.Tensor, written: bool, left: torch.Tensor, right: torch.Tensor) -> None:
    if left.dtype == into.dtype:
        into.addmm_(left, right) if written else torch.mm(left, right, out=into)
    elif not written:
        torch.ops.aten.mm.dtype_out(left, right, into.dtype, out=into)
    elif way is Way.IN_PLACE:
        torch.ops.aten.addmm.dtype_out(into, left, right, into.dtype, out=into)
    else:
        rows = max(1, PIECE // right.shape[1])
        for start in range(0, len(left), rows):
            part = slice(start, start + rows)
            into[part].add_(torch.ops.aten.mm.dtype(left[part], right, into.dtype))


@cache
def way_of(dtype: torch.dtype, of: torch.dtype, device: torch.device) -> Way:
    """How a sum of `dtype` gets the product of matrices of dtype `of`. For 16-bit matrices and sums in fp32
    that depends on the device and on the version of torch: each way is tried once."""
    if dtype == of:
        return Way.IN_PLACE
    for way in (Way.IN_PLACE, Way.APART):
        if _is_exact(way, dtype, of, device):
            return way
    return Way.ROUNDED


def _is_exact(way: Way, dtype: torch.dtype, of: torch.dtype, device: torch.device) -> bool:
    ones, into = torch.ones(16, 16, dtype=of, device=device), torch.empty(16, 16, dtype=dtype, device=device)
    try:
        _add(way, into, False, ones, ones)  # 16
        _add(way, into, True, ones, ones * 2.0**-10)
    except (AttributeError, RuntimeError):  # no such operation; none for this device, or not for these dtypes
        return False
    return bool((into == 16 + 2.0**-6).all())  # which 16 bits cannot hold

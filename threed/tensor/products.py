"""Products of matrices that are added to a sum without an intermediate tensor, which would be rounded."""

from __future__ import annotations

from functools import cache

import torch


def add_product(into: torch.Tensor, written: bool, left: torch.Tensor, right: torch.Tensor) -> None:
    """into += left @ right, or = where nothing is written yet. See `adds_to`."""
    if left.dtype == into.dtype:
        into.addmm_(left, right) if written else torch.mm(left, right, out=into)
    elif written:
        torch.ops.aten.addmm.dtype_out(into, left, right, into.dtype, out=into)
    else:
        torch.ops.aten.mm.dtype_out(left, right, into.dtype, out=into)


@cache
def adds_to(dtype: torch.dtype, of: torch.dtype, device: torch.device) -> bool:
    """Whether `add_product` can add to a sum of `dtype` the product of matrices of dtype `of`: where they are
    the same, and on a GPU for 16-bit matrices and sums in fp32. That is tried once, since versions of torch
    differ."""
    if dtype == of:
        return True
    ones, into = torch.ones(16, 16, dtype=of, device=device), torch.empty(16, 16, dtype=dtype, device=device)
    try:
        add_product(into, False, ones, ones)  # 16
        add_product(into, True, ones, ones * 2.0**-10)
    except (AttributeError, RuntimeError):  # no such operation; none for this device, or not for these dtypes
        return False
    return bool((into == 16 + 2.0**-6).all())  # which 16 bits cannot hold

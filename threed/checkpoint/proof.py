"""Proof: that a checkpoint holds what was saved: a checksum of each whole tensor, which does not depend on
how ranks cut it.

    S(T) = sum over elements i of (bits(T[i]) + 1) * w(i)  mod 2^64,   w(i) = splitmix64(i) | 1

`i` is the element's flat index in the whole tensor, `bits` its fp32 bits. S of a tensor is the sum of S of
its boxes, so ranks that write it and ranks that load it on another mesh get the same number. One wrong
element always changes S, since w is odd; several wrong elements leave S unchanged with a probability of about
2^-64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from threed.base.hashing import splitmix64
from threed.features.zero.boxes import Box
from threed.optim import native

MASK = 2**64 - 1
_CHUNK = 1 << 20  # elements that are brought to the host, or summed by numpy, at a time


def checksum(values: torch.Tensor, box: Box) -> int:
    """S of the elements of a box; `values` is flat, on any device, of fp32 or narrower."""
    rows, columns, starts, stride = _lines(box)
    size = rows * columns
    total = 0
    for block, first in enumerate(starts):
        part = values[block * size:(block + 1) * size]
        if part.dtype == torch.float32 and part.device.type == "cpu":
            total += _sum(part, rows, columns, first, stride)
        else:
            total += _narrow(part, columns, first, stride)
    return total & MASK


def _narrow(values: torch.Tensor, columns: int, first: int, stride: int) -> int:
    """S of a block that is not fp32 on the host, a piece at a time through fp32 on the host. A piece is some
    whole rows, or a part of one row."""
    total, width = 0, min(columns, _CHUNK)
    for column in range(0, columns, width):
        rows = max(1, _CHUNK // columns) if width == columns else 1
        for row in range(0, len(values) // columns, rows):
            start = row * columns + column
            count = rows * columns if width == columns else min(width, columns - column)
            piece = values[start:start + count].detach().float().cpu()
            wide = min(width, len(piece))
            total += _sum(piece, len(piece) // wide, wide, first + row * stride + column, stride)
    return total


def _lines(box: Box) -> tuple[int, int, Iterator[int], int]:
    """A box as blocks of rows x columns elements: rows, columns, the flat index at which each block begins,
    and the distance between rows. Trailing dims that are not cut are part of the columns."""
    shape, whole, offset = list(box.shape), list(box.whole), list(box.offset)
    strides = [math.prod(whole[dim + 1:]) for dim in range(len(whole))]
    dim = len(shape) - 1
    while dim > 0 and shape[dim] == whole[dim]:
        dim -= 1
    columns = math.prod(shape[dim:])
    if dim == 0:
        return 1, columns, iter([offset[0] * strides[0]]), 0
    begin = sum(at * stride for at, stride in zip(offset, strides, strict=True))
    outer = shape[:dim - 1]
    starts = (begin + sum(at * stride for at, stride in zip(index, strides, strict=False))
              for index in np.ndindex(*outer))
    return shape[dim - 1], columns, starts, strides[dim - 1]


def _sum(values: torch.Tensor, rows: int, columns: int, first: int, stride: int) -> int:
    if native.SUM is not None:
        return native.SUM(values.data_ptr(), rows, columns, first, stride)
    bits = values.detach().numpy().view(np.uint32)
    total = 0
    for start in range(0, len(bits), _CHUNK):
        piece = bits[start:start + _CHUNK].astype(np.uint64)
        row, column = np.divmod(np.arange(start, start + len(piece), dtype=np.uint64), np.uint64(columns))
        index = np.uint64(first) + row * np.uint64(stride) + column
        with np.errstate(over="ignore"):
            total += int(((piece + np.uint64(1)) * (splitmix64(index) | np.uint64(1))).sum(dtype=np.uint64))
    return total

# pyright: reportMissingImports=false, reportIndexIssue=false
"""The kernels of `pieces`, in Triton: each reads and writes every tensor once, and adds up columns
on the way.

What is summed over tokens is summed in fp32, in strips: a program adds up the tokens of a strip in registers
and writes one row of numbers. Strips are as many on every card, so that the order of the sums is, too. Where
tokens are wide, a program has some of their columns, and what a norm's backward needs of whole tokens is
computed before.

Only `Fused.sums` imports this module: the package triton comes with torch for GPUs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _gelu(x):
    """x Phi(x) in its tanh form, which is x sigmoid(2 u); and that sigmoid, and the derivative of 2 u."""
    square = x * x
    twice = 1.5957691216057308 * x * (1.0 + 0.044715 * square)
    opened = 1.0 / (1.0 + tl.exp(-twice))
    return opened, 1.5957691216057308 * (1.0 + 0.134145 * square)


@triton.jit
def gelu_kernel(x, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    opened, _ = _gelu(values)
    tl.store(out + at, values * opened, mask=at < size)


@triton.jit
def gelu_backward_kernel(x, grad, out, sums, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                         SUMS: tl.constexpr):
    """A program for each strip of tokens and each COLUMNS columns."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    strip = tl.cdiv(tl.cdiv(rows, tl.num_programs(0)), ROWS) * ROWS
    first = tl.program_id(0) * strip
    added = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, tl.minimum(first + strip, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * width + columns[None, :]
        here = (row[:, None] < rows) & (columns[None, :] < width)
        values = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        opened, slope = _gelu(values)
        made = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
        made *= opened + values * opened * (1.0 - opened) * slope
        tl.store(out + at, made, mask=here)
        added += made
    if SUMS:
        tl.store(sums + tl.program_id(0) * width + columns, tl.sum(added, 0), mask=columns < width)


@triton.jit
def copy_kernel(grad, out, sums, rows, batch, of_place, of_sequence, of_head, group, out_row, out_group,
                sums_row, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COPIES: tl.constexpr,
                SUMS: tl.constexpr):
    """A program for each strip of a head's SIZE columns. Row r of `grad` is of place r // batch of sequence
    r % batch. `group`: heads that lie beside each other in `out`, where groups are `out_group` apart."""
    head, columns = tl.program_id(1), tl.arange(0, COLUMNS)
    strip = tl.cdiv(tl.cdiv(rows, tl.num_programs(0)), ROWS) * ROWS
    first = tl.program_id(0) * strip
    grad += head.to(tl.int64) * of_head
    place = (head // group) * out_group + (head % group) * SIZE + columns
    added = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, tl.minimum(first + strip, rows), ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        here = (row[:, None] < rows) & (columns[None, :] < SIZE)
        at = (row // batch) * of_place + (row % batch) * of_sequence
        values = tl.load(grad + at[:, None] + columns[None, :], mask=here, other=0.0)
        if COPIES:
            tl.store(out + row[:, None] * out_row + place[None, :], values, mask=here)
        added += values.to(tl.float32)
    if SUMS:
        tl.store(sums + tl.program_id(0) * sums_row + place, tl.sum(added, 0), mask=columns < SIZE)


@triton.jit
def _keeps(base, columns, least):
    """Which numbers of a token dropout keeps, as tensor/random.mask_of."""
    x = (base + columns).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return ((x ^ (x >> 31)) >> 11 & 0xFFFFFF) >= least


@triton.jit
def ended_kernel(x, part, bias, bases, weight, shift, stream, normed, mean, scale, width, eps, least, rest,
                 BLOCK: tl.constexpr, PART: tl.constexpr, BIAS: tl.constexpr, DROP: tl.constexpr,
                 NORM: tl.constexpr):
    """A program for each token: the sum, and its norm, of the numbers as they are stored. `least`, `rest`: of
    dropout, the least hash that is kept and 1 - probability."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here, at = columns < width, row * width + columns
    values = tl.load(x + at, mask=here, other=0.0)
    if PART:
        added = tl.load(part + at, mask=here, other=0.0).to(tl.float32)
        if BIAS:
            added += tl.load(bias + columns, mask=here, other=0.0).to(tl.float32)
        if DROP:
            added = tl.where(_keeps(tl.load(bases + row), columns, least), added / rest, 0.0)
        values = (values.to(tl.float32) + added).to(values.dtype)
        tl.store(stream + at, values, mask=here)
    if NORM:
        wide = values.to(tl.float32)
        center = tl.sum(wide, 0) / width
        wide = tl.where(here, wide - center, 0.0)
        slope = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
        wide *= slope * tl.load(weight + columns, mask=here, other=0.0).to(tl.float32)
        wide += tl.load(shift + columns, mask=here, other=0.0).to(tl.float32)
        tl.store(normed + at, wide, mask=here)
        tl.store(mean + row, center)
        tl.store(scale + row, slope)


@triton.jit
def ended_backward_kernel(grad, of_normed, stream, mean, scale, weight, bases, grad_x, grad_part, sums, rows,
                          width, least, rest, BLOCK: tl.constexpr, GRAD: tl.constexpr, NORM: tl.constexpr,
                          DROP: tl.constexpr, BIAS: tl.constexpr, LEARNS: tl.constexpr):
    """A program for each strip of tokens. `sums`: of the norm's weight, of its shift, and of the bias."""
    columns = tl.arange(0, BLOCK)
    here, strip = columns < width, tl.cdiv(rows, tl.num_programs(0))
    first = tl.program_id(0) * strip
    of_weight, of_shift = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    of_bias = tl.zeros([BLOCK], tl.float32)
    if NORM:
        weights = tl.load(weight + columns, mask=here, other=0.0).to(tl.float32)
    for row in range(first, tl.minimum(first + strip, rows)):
        at = tl.cast(row, tl.int64) * width + columns
        made = tl.zeros([BLOCK], tl.float32)
        if GRAD:
            made = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
        if NORM:
            slope = tl.load(scale + row)
            wide = tl.load(stream + at, mask=here, other=0.0).to(tl.float32)
            wide = tl.where(here, (wide - tl.load(mean + row)) * slope, 0.0)
            given = tl.load(of_normed + at, mask=here, other=0.0).to(tl.float32)
            if LEARNS:
                of_weight += given * wide
                of_shift += given
            given *= weights
            made += slope * (given - wide * (tl.sum(given * wide, 0) / width) - tl.sum(given, 0) / width)
            tl.store(grad_x + at, made, mask=here)
        if DROP:
            made = tl.where(_keeps(tl.load(bases + row), columns, least), made / rest, 0.0)
            tl.store(grad_part + at, made, mask=here)
        if BIAS:
            of_bias += made
    sums += tl.program_id(0) * width + columns
    if LEARNS:
        tl.store(sums, of_weight, mask=here)
        tl.store(sums + tl.num_programs(0) * width, of_shift, mask=here)
    if BIAS:
        tl.store(sums + 2 * tl.num_programs(0) * width, of_bias, mask=here)


@triton.jit
def means_kernel(of_normed, stream, mean, scale, weight, means, rows, width, BLOCK: tl.constexpr):
    """A program for each token: what each of its numbers needs of the others in a norm's backward. `means`:
    of the gradient times the normed numbers, and of the gradient."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here, at = columns < width, row * width + columns
    wide = tl.load(stream + at, mask=here, other=0.0).to(tl.float32)
    given = tl.load(of_normed + at, mask=here, other=0.0).to(tl.float32)
    given *= tl.load(weight + columns, mask=here, other=0.0).to(tl.float32)
    wide = (wide - tl.load(mean + row)) * tl.load(scale + row)
    tl.store(means + row, tl.sum(given * wide, 0) / width)
    tl.store(means + rows + row, tl.sum(given, 0) / width)


@triton.jit
def columns_kernel(grad, of_normed, stream, mean, scale, means, weight, bases, grad_x, grad_part, sums, rows,
                   width, least, rest, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GRAD: tl.constexpr,
                   NORM: tl.constexpr, DROP: tl.constexpr, BIAS: tl.constexpr, LEARNS: tl.constexpr):
    """As ended_backward_kernel, of tokens that are too wide for it: a program for each strip of tokens and
    each COLUMNS columns, after means_kernel."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    fits, strip = columns < width, tl.cdiv(tl.cdiv(rows, tl.num_programs(0)), ROWS) * ROWS
    first = tl.program_id(0) * strip
    of_weight, of_shift = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    of_bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    if NORM:
        weights = tl.load(weight + columns, mask=fits, other=0.0).to(tl.float32)
    for start in range(first, tl.minimum(first + strip, rows), ROWS):
        row = start + tl.arange(0, ROWS)
        there = row < rows
        at, here = row[:, None].to(tl.int64) * width + columns[None, :], there[:, None] & fits[None, :]
        made = tl.zeros([ROWS, COLUMNS], tl.float32)
        if GRAD:
            made = tl.load(grad + at, mask=here, other=0.0).to(tl.float32)
        if NORM:
            slope = tl.load(scale + row, mask=there, other=0.0)[:, None]
            wide = tl.load(stream + at, mask=here, other=0.0).to(tl.float32)
            wide = (wide - tl.load(mean + row, mask=there, other=0.0)[:, None]) * slope
            given = tl.load(of_normed + at, mask=here, other=0.0).to(tl.float32)
            if LEARNS:
                of_weight += given * wide
                of_shift += given
            along = tl.load(means + row, mask=there, other=0.0)[:, None]
            middle = tl.load(means + rows + row, mask=there, other=0.0)[:, None]
            made += slope * (given * weights[None, :] - wide * along - middle)
            tl.store(grad_x + at, made, mask=here)
        if DROP:
            base = tl.load(bases + row, mask=there, other=0)
            made = tl.where(_keeps(base[:, None], columns[None, :], least), made / rest, 0.0)
            tl.store(grad_part + at, made, mask=here)
        if BIAS:
            of_bias += made
    sums += tl.program_id(0) * width + columns
    if LEARNS:
        tl.store(sums, tl.sum(of_weight, 0), mask=fits)
        tl.store(sums + tl.num_programs(0) * width, tl.sum(of_shift, 0), mask=fits)
    if BIAS:
        tl.store(sums + 2 * tl.num_programs(0) * width, tl.sum(of_bias, 0), mask=fits)


@triton.jit
def rows_kernel(into, grads, ids, order, ends, real, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A program for each place in the sorted ids and each BLOCK columns: the first place of an id adds up the
    rows of all of its tokens, in their order, and adds the sum to the id's row."""
    first = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(ids + first)
    before = tl.load(ids + tl.maximum(first - 1, 0))
    if ((first == 0) | (before != own)) & (own < real):
        end = tl.load(ends + first).to(tl.int32)
        added = tl.zeros([BLOCK], tl.float32)
        for start in range(first, end, ROWS):
            places = start + tl.arange(0, ROWS)
            tokens = tl.load(order + places, mask=places < end, other=0)
            here = (places[:, None] < end) & (columns[None, :] < width)
            values = tl.load(grads + tokens[:, None] * width + columns[None, :], mask=here, other=0.0)
            added += tl.sum(values.to(tl.float32), 0)
        at = into + own * width + columns
        added += tl.load(at, mask=columns < width, other=0.0).to(tl.float32)
        tl.store(at, added, mask=columns < width)


_KERNELS = {"gelu": gelu_kernel, "gelu_backward": gelu_backward_kernel, "copy": copy_kernel,
            "ended": ended_kernel, "ended_backward": ended_backward_kernel, "means": means_kernel,
            "columns": columns_kernel, "rows": rows_kernel}


def start(name: str, programs: tuple[int, ...], *given: Any, warps: int, **shape: Any) -> None:
    """Start a kernel: so many programs, its arguments, and what its code depends on."""
    _KERNELS[name][programs](*given, num_warps=warps, **shape)

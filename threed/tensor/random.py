"""Numbers that do not depend on the mesh: initial weights drawn by block, dropout masks computed from counters."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import torch

from threed.models.spec import Parameter

BLOCK = 256  # rows and columns of a block
_MASK = (1 << 64) - 1


def _seed(*words: object) -> int:
    """A 63-bit seed from anything that prints."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def initial_values(parameter: Parameter, tp: int, tp_rank: int, seed: int) -> torch.Tensor:
    """The fp32 values of a tp rank's part of a parameter (of a tile of it), on the CPU."""
    values = torch.empty(parameter.local_shape(tp))
    draw(values.view(-1), parameter, tp, tp_rank, seed)
    return values


def draw(into: torch.Tensor, parameter: Parameter, tp: int, tp_rank: int, seed: int, start: int = 0) -> None:
    """Fill a flat tensor with initial values: a tp rank's part of a parameter (of a tile of it), from its element `start` on.

    Normal values are drawn in blocks, each with a generator keyed by (seed, name, block), so a rank draws only the blocks
    that its range touches, a row of blocks at a time, and the whole parameter is the same on every mesh. Rows that pad the
    vocabulary are zero.
    """
    if parameter.tiles > 1:  # as if as many more ranks cut the whole
        whole = replace(parameter, tile=0, tiles=1)
        return draw(into, whole, tp * parameter.tiles, parameter.tile * tp + tp_rank, seed, start)
    stop = start + len(into)
    if parameter.std == 0.0:
        into.fill_(parameter.fill)
    elif parameter.stacked:  # each of the stacked products as a parameter of its own
        cut = parameter.tp_dim - 1 if parameter.tp_dim is not None else None
        size = math.prod(parameter.local_shape(tp)[1:])
        for index in range(start // size, -(-stop // size)):
            part = replace(parameter, name=f"{parameter.name}.{index}", shape=parameter.shape[1:], tp_dim=cut, stacked=False)
            low, high = max(start, index * size), min(stop, (index + 1) * size)
            draw(into[low - start:high - start], part, tp, tp_rank, seed, low - index * size)
    else:
        whole, cut = (parameter.shape, parameter.tp_dim) if len(parameter.shape) == 2 else ((1, parameter.numel), None)
        size, first = list(whole), [0, 0]
        if cut is not None:
            size[cut] //= tp
            first[cut] = tp_rank * size[cut]
        row, last = first[0] + start // size[1], first[0] + -(-stop // size[1])
        while row < last:
            top, bottom = max(row - row % BLOCK, first[0]), min(row - row % BLOCK + BLOCK, first[0] + size[0])
            offset, end = (top - first[0]) * size[1], (bottom - first[0]) * size[1]
            low, high = max(start, offset), min(stop, end)
            into[low - start:high - start] = _strip(  # nowhere else, so that there is one at a time
                parameter, whole, (top, bottom), (first[1], first[1] + size[1]), seed).view(-1)[low - offset:high - offset]
            row = bottom


def _strip(parameter: Parameter, whole: tuple[int, ...], rows: tuple[int, int], columns: tuple[int, int],
           seed: int) -> torch.Tensor:
    """These (from, to) rows and columns of a whole matrix. The rows lie in one row of blocks."""
    row = rows[0] - rows[0] % BLOCK
    strip = torch.empty(rows[1] - rows[0], columns[1] - columns[0])
    for column in range(columns[0] - columns[0] % BLOCK, columns[1], BLOCK):
        generator = torch.Generator().manual_seed(_seed(seed, parameter.name, row // BLOCK, column // BLOCK))
        block = torch.empty(min(BLOCK, whole[0] - row), min(BLOCK, whole[1] - column))
        block.normal_(0.0, parameter.std, generator=generator)
        low, high = max(column, columns[0]), min(column + BLOCK, columns[1])
        strip[:, low - columns[0]:high - columns[0]] = block[rows[0] - row:rows[1] - row, low - column:high - column]
    if parameter.unpadded is not None:
        strip[max(parameter.unpadded - rows[0], 0):] = 0.0
    return strip


def keep_mask(probability: float, key: tuple[int, str], samples: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Dropout from counters: which elements stay, [B, *counters.shape], and the same on every mesh.

    `key` is (seed, site), `samples` the global sample numbers [B], `counters` the global number of each element within
    its sample at this site. Each decision is a hash of the four (the mixing steps are those of splitmix64).
    """
    base = torch.tensor(_seed(*key), dtype=torch.int64, device=samples.device)
    shape = (-1, *([1] * counters.dim()))
    mixed = _mix(_mix(samples + base).view(shape) + counters)
    return (mixed >> 11 & ((1 << 24) - 1)) >= int(probability * (1 << 24))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _logical_shift(x, shift)) * _signed(factor)
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & (_MASK >> bits)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value

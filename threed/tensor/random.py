"""Numbers that do not depend on the mesh: initial weights drawn by block, dropout masks computed from
counters."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from threed.spec.parameter import Parameter

BLOCK = 256  # rows and columns of a block
_MASK = (1 << 64) - 1
Part = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape in `Parameter.stored`
# How initial values come into a flat tensor: `draw`, or another function of its arguments.
Draw = Callable[[torch.Tensor, Parameter, Part, int, int], None]


def seed_of(*words: object) -> int:
    """A 63-bit seed from anything that prints."""
    digest = hashlib.blake2b("/".join(map(str, words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def initial_values(parameter: Parameter, ranks: Mapping[str, int], place: Mapping[str, int],
                   seed: int) -> torch.Tensor:
    """The fp32 values of a rank's part of a parameter or of its tile, on the CPU. `ranks`: axis -> its size;
    `place`: axis -> the rank's index."""
    values = torch.empty(parameter.local_shape(ranks))
    draw(values.view(-1), parameter, parameter.part(ranks, place), seed)
    return values


def draw(into: torch.Tensor, parameter: Parameter, part: Part, seed: int, start: int = 0) -> None:
    """Fill a flat tensor with initial values: a part (offset and shape in `parameter.stored`), from its
    element `start` on.

    Random values are drawn in blocks of the last two dims, each with a generator keyed by (seed, name,
    indices of the dims before, block), so a rank draws only the blocks that its range touches, a row of
    blocks at a time, and the whole parameter is the same on every mesh. Rows that pad the vocabulary are
    zero.
    """
    if parameter.init is not None:
        offset, shape = part
        whole = parameter.init(seed)
        for dim, (first, length) in enumerate(zip(offset, shape, strict=True)):
            whole = whole.narrow(dim, first, length)
        into.copy_(whole.reshape(-1)[start:start + len(into)])
        return
    if parameter.std == parameter.uniform == 0.0:
        into.fill_(parameter.fill)
        return
    whole, (offset, shape) = parameter.stored, part
    if len(whole) == 1:
        whole, offset, shape = (1, *whole), (0, *offset), (1, *shape)
    size, stop = shape[-2] * shape[-1], start + len(into)
    for matrix in range(start // size, -(-stop // size)):
        index, rest = [], matrix
        for dim in reversed(range(len(shape) - 2)):
            rest, local = divmod(rest, shape[dim])
            index.insert(0, offset[dim] + local)
        low, high = max(start, matrix * size), min(stop, (matrix + 1) * size)
        name = ".".join(map(str, (parameter.name, *index)))
        _draw_matrix(into[low - start:high - start], replace(parameter, name=name), whole[-2:],
                     (offset[-2:], shape[-2:]), (seed, low - matrix * size))


def draw_in_place(into: torch.Tensor, parameter: Parameter, part: Part, seed: int, start: int = 0) -> None:
    """As `draw`, of the same distributions, but random values are drawn where the tensor is, by its device's
    own generator: at the speed of its memory, and other ones on another mesh or device. For what is
    measured, not trained."""
    if parameter.init is not None or parameter.std == parameter.uniform == 0.0:
        draw(into, parameter, part, seed, start)
        return
    if parameter.uniform:
        into.uniform_(-parameter.uniform, parameter.uniform)
    else:
        into.normal_(0.0, parameter.std)
    if parameter.unpadded is not None:
        (first, *_), (_, *sizes) = part
        into[max((parameter.unpadded - first) * math.prod(sizes) - start, 0):] = 0.0


def _draw_matrix(into: torch.Tensor, parameter: Parameter, whole: tuple[int, ...], part: Part,
                 key: tuple[int, int]) -> None:
    """`draw` for a part of one matrix. `key`: the seed, and the first element."""
    (first, size), (seed, start) = part, key
    stop = start + len(into)
    row, last = first[0] + start // size[1], first[0] + -(-stop // size[1])
    while row < last:
        top, bottom = max(row - row % BLOCK, first[0]), min(row - row % BLOCK + BLOCK, first[0] + size[0])
        offset, end = (top - first[0]) * size[1], (bottom - first[0]) * size[1]
        low, high = max(start, offset), min(stop, end)
        # No variable holds the strip, so that only one is in memory at a time.
        columns = first[1], first[1] + size[1]
        into[low - start:high - start] = _strip(parameter, whole, (top, bottom), columns,
                                                seed).view(-1)[low - offset:high - offset]
        row = bottom


def _strip(parameter: Parameter, whole: tuple[int, ...], rows: tuple[int, int], columns: tuple[int, int],
           seed: int) -> torch.Tensor:
    """The (from, to) rows and columns of a whole matrix. The rows must be within one row of blocks."""
    row = rows[0] - rows[0] % BLOCK
    strip = torch.empty(rows[1] - rows[0], columns[1] - columns[0])
    for column in range(columns[0] - columns[0] % BLOCK, columns[1], BLOCK):
        key = seed_of(seed, parameter.name, row // BLOCK, column // BLOCK)
        generator = torch.Generator().manual_seed(key)
        block = torch.empty(min(BLOCK, whole[0] - row), min(BLOCK, whole[1] - column))
        if parameter.uniform:
            block.uniform_(-parameter.uniform, parameter.uniform, generator=generator)
        else:
            block.normal_(0.0, parameter.std, generator=generator)
        low, high = max(column, columns[0]), min(column + BLOCK, columns[1])
        strip[:, low - columns[0]:high - columns[0]] = block[rows[0] - row:rows[1] - row,
                                                             low - column:high - column]
    if parameter.unpadded is not None:
        strip[max(parameter.unpadded - rows[0], 0):] = 0.0
    return strip


def keep_mask(probability: float, key: tuple[int, str], samples: torch.Tensor,
              counters: torch.Tensor) -> torch.Tensor:
    """The dropout mask [B, ...], True where an element is kept: the same on every mesh.

    `key` is (seed, site), `samples` the global sample numbers [B], `counters` the global number of each
    element within its sample at this site, [B, ...], or [1, ...] where all samples have the same. Each
    decision is a hash of the four (the mixing steps are those of splitmix64).
    """
    return mask_of(probability, keyed(key, samples), counters)


def keyed(key: tuple[int, str], samples: torch.Tensor) -> torch.Tensor:
    """A hash of the key and each sample, int64 [B]."""
    return _mix(samples + seed_of(*key))


def mask_of(probability: float, hashes: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """`keep_mask`, from the hashes of `keyed`."""
    mixed = _mix(hashes.view(-1, *([1] * (counters.dim() - 1))) + counters)
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

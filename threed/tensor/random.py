"""Numbers that do not depend on the mesh: initial weights drawn by block, dropout masks computed from counters."""

from __future__ import annotations

import hashlib
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
    """The fp32 values of a tp rank's part of a parameter (of a tile of it), on the CPU.

    Normal values are drawn in blocks, each with a generator keyed by (seed, name, block), so a rank draws only the blocks
    that its part touches and the whole parameter is the same on every mesh. Rows that pad the vocabulary are zero.
    """
    if parameter.tiles > 1:  # as if as many more ranks cut the whole
        whole = replace(parameter, tile=0, tiles=1)
        return initial_values(whole, tp * parameter.tiles, parameter.tile * tp + tp_rank, seed)
    shape = parameter.local_shape(tp)
    if parameter.std == 0.0:
        return torch.full(shape, parameter.fill)
    if parameter.stacked:  # each of the stacked products as a parameter of its own
        cut = parameter.tp_dim - 1 if parameter.tp_dim is not None else None
        parts = [replace(parameter, name=f"{parameter.name}.{index}", shape=parameter.shape[1:], tp_dim=cut, stacked=False)
                 for index in range(parameter.shape[0])]
        return torch.stack([initial_values(part, tp, tp_rank, seed) for part in parts])
    whole = parameter.shape if len(parameter.shape) == 2 else (1, parameter.numel)
    cut = parameter.tp_dim if len(parameter.shape) == 2 else None
    size = [whole[0], whole[1]]
    first = [0, 0]
    if cut is not None:
        size[cut] //= tp
        first[cut] = tp_rank * size[cut]
    values = torch.empty(size)
    for row in range(first[0] - first[0] % BLOCK, first[0] + size[0], BLOCK):
        for column in range(first[1] - first[1] % BLOCK, first[1] + size[1], BLOCK):
            generator = torch.Generator().manual_seed(_seed(seed, parameter.name, row // BLOCK, column // BLOCK))
            block = torch.empty(min(BLOCK, whole[0] - row), min(BLOCK, whole[1] - column))
            block.normal_(0.0, parameter.std, generator=generator)
            low = [max(row, first[0]), max(column, first[1])]
            high = [min(row + block.shape[0], first[0] + size[0]), min(column + block.shape[1], first[1] + size[1])]
            values[low[0] - first[0]:high[0] - first[0], low[1] - first[1]:high[1] - first[1]] = \
                block[low[0] - row:high[0] - row, low[1] - column:high[1] - column]
    if parameter.unpadded is not None:
        values[max(parameter.unpadded - first[0], 0):] = 0.0
    return values.view(shape)


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

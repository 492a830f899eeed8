"""Kernels: the work of a layer for a rank and a micro-batch, from which its time is predicted. Plain values,
no torch.

A layer declares its products, its attention, and what else moves bytes. tests/loopback/test_measure.py
measures all three. Every kernel says its FLOPs, which count products alone.
"""

from __future__ import annotations

from typing import NamedTuple

FROZEN = "frozen"
# The widest residual stream whose norm is a piece of model.fused; and that of which a program of its backward
# has all numbers of a token, with their sums over tokens, in registers. (Above, two kernels read it.)
WIDEST, WHOLE = 16384, 4096


def strips(width: int, tokens: int, whole: bool) -> int:
    """Strips of tokens of which a kernel of model.fused leaves a row of sums each, on every card as many.
    `whole`: a program has all `width` numbers of a token, up to WHOLE, and not some columns."""
    return min(max(256, (1 << 19) // width) if whole and width <= WHOLE else 64, tokens)


def partial_sums(width: int, tokens: int, whole: bool = False, count: int = 1) -> int:
    """Bytes in which these sums are written, and read."""
    return 2 * 4 * count * width * strips(width, tokens, whole)


class Product(NamedTuple):
    """`count` products of matrices in forward: [m, k] x [k, n]. In backward each has two more,
    [m, n] x [n, k] for the gradient of its input and [n, m] x [m, k] for that of its weight."""

    m: int
    n: int
    k: int
    count: int = 1
    # Whether [k, n] is a weight; else both gradients belong to the input half. A weight may be FROZEN: then
    # it has no gradient.
    weight: bool | str = True
    piece: str | None = None  # the activation piece that computes it again in backward

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * self.count


class AttentionKernel(NamedTuple):
    """Causal attention in one kernel, which stores no [S, S] matrix."""

    sequences: int
    heads: int
    kv_heads: int
    seq: int
    size: int  # of a head
    piece: str | None = None
    keys: int | None = None  # of a sequence, the last of which are those of the queries; None: as many

    @property
    def squares(self) -> int:
        """Pairs of a query and a key, those behind the query included."""
        return self.sequences * self.heads * self.seq * (self.keys or self.seq)

    @property
    def flops(self) -> int:
        """Of the whole square, not halved for the causal mask, as is customary."""
        return 4 * self.squares * self.size


class Moved(NamedTuple):
    """Kernels without products: bytes that they read and write, how many they are, and how often they compute
    an exponential, which counts on a CPU. Those of backward belong to its input half."""

    what: str
    forward: int  # bytes
    backward: int
    kernels: tuple[int, int] = (1, 1)  # in forward, in backward
    piece: str | None = None
    exponentials: tuple[int, int] = (0, 0)  # in forward, in backward; a tanh counts as two
    # Of backward's bytes: those of sums over tokens, a number a column; and of rows that are added up where
    # their tokens say. Memory is read more slowly there.
    columns: int = 0
    scattered: int = 0
    fused: bool = False  # whether a kernel of a fused piece reads and writes each tensor once

    @property
    def flops(self) -> int:
        return 0


Kernel = Product | AttentionKernel | Moved

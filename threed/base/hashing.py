"""Hashing: random orders and numbers that depend on their arguments alone, equal on every machine."""

from __future__ import annotations

_MASK = 2**64 - 1


def splitmix64(value):
    """The finalizer of splitmix64: 64 bits to 64 well-mixed bits. Takes an int >= 0, or a uint64 array (which
    wraps)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def permute(place: int, size: int, key: int) -> int:
    """The image of `place` under a permutation of range(size) that `key` chooses.

    A Feistel network permutes range(4^n), for the least 4^n >= size; while the result is not below `size`, it
    is permuted again (cycle walking): at most 4 times on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = 2**half - 1
    while True:
        left, right = place >> half, place & low
        for round_ in range(6):
            left, right = right, left ^ (splitmix64(key + 8 * right + round_) & low)
        place = left << half | right
        if place < size:
            return place


def shuffled(place: int, size: int, seed: int, epoch: int) -> int:
    """The element, of `size`, at a place in the order of an epoch."""
    return permute(place, size, splitmix64(splitmix64(seed & _MASK) + epoch))

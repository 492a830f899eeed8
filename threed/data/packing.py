"""Packing: which tokens are in a window.

    stream     | a a a a b b|b c c c c d|      windows follow each other and cut documents; nothing is padded
    best-fit   | a a a d d .|c c c b b .|      whole documents, each to the fullest window that has room

A window is a list of *runs*: (first token, number of inputs). The label of an input is the token after it.
A document of n tokens thus has n - 1 inputs: its last token is a label alone. Where it has more than a window
holds, it is cut into runs that fill windows, and a rest that is packed like a document.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

Runs = np.ndarray  # int64 [runs, 2]: first token, number of inputs


class WindowStream:
    """Consecutive windows of tokens [start, stop), which do not overlap."""

    padded = 0  # inputs of all windows together that are padding

    def __init__(self, start: int, stop: int, seq_len: int):
        self.start, self.seq_len = start, seq_len
        self.num_windows = max(0, (stop - start - 1) // seq_len)  # a window's last label is a token too

    def runs(self, window: int) -> Runs:
        return np.array([[self.start + window * self.seq_len, self.seq_len]], np.int64)


class BestFit:
    """Windows of whole documents. The same documents give the same windows, whatever the seed."""

    def __init__(self, bounds: np.ndarray, seq_len: int, keep: np.ndarray | None = None):
        """`bounds`: int64 [documents, 2], first token and one past the last. `keep`: which of the runs, as
        from `cut`, are used; None: all."""
        self.seq_len = seq_len
        runs = cut(bounds, seq_len)
        runs = runs if keep is None else runs[keep]
        windows = best_fit(runs[:, 1], seq_len)
        order = np.argsort(windows, kind="stable")  # in a window, runs are in the order of the stream
        self._runs = runs[order]
        self.num_windows = int(windows.max(initial=-1)) + 1
        self._first = np.searchsorted(windows[order], np.arange(self.num_windows + 1))
        self.padded = self.num_windows * seq_len - int(runs[:, 1].sum())

    def runs(self, window: int) -> Runs:
        return self._runs[self._first[window]:self._first[window + 1]]


def cut(bounds: np.ndarray, seq_len: int) -> Runs:
    """The runs of documents, in their order: of at most `seq_len` inputs each."""
    inputs = np.maximum(bounds[:, 1] - bounds[:, 0] - 1, 0)
    counts = -(-inputs // seq_len)
    document = np.repeat(np.arange(len(bounds)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # within the document
    first = bounds[document, 0] + number * seq_len
    return np.stack([first, np.minimum(seq_len, inputs[document] - number * seq_len)], 1).astype(np.int64)


def best_fit(sizes: np.ndarray, room: int) -> np.ndarray:
    """The number of the bin of each item: largest items first, each to the fullest bin that has room for it
    (best-fit decreasing), else to a new one. int64 [items].

    Items of one size are alike, and so are bins with the same room: they are moved together, in time that
    grows with the number of sizes, not of items.
    """
    bins = np.full(len(sizes), -1, np.int64)
    order = np.argsort(-sizes, kind="stable")
    values, starts = np.unique(-sizes[order], return_index=True)
    open_bins: dict[int, list[np.ndarray]] = {}  # room left -> bins
    rooms: list[int] = []  # keys of open_bins, ascending
    count = 0
    for size, first, stop in zip((-values).tolist(), starts, np.append(starts, len(sizes))[1:], strict=True):
        items = order[first:stop]
        while len(items):
            at = bisect_left(rooms, size)
            if at == len(rooms):
                new = -(-len(items) // (room // size))  # as many as their own kind fills
                given, left = np.arange(count, count + new), room
                count += new
            else:
                left = rooms.pop(at)
                given = np.concatenate(open_bins.pop(left))
            used, items, rest = *_give(bins, items, given), given[len(items):]
            if len(rest):
                _open(open_bins, rooms, left, rest)
            if left - size:
                _open(open_bins, rooms, left - size, used)
    return bins


def _give(bins: np.ndarray, items: np.ndarray, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An item for each bin, as far as they go: the bins that got one, and the items that are left."""
    number = min(len(items), len(given))
    bins[items[:number]] = given[:number]
    return given[:number], items[number:]


def _open(open_bins: dict[int, list[np.ndarray]], rooms: list[int], left: int, which: np.ndarray) -> None:
    if left not in open_bins:
        insort(rooms, left)
    open_bins.setdefault(left, []).append(which)


def efficiency(layouts: Sequence[WindowStream | BestFit]) -> float:
    """The share of inputs that are no padding."""
    whole = sum(each.num_windows * each.seq_len for each in layouts)
    return 1.0 - sum(each.padded for each in layouts) / whole if whole else 1.0

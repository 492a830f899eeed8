"""Deals: which rank has which tokens of a sequence that several ranks share (parallel.cp). No torch.

A sequence is cut into equal chunks. In zig-zag order (parallel.cp_order=zigzag) there are two for each rank:

    rank      0 1 2 3 3 2 1 0        4 ranks, 8 chunks

A token attends to itself and to those before it, so that each rank's two chunks have as many keys as another
rank's. Inside documents that does not hold: the end of a long document has most to do, wherever it is. So
with parallel.cp_order=documents each sequence is dealt by itself. There are 8 chunks for each rank, and the
one with most to do goes to the rank that has least so far, and not yet all of its chunks.

All ranks have equally many tokens. Work is measured by pairs of a query and a key of its document, up to the
query. A deal depends on where documents end alone, so that each rank finds it by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

Runs = tuple[range, ...]  # places in the whole sequence
Deal = tuple[Runs, ...]  # the tokens of each rank

# Chunks of each rank: more where so many leave the busiest rank above a twentieth over the mean. (A document
# far longer than the others is in few chunks, each with more to do than a rank should have.)
CHUNKS = 8, 16, 32
_OVER = 20


@lru_cache(64)
def zigzag(length: int, count: int) -> Deal:
    """The deal of a sequence in zig-zag order."""
    if count == 1:
        return ((range(length),),)
    chunk = length // (2 * count)
    return tuple(tuple(range(at * chunk, (at + 1) * chunk) for at in (rank, 2 * count - 1 - rank))
                 for rank in range(count))


@lru_cache(1024)
def by_documents(ends: tuple[int, ...], count: int) -> Deal:
    """The deal of a sequence whose documents end there, the last at its own end: zig-zag where that is as
    good."""
    best, length = zigzag(ends[-1], count), ends[-1]
    for each in CHUNKS if len(ends) > 1 else ():  # a single document's is exactly balanced
        if length % (each * count) == 0:
            best = min(best, _greedy(ends, count, each), key=lambda deal: max(work(deal, ends)))
        if balanced(best, ends):
            break
    return best


def balanced(deal: Deal, ends: tuple[int, ...]) -> bool:
    """Whether the busiest rank has at most 5% more to do than the mean. `ends`: where documents end."""
    each = work(deal, ends)
    return max(each) * len(each) * _OVER <= sum(each) * (_OVER + 1)


def work(deal: Deal, ends: tuple[int, ...]) -> list[int]:
    """The pairs of a query and a key that each rank has in a sequence."""
    before = _pairs(ends)
    return [sum(before(run.stop) - before(run.start) for run in runs) for runs in deal]


def _pairs(ends: tuple[int, ...]) -> Callable[[int], int]:
    """A function of a place: the pairs of all queries before it."""
    starts = (0, *ends)
    sums = [0, *accumulate(_triangle(stop - start) for start, stop in pairwise(starts))]

    def before(place: int) -> int:
        ended = bisect_right(ends, place)
        return sums[ended] + _triangle(place - starts[ended])

    return before


def _triangle(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def _greedy(ends: tuple[int, ...], count: int, each: int) -> Deal:
    """So many chunks for each rank, those with most to do first."""
    size = ends[-1] // (count * each)
    chunks = [range(first, first + size) for first in range(0, ends[-1], size)]
    pairs = work(tuple((chunk,) for chunk in chunks), ends)
    dealt: list[list[range]] = [[] for _ in range(count)]
    sums = [0] * count
    for at in sorted(range(len(chunks)), key=lambda at: (-pairs[at], at)):
        rank = min((rank for rank in range(count) if len(dealt[rank]) < each), key=sums.__getitem__)
        dealt[rank].append(chunks[at])
        sums[rank] += pairs[at]
    return tuple(_joined(sorted(runs, key=lambda run: run.start)) for runs in dealt)


def _joined(runs: Sequence[range]) -> Runs:
    """Neighbours as one run."""
    joined = [runs[0]]
    for run in runs[1:]:
        if run.start == joined[-1].stop:
            joined[-1] = range(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return tuple(joined)

"""Split units into stages, balanced by cost. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def split_stages(costs: Sequence[float], together: Sequence[int], num_stages: int) -> list[int]:
    """Units of each stage, as `split_units`, but runs of units whose lengths are `together` are not
    parted."""
    starts = [sum(together[:run]) for run in range(len(together) + 1)]
    of_runs = [sum(costs[start:stop]) for start, stop in pairwise(starts)]
    sizes, first = [], 0
    for count in split_units(of_runs, num_stages):
        sizes.append(starts[first + count] - starts[first])
        first += count
    return sizes


def split_units(costs: Sequence[float], num_stages: int) -> list[int]:
    """The number of units in each stage, first to last. The costliest stage is as cheap as possible.

    Exact: dynamic programming over prefixes. Among splits of equal cost, earlier stages take more units,
    since the last stage also has the head.
    """
    count = len(costs)
    if not 1 <= num_stages <= count:
        raise ValueError(f"{count} units cannot fill {num_stages} stages")
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    best = {(0, 0): (0.0, 0)}  # (stages, units used) -> (costliest stage, where the last stage begins)
    for stage in range(1, num_stages + 1):
        for stop in range(stage, count - (num_stages - stage) + 1):
            found = math.inf, stop
            for start in range(stop - 1, stage - 2, -1):
                last = before[stop] - before[start]
                if last > found[0]:  # and more so for smaller ones
                    break
                if (stage - 1, start) in best:
                    found = min(found, (max(best[stage - 1, start][0], last), start))
            best[stage, stop] = found
    sizes, stop = [], count
    for stage in range(num_stages, 0, -1):
        start = best[stage, stop][1]
        sizes.append(stop - start)
        stop = start
    return sizes[::-1]

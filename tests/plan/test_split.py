"""Layers into units, units into stages."""

from __future__ import annotations

import random
from itertools import accumulate, combinations

import pytest

from threed.config.load import load
from threed.config.stages import stage_runs
from threed.models.tiling import unit_layers
from threed.planner import make_table
from threed.schedules.split import split_stages, split_units


def stage_costs(costs: list[float], sizes: list[int]) -> list[float]:
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    return [sum(costs[start:start + size]) for start, size in zip(starts, sizes)]


@pytest.mark.parametrize("blocks, per_unit", [(1, 1), (8, 1), (8, 3), (7, 2), (4, 9)])
def test_split_layers(blocks, per_unit):
    """A layer that is in no unit, or in two; an end that shares its unit with a block."""
    config = load(None, [f"model.layers={blocks}", f"parallel.layers_per_unit={per_unit}"])
    _, runs = unit_layers(config)
    assert [index for first, stop in runs for index in range(first, stop)] == list(range(blocks + 2))
    assert runs[0] == (0, 1) and runs[-1] == (blocks + 1, blocks + 2)
    assert all(stop - first <= per_unit for first, stop in runs)
    assert len(runs) == sum(stage_runs(config))


def test_split_units_is_optimal():
    """A costliest stage that could be cheaper: against every way to cut."""
    rng = random.Random(3)
    for _ in range(300):
        costs = [float(rng.randint(0, 9)) for _ in range(rng.randint(1, 9))]
        stages = rng.randint(1, len(costs))
        sizes = split_units(costs, stages)
        assert len(sizes) == stages and sum(sizes) == len(costs) and min(sizes) >= 1
        cuts = [(0, *cut, len(costs)) for cut in combinations(range(1, len(costs)), stages - 1)]
        best = min(max(stage_costs(costs, [b - a for a, b in zip(cut, cut[1:])])) for cut in cuts)
        assert max(stage_costs(costs, sizes)) == best


def test_tiles_stay_together():
    """A stage that begins in the middle of a layer's tiles; one that is costlier than it must be for that."""
    assert split_stages([1.0] * 8, [1, 1, 4, 2], 2) == [2, 6]
    assert split_stages([2.0, 2.0, *[1.0] * 6], [1, 1, 4, 2], 3) == [2, 4, 2]
    rng = random.Random(5)
    for _ in range(100):
        together = [rng.randint(1, 3) for _ in range(rng.randint(1, 6))]
        costs, stages = [float(rng.randint(0, 9))
                         for _ in range(sum(together))], rng.randint(1, len(together))
        ends = list(accumulate(split_stages(costs, together, stages)))
        assert len(ends) == stages and ends[-1] == len(costs) and set(ends) <= set(accumulate(together))


def test_split_units_refuses():
    """More stages than units is an error, not an empty stage."""
    for stages in (0, 4):
        with pytest.raises(ValueError, match="3 units cannot fill"):
            split_units([1.0, 1.0, 1.0], stages)


def test_stages_of_the_table():
    """Units that do not stay in order, or `stage_units` that is not followed: uneven, and one with only an
    end."""
    def stages(*overrides):
        return [unit.stage for unit in make_table(load(None, ["parallel.pp=3", *overrides]), (0, 1, 2)).units]

    assert stages("parallel.stage_units=[1,8,1]") == [0, *[1] * 8, 2]
    assert stages("parallel.stage_units=[2,3,5]") == [0, 0, 1, 1, 1, *[2] * 5]
    balanced = stages()
    assert balanced == sorted(balanced) and set(balanced) == {0, 1, 2}
    sizes = [balanced.count(stage) for stage in range(3)]
    assert sizes[0] >= sizes[2], "the head costs much: the last stage is not the one with most units"

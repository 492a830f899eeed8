"""Cells of the contract over real processes: few, in which every pair of values is met (`make matrix`), or
every value."""

from __future__ import annotations

import pytest

from tests.harness import Ranks, assert_contract, cell_config, collect, covering, each_value, over_gloo
from threed.schema import Config

QUICK = each_value(covering())


@pytest.mark.parametrize("cell", [
    pytest.param(cell, id=cell.id, marks=[pytest.mark.slow] * (cell not in QUICK)) for cell in covering()])
def test_cell(cell, workers, references):
    """What loopback cannot show: that messages and collectives of gloo, and its lanes, give the same
    numbers."""

    def run(config: Config, steps: int) -> Ranks:
        return collect(config, workers.run(over_gloo, config.world_size, config, steps))

    assert_contract(cell_config(cell, ranks=8), references, run)

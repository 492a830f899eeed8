"""Cells of the contract over real processes: few, in which every pair of values is met."""

from __future__ import annotations

import pytest

from tests.harness import Ranks, assert_contract, cell_config, collect, covering, over_gloo
from threed.schema import Config


@pytest.mark.parametrize("cell", covering(), ids=lambda cell: cell.id)
def test_cell(cell, workers, references):
    """What loopback cannot show: that messages and collectives of gloo, and its lanes, give the same numbers."""

    def run(config: Config, steps: int) -> Ranks:
        return collect(config, workers.run(over_gloo, config.world_size, config, steps))

    assert_contract(cell_config(cell, ranks=8), references, run)

"""Cells of the contract over real processes: few, in which every pair of values is met (`make matrix`), or every value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness import Ranks, assert_contract, cell_config, collect, covering, over_gloo
from threed.schema import Config


def marked() -> Iterator[Any]:
    """Those that bring a value that none before has are quick enough for `make test` together."""
    seen: set[tuple[int, object]] = set()
    for cell in covering():
        values = set(enumerate(cell))
        yield pytest.param(cell, id=cell.id, marks=[pytest.mark.slow] if values <= seen else [])
        seen |= values


@pytest.mark.parametrize("cell", list(marked()))
def test_cell(cell, workers, references):
    """What loopback cannot show: that messages and collectives of gloo, and its lanes, give the same numbers."""

    def run(config: Config, steps: int) -> Ranks:
        return collect(config, workers.run(over_gloo, config.world_size, config, steps))

    assert_contract(cell_config(cell, ranks=8), references, run)

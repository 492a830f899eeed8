"""Cells of the contract on fake GPUs: the reference's numbers, and no race."""

from __future__ import annotations

from functools import partial

import pytest

from tests.harness import Ranks, assert_contract, cell_config, covering, each_value, loopback
from tests.reference import Picks
from threed.schema import Config

CELLS = each_value(covering())  # each value of each axis


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.id) for cell in CELLS])
def test_cell(cell, references, fake_gpus):
    config = cell_config(cell, ranks=8)

    def run(config: Config, steps: int, picks: Picks | None = None) -> Ranks:
        return fake_gpus.run(partial(loopback, picks=picks), config, steps)

    assert_contract(config, references, run, steps=2)

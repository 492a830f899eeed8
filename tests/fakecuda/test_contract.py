"""Cells of the contract on fake GPUs: the reference's numbers, and no race."""

from __future__ import annotations

import pytest

from tests.harness import assert_contract, cell_config, covering, each_value, loopback

CELLS = each_value(covering())  # each value of each axis


@pytest.mark.core
@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.id) for cell in CELLS])
def test_cell(cell, references, fake_gpus):
    config = cell_config(cell, ranks=8)
    assert_contract(config, references, lambda *args: fake_gpus.run(loopback, *args), steps=2)

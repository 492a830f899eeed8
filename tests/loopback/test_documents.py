"""Attention inside documents, and losses of which some tokens do not count: under every feature the numbers
are those of documents one by one."""

from __future__ import annotations

import pytest

from tests.harness import (
    FP32,
    assert_contract,
    assert_parity,
    cell_config,
    covering,
    each_value,
    loopback,
    same_bits,
    tiny,
)
from threed.contract import Cell
from threed.schema import Config

MASKS = ["data.document_mask=true", "data.loss_mask=answers"]
SAMPLE = covering()
CORE = each_value(SAMPLE)[:6]


@pytest.mark.parametrize("cell", [
    pytest.param(cell, id=cell.id, marks=[pytest.mark.core] * (cell in CORE)) for cell in SAMPLE])
def test_cell(cell, references):
    """The contract's sample, under both masks, against documents one by one."""
    assert_contract(cell_config(cell, others=MASKS), references, steps=2)

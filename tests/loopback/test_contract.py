"""Every cell of the contract, under the name that `threed matrix` gives its test: where it works it agrees with the reference."""

from __future__ import annotations

import re

import pytest

from tests.harness import Ranks, assert_contract, cell_config, covering, loopback
from threed.contract import Cell, cells, refusal
from threed.errors import ConfigError
from threed.schema import Config

SAMPLE = covering()


def marked(cell: Cell):
    """Cells that are refused are quick to test; of the others `make test` runs some and `make matrix` all."""
    quick = refusal(cell) is not None or cell in SAMPLE
    return pytest.param(cell, id=cell.id, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize("cell", [marked(cell) for cell in cells()])
def test_cell(cell, references):
    """A cell that works only in the table, or is refused there and runs (or is refused for another reason)."""
    reason = refusal(cell)
    if reason is not None:
        with pytest.raises(ConfigError, match=re.escape(reason)):
            cell_config(cell)
        return
    config = cell_config(cell)
    assert Cell.of(config) == cell
    assert_contract(config, references)


def test_sample_covers_all_pairs():
    """A pair of values that works together nowhere in the sample would go unseen in `make test`."""

    def pairs(found: list[Cell]) -> set[tuple[tuple[int, object], tuple[int, object]]]:
        return {((i, cell[i]), (j, cell[j])) for cell in found for i in range(len(cell)) for j in range(i)}

    assert pairs(SAMPLE) == pairs([cell for cell in cells() if refusal(cell) is None])


def test_sixteen_bits_notice_a_fault(references):
    """The comparison itself: a bias's gradient that is a tenth too large moves neither loss nor norm, and is seen."""
    config = cell_config(Cell("1f1b", 2, "none", "none", "bf16", True, True, False))
    name = "blocks.0.mlp.up.bias"

    def run(config: Config, steps: int) -> Ranks:
        ranks = loopback(config, steps)
        ranks.first_grads[name] *= 1.1
        return ranks

    with pytest.raises(AssertionError, match=name):
        assert_contract(config, references, run)

"""Every cell of the contract, under the name that `threed matrix` gives its test: where it works it agrees
with the reference."""

from __future__ import annotations

import re

import pytest

from tests.harness import (
    Ranks,
    assert_contract,
    cell_config,
    covering,
    dense,
    each_value,
    loopback,
    pairs,
    with_context,
    with_experts,
)
from threed.base.errors import ConfigError
from threed.config.contract import Cell, cells, refusal
from threed.schema import Config

SAMPLE = covering()
REFUSED = [cell for cell in cells() if refusal(cell) is not None]
# In `make test`: each value of each axis, and each reason.
CORE = [*each_value(SAMPLE), *{refusal(cell): cell for cell in REFUSED}.values()]


def pytest_generate_tests(metafunc):
    """Cells that the command line names. Or in `make matrix` every cell without experts and context
    parallelism, and with each of them every schedule, ZeRO stage and precision. Otherwise few: to collect
    all takes longer than to run those."""
    if "cell" in metafunc.fixturenames:
        names = {text.partition("[")[2].rstrip("]") for text in metafunc.config.args} - {""}
        some = [cell for cell in cells() if cell.id in names] if names else []
        if not some:
            few = metafunc.config.getoption("-m").startswith("not slow")
            some = dict.fromkeys([*SAMPLE, *REFUSED[::97], *CORE, *([] if few else dense(cells())),
                                  *([] if few else [*with_experts(), *with_context()])])
        metafunc.parametrize("cell", [
            pytest.param(cell, id=cell.id, marks=[pytest.mark.core] * (cell in CORE)) for cell in some])


def test_cell(cell, references):
    """A cell that works only in the table, or is refused there and runs (or is refused for another
    reason)."""
    problem = refusal(cell)
    if problem is not None:
        with pytest.raises(ConfigError, match=re.escape(str(problem))):
            cell_config(cell)
        return
    # Thousands of cells: those that are not in the sample run on half as many ranks, and two steps, of which
    # the second needs all that the first leaves behind.
    config = cell_config(cell, ranks=16 if cell in SAMPLE else 8)
    assert Cell.of(config) == cell
    assert_contract(config, references, steps=None if cell in SAMPLE else 2)


@pytest.mark.core
def test_sample_covers_all_pairs():
    """A pair of values that works together nowhere in the sample would go unseen in `make verify`."""
    assert pairs(SAMPLE) == pairs([cell for cell in cells() if refusal(cell) is None])


@pytest.mark.core
def test_sixteen_bits_notice_a_fault(references):
    """The comparison itself: a bias's gradient that is a tenth too large moves neither loss nor norm, and is
    seen."""
    config = cell_config(Cell("1f1b", 2, "none", "none", "bf16", True, True, False))
    name = "blocks.0.mlp.up.bias"

    def run(config: Config, steps: int) -> Ranks:
        ranks = loopback(config, steps)
        ranks.first_grads[name] *= 1.1
        return ranks

    with pytest.raises(AssertionError, match=name):
        assert_contract(config, references, run)

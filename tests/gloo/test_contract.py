"""Cells of the contract over real processes: few, in which every pair of values is met (`make matrix`), or
every value."""

from __future__ import annotations

import pytest

from tests.harness import Ranks, assert_contract, cell_config, collect, covering, each_value, over_gloo, tiny
from tests.reference import Picks
from threed.schema import Config

QUICK = each_value(covering())


@pytest.mark.parametrize("cell", [
    pytest.param(cell, id=cell.id, marks=[pytest.mark.slow] * (cell not in QUICK)) for cell in covering()])
def test_cell(cell, workers, references):
    """What loopback cannot show: that messages and collectives of gloo, and its lanes, give the same
    numbers."""

    def run(config: Config, steps: int, picks: Picks | None = None) -> Ranks:
        return collect(config, workers.run(over_gloo, config.world_size, config, steps, picks))

    assert_contract(cell_config(cell, ranks=8), references, run)


TRAVEL = {"counts": ["parallel.pp=2", "zero.stage=2", "activation.policy=full"],
          "gather": ["parallel.tp=2", "parallel.sequence_parallel=true", "zero.stage=3"],
          "equal": ["parallel.pp=2", "parallel.schedule=zb-v", "precision.dtype=bf16"]}


def by_words(rank: int, store_path: str, words: list[str], steps: int):
    """`over_gloo`, whose config each process makes: the module of a family has no name to unpickle it by."""
    return over_gloo(rank, store_path, tiny(*words), steps)


@pytest.mark.parametrize("by", TRAVEL)
def test_tensors_travel(by, workers, references):
    """Rows of uneven counts, zero among them, and gathered tensors, on the lane of dp."""
    words = ["model.family=tests/families/travelling.py:TRAVELLING", f"model.by={by}", "model.layers=2",
             "parallel.dp=2", *TRAVEL[by]]

    def run(config: Config, steps: int) -> Ranks:
        return collect(config, workers.run(by_words, config.world_size, words, steps))

    assert_contract(tiny(*words), references, run)

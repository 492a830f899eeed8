"""Random cells over all axes against the oracle; and the oracle itself: that it is alone, and sees faults."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.oracle import corpus, oracle, report, routers
from tests.oracle.cells import AXES, draw
from tests.oracle.comparison import compare
from tests.oracle.faults import FAULTS
from tests.oracle.seeds import seed_of_the_day

CELLS = 200


@pytest.mark.slow
@pytest.mark.parametrize("number", range(CELLS))
def test_cell(number, tmp_path, record_property):
    """A cell of the day, or of ORACLE_SEED. The message of one that fails says how to repeat it."""
    compared = compare(seed_of_the_day(), number, tmp_path)
    record_property(report.KEY, report.row(compared))
    assert not compared.problems(), f"{compared.problems()}\n{compared.cell}"


@pytest.mark.parametrize("number", [2, 12])
def test_fixed_cell(number, tmp_path):
    compared = compare("fixed", number, tmp_path)
    assert not compared.problems(), f"{compared.problems()}\n{compared.cell}"


def test_the_oracle_is_alone():
    """It imports torch, transformers, numpy and itself."""
    for module in (oracle, corpus, routers):
        nodes = list(ast.walk(ast.parse(Path(str(module.__file__)).read_text())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        rest = {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names}
        assert rest <= {"torch", "torch.nn", "transformers", "numpy", "tests.oracle.corpus",
                        "tests.oracle.routers"}, module.__name__


def test_every_value_is_drawn():
    cells = [draw("any", number) for number in range(CELLS)]
    for axis, values in AXES.items():
        assert {cell.values[axis] for cell in cells} == set(values), axis


@pytest.mark.parametrize("name", ["gradients-times-ranks", "mean-of-means"])
def test_a_fault_is_seen(name, tmp_path):
    """(All of FAULTS: python -m tests.oracle --faults.)"""
    fault = FAULTS[name]
    number = next(number for number in range(CELLS) if fault.does(draw("fixed", number)))
    assert fault.seen("fixed", number, tmp_path)

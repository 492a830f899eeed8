"""What the guides in docs/extending add trains as the reference does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.guides import ROOT, added_pass, code
from tests.harness import loopback, same_bits, tiny
from threed.planner import make_plan
from threed.program.analysis import Analysis
from threed.program.plan import Plan
from threed.program.summary import stages
from threed.schema import Config

SCHEDULE = """
from tests.guides import add_schedule
add_schedule()
from tests import reference
from tests.harness import assert_contract, cell_config
from threed.config.contract import Cell
for cell in (Cell("1f1b-eager", 1, "none", "none", "fp32", False, True, False),
             Cell("1f1b-eager", 3, "cpu", "full", "bf16", True, False, False)):
    config = cell_config(cell)
    assert Cell.of(config) == cell
    assert_contract(config, reference.run)
"""


def test_schedule():
    """Two cells of the contract, which the guide's row alone brings."""
    done = subprocess.run([sys.executable, "-c", SCHEDULE], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("others", [[], ["parallel.dp=2", "zero.stage=3"],
                                    ["precision.dtype=bf16", "parallel.tp=2"],
                                    ["parallel.tp=2", "parallel.sequence_parallel=true", "zero.stage=0"]])
def test_pass(others):
    """The guide's own test: the same bits, and a peak between those of the two policies."""
    config = tiny("parallel.pp=2", "parallel.schedule=gpipe", *others)
    before = make_plan(config)
    full = make_plan(tiny("parallel.pp=2", "parallel.schedule=gpipe", *others, "activation.policy=full"))
    with added_pass():
        half = make_plan(config)
    scope = {"Plan": Plan, "Config": Config, "same_bits": same_bits, "loopback": loopback, "stages": stages,
             "Analysis": Analysis}
    exec(code("pass")[2], scope)
    scope["test_half"](before, half, full, config)

"""`threed search`: the fast evaluator against the full plan, over 300 random layouts."""

from __future__ import annotations

import pytest

import threed
from tests.layouts import compared
from threed.prediction.hardware import Hardware

QUIET = ["train.eval_every=0", "checkpoint.every=0"]


@pytest.mark.parametrize("hardware", ["h100-sxm", "a100-sxm,adapter_gbps=25"])  # computation, and traffic
@pytest.mark.parametrize("name, layers, batch, most", [
    ("llama3-8b", 10, 64, 16), ("llama3-8b", 16, 256, 64), ("gpt2-small", 12, 64, 16)])
def test_fast_against_full(name, layers, batch, most, hardware):
    """The two agree within 2%."""
    base = threed.load(f"configs/{name}.yaml", [f"model.layers={layers}", f"train.global_batch_size={batch}",
                                                *QUIET])
    rows = list(compared(base, Hardware.parse(hardware), 11, 50, most))
    errors = sorted(row.error for row in rows)
    assert errors[len(errors) // 2] < 0.001 and errors[-1] < 0.02, max(rows, key=lambda row: row.error)

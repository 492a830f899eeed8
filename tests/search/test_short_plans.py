"""`threed search`: short plans against the full plan, over 300 random layouts."""

from __future__ import annotations

import pytest

import threed
from tests.layouts import QUIET, compared, full_s, short_s
from threed.layout_search.layout import Layout, config_of
from threed.prediction.hardware import Hardware


@pytest.mark.parametrize("hardware", ["h100-sxm", "a100-sxm,adapter_gbps=25"])  # computation, and traffic
@pytest.mark.parametrize("name, layers, batch, most", [
    ("llama3-8b", 10, 64, 16), ("llama3-8b", 16, 256, 64), ("gpt2-small", 12, 64, 16)])
def test_short_against_full(name, layers, batch, most, hardware):
    """The two agree within 2%."""
    base = threed.load(f"configs/{name}.yaml", [f"model.layers={layers}", f"train.global_batch_size={batch}",
                                                *QUIET])
    rows = list(compared(base, Hardware.parse(hardware), 11, 50, most))
    errors = sorted(row.error for row in rows)
    assert errors[len(errors) // 2] < 0.001 and errors[-1] < 0.02, max(rows, key=lambda row: row.error)


@pytest.mark.parametrize("layout", [
    Layout(1, 3, 2, "pp-dp-tp", "interleaved", 2, 2, False, 1, 2, None, None, "full"),
    Layout(4, 3, 8, "dp-pp-tp", "interleaved", 2, 1, True, 0, 8, None, None, "full", offload_optimizer=True)])
def test_a_last_turn_that_is_shorter(layout):
    """Where p does not divide the micro-batches, interleaved runs the last unit's last forwards before their
    backwards: they are computed again."""
    base = threed.load("configs/gpt2-small.yaml", ["train.global_batch_size=64", "model.layers=12"])
    hardware, config = Hardware.parse("h100-sxm"), config_of(layout, base)
    assert config.num_microbatches % layout.pp
    assert short_s(config, hardware) == pytest.approx(full_s(config, hardware), rel=0.005)

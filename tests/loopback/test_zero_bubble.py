"""`auto` on the pipelines of the zero-bubble paper: minutes of search that belong to make verify."""

from __future__ import annotations

import pytest

from threed.prediction.schedule_only import parse_times, predict_bare

# Qi et al. 2024 (zero bubble), tables 5 and 6: p, m, times, bubble rates of 1F1B, ZB-H1 (and of its search at
# 1x), ZB-H2, and of its search at 2x
PAPER = [
    (8, 24, "f=18.522,b=18.086,w=9.337,comm=0.601", 0.2431, 0.1585, 0.1083, 0.0433),
    (8, 32, "f=18.513,b=18.086,w=9.331,comm=0.626", 0.1985, 0.1242, 0.0837, 0.0039),
    (32, 96, "f=10.419,b=10.207,w=7.715,comm=0.408", 0.2646, 0.1421, 0.0641, 0.0038)]


@pytest.mark.parametrize("p, m, times, plain, h1, h2, searched", PAPER)
def test_zero_bubble_paper(p, m, times, plain, h1, h2, searched):
    """The paper's rates to four places; `auto` no worse than its search at 1x and 2x the memory."""
    def rate(name: str, limit: float | None = None) -> float:
        report = predict_bare(name, p, m, parse_times(times), None, limit and limit * p)
        assert limit is None or max(stage.peak_activations for stage in report.stages) <= limit * p
        return round(report.bubble_rate, 4)

    assert (rate("1f1b"), rate("zb-h1"), rate("zb-h2")) == (plain, h1, h2)
    assert rate("auto", 2) <= searched and rate("auto", 1) <= h1 / 2

"""Predictions beside steps that were measured on a GPU (bench/results/gpu.md), part by part: errors of parts
that cancel are none of a step."""

from __future__ import annotations

import pytest

from bench.foresight.published import Part, by_part, own


@pytest.fixture(scope="module")
def parts() -> list[Part]:
    return by_part(own("h100-sxm"))


def test_every_part(parts):
    """Within 5%, or 0.3 ms and the rounding of the table. (The steps of that day waited for the GPU in CLIP
    and between two steps: what the host took then is in no price.)"""
    units = [part for part in parts if part.part != "tail"]
    wrong = [part for part in units
             if abs(part.error) > 0.05 and abs(part.predicted_ms - part.measured_ms) > 0.305]
    assert len(units) == 4 * 6 and not wrong


def test_the_tail_is_no_longer_than_it_was(parts):
    tails = {part.model: part for part in parts if part.part == "tail"}
    assert len(tails) == 4
    assert all(0 < part.predicted_ms < part.measured_ms for part in tails.values())

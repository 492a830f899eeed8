"""`threed search` with keys that travel beside the computation: tried where there are any, and timed as the
whole plan is."""

from __future__ import annotations

from collections import defaultdict

import pytest

import threed
from tests.layouts import H100, QUIET, full_s
from threed.config.load import checked
from threed.layout_search.bounds import Bounds
from threed.layout_search.layout import Layout, config_of, fields_of
from threed.layout_search.short_plan import ShortPlans
from threed.layout_search.space import Space
from threed.planner import make_plan
from threed.prediction.peak import fullest, peaks
from threed.program.analysis import Analysis
from threed.schema import Config


def base(*overrides: str) -> Config:
    return threed.load("configs/llama3-8b.yaml", ["model.layers=4", "model.seq_len=32768",
                                                  "train.global_batch_size=8", *QUIET, *overrides])


@pytest.mark.parametrize("overrides, allowed", [
    ([], {False, True}), (["model.attention_dropout=0.1"], {False})])
def test_tried_where_keys_travel(overrides, allowed):
    config, tried = base(*overrides), defaultdict(set)
    for shape in Space(Bounds(config, H100), 4, {"tp": 1}, 1 << 36).shapes():
        tried[shape.cp, shape.cp_form].add(shape.cp_overlap)
    assert tried == {(1, "keys"): {False}, **{(cp, "keys"): allowed for cp in (2, 4)},
                     **{(cp, "heads"): {False} for cp in (2, 4)}}


def test_one_that_is_given():
    config = base("parallel.cp=4", "parallel.cp_overlap=true")
    fixed = fields_of(config, {"parallel.cp_overlap"})
    shapes = [*Space(Bounds(config, H100), 4, fixed, 1 << 36).shapes()]
    assert fixed == {"cp_overlap": True}
    assert all(shape.cp_overlap == (shape.cp > 1) for shape in shapes)
    assert any("cp 4 (keys, overlap)" in shape.text() for shape in shapes)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", [
    Layout(cp=4, dp=2, stage=3, shard_size=8, residency=1, reduce_every=1, policy="selective"),
    Layout(tp=2, sequence_parallel=True, cp=2, pp=2, schedule="zb-h1", dp=2, shard_size=4),
    Layout(cp=2, pp=2, dp=2, shard_size=4, schedule="interleaved", virtual_stages=2, policy="full")], ids=str)
def test_short_plans_are_right(layout, overlap):
    """What a search remembers of one is not told of the other."""
    both = {each: config_of(layout._replace(cp_overlap=each), base()) for each in (False, True)}
    short = {each: ShortPlans(config, H100) for each, config in both.items()}
    config, of = checked(both[overlap]), short[overlap]
    assert of.step_s() == pytest.approx(full_s(config, H100), rel=0.01)
    assert of.peak_bytes() == fullest(peaks(Analysis(make_plan(config)), H100)).total
    assert Bounds(base(), H100).step_s(layout._replace(cp_overlap=overlap)) <= 1.001 * of.free_s()


def test_pairs():
    """Forward's gathers hide, too."""
    layout = Layout(cp=8, pp=2, shard_size=8, schedule="zb-v", virtual_stages=2, cp_overlap=True)
    steps = []
    for pair in (False, True):
        config = config_of(layout._replace(pair=pair), base("train.global_batch_size=16"))
        steps.append(ShortPlans(config, H100).step_s())
        assert steps[-1] == pytest.approx(full_s(checked(config), H100), rel=0.02)
    assert layout.can_pair and steps[1] < steps[0]

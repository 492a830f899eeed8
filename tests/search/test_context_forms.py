"""`threed search` with context parallelism: both forms are tried where they can be, and timed as their whole
plans are."""

from __future__ import annotations

from collections import defaultdict

import pytest

import threed
from tests.layouts import H100, QUIET, full_s
from threed.config.load import checked
from threed.layout_search.best_first import Search
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


@pytest.mark.parametrize("kv_heads, allowed", [(8, {2, 4}), (2, {2}), (1, set())])
def test_both_forms_where_heads_are_enough(kv_heads, allowed):
    config = base(f"model.kv_heads={kv_heads}")
    forms = defaultdict(set)
    for shape in Space(Bounds(config, H100), 4, {"tp": 1}, 1 << 36).shapes():
        forms[shape.cp].add(shape.cp_form)
    assert forms == {cp: {"keys", "heads"} if cp in allowed else {"keys"} for cp in (1, 2, 4)}


def test_a_form_that_is_given():
    config = base("parallel.cp=4", "parallel.cp_form=heads")
    fixed = fields_of(config, {"parallel.cp", "parallel.cp_form"})
    shapes = [*Space(Bounds(config, H100), 4, fixed, 1 << 36).shapes()]
    assert fixed == {"cp": 4, "cp_form": "heads"} and shapes
    assert all((shape.cp, shape.cp_form) == (4, "heads") for shape in shapes)
    assert all("cp 4 (heads)" in shape.text() for shape in shapes)


def test_both_forms_are_found():
    fixed = {"tp": 1, "pp": 1, "cp": 4, "cp_overlap": False, "stage": 3, "policy": "selective",
             "micro_batch_size": 1}
    result = Search(base(), H100, 1 << 36).run(4, fixed)
    assert {found.layout.cp_form for found in result.timed} == {"keys", "heads"}


@pytest.mark.parametrize("form", ["keys", "heads"])
@pytest.mark.parametrize("layout", [
    Layout(cp=4, dp=2, stage=3, shard_size=8, residency=1, reduce_every=1, policy="selective"),
    Layout(tp=2, sequence_parallel=True, cp=2, pp=2, schedule="zb-h1", dp=2, shard_size=4),
    Layout(cp=2, dp=2, stage=3, shard_size=4, residency=1, reduce_every=1, tile_linears="64MiB")])
def test_short_plans_are_right(layout, form):
    """What search remembers of one form is not told of the other."""
    both = {each: config_of(layout._replace(cp_form=each), base()) for each in ("keys", "heads")}
    short = {each: ShortPlans(config, H100) for each, config in both.items()}
    config = checked(both[form])
    analysis = Analysis(make_plan(config))
    assert short[form].step_s() == pytest.approx(full_s(config, H100), rel=0.01)
    assert short[form].peak_bytes() == fullest(peaks(analysis, H100)).total
    bounds = Bounds(base(), H100)
    assert bounds.step_s(layout._replace(cp_form=form)) <= 1.001 * short[form].free_s()


@pytest.mark.parametrize("fixed, said", [
    ([], "without parallel.cp: "),
    (["parallel.cp_form=heads", "train.global_batch_size=2"], "without parallel.cp: "),
    (["parallel.cp_overlap=true"], "without parallel.cp: "),
    (["parallel.tp=1"], "without parallel.cp no layout can run"),  # more ranks than sequences
    (["parallel.cp=2"], ""), (["model.seq_len=8192"], "")])
def test_what_there_is_without(fixed, said):
    found = threed.search("configs/llama3-8b.yaml", 8, [
        "model.layers=2", "model.seq_len=65536", "train.global_batch_size=4", "parallel.pp=1", *fixed],
        "h100-sxm")
    assert found["without_cp"].startswith(said) and bool(found["without_cp"]) == bool(said)
    assert ("parallel.cp" in found["layouts"][0]["changes"]) == (fixed != ["model.seq_len=8192"])

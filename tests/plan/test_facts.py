"""The table: what layers hand on, and reductions over several groups."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import threed
from threed.base.errors import InputError
from threed.base.mesh import GROUPS, GroupRow
from threed.features.zero.plan import Sums, reductions
from threed.planner.auto import make_pipeline
from threed.planner.facts import hand_overs
from threed.planner.passes import stages_of
from threed.program.check import check
from threed.program.plan import Plan
from threed.spec.parameter import Share
from threed.spec.travel import Exchanged


def layer(name: str, reads: tuple[str, ...] = (), makes: tuple[str, ...] = (), **more: Any) -> Any:
    return SimpleNamespace(name=name, reads=reads, makes=lambda share: dict.fromkeys(makes, 4),
                           **{"without_grad": {}, "travels": {}, "spent": (), **more})


@pytest.mark.parametrize("names", [("act",), ("rad",), ("part",), ("shard",), ("kip", "gkip")])
def test_names_of_slots_are_taken(names):
    """A handed tensor, or its gradient, in the slot of something else: wrong bytes, or a correct program that
    is refused."""
    units = [[layer("blocks.0", makes=names)], [layer("blocks.1", reads=names)]]
    with pytest.raises(InputError, match=f"a tensor called '{names[0]}'.*give the tensor another name"):
        hand_overs(units, Share(), {})


def test_nobody_makes_it():
    with pytest.raises(InputError, match=r"layer blocks\.1 reads 'gate', which no layer before it makes"):
        hand_overs([[layer("blocks.0")], [layer("blocks.1", reads=("gate",))]], Share(), {})


@pytest.mark.parametrize("others, spent", [([], True), ([layer("c", ("came",))], False),
                                           ([layer("c", ("came",), spent=("came",))], True)])
def test_spent_by_all_layers_of_a_unit(others, spent):
    units = [[layer("a", makes=("rows",), travels={"rows": Exchanged("came", "dp")})],
             [layer("b", ("came",), spent=("came",)), *others]]
    _, (_, (read,)) = hand_overs(units, Share(), {"dp": 2})
    assert read.came and read.spent == spent


def test_partial_gradients_over_two_groups(monkeypatch):
    """Two groups whose ranks hold parts of one gradient, as tensor and context parallelism together have:
    the second sums what the first has summed, in place."""
    monkeypatch.setitem(GROUPS, "cp", GroupRow(("tp",), "tp", "compute"))
    config = threed.load(None, ["parallel.dp=2", "parallel.pp=2", "parallel.tp=2", "zero.stage=2",
                                "train.global_batch_size=8"])
    pipeline, plan = make_pipeline(config), threed.plan(config)
    parameters = {}
    for p, unit in plan.table.parameters.items():
        sums = Sums({"tp": (2, 8), "cp": (2, 8)}, unit.numel // unit.shards, 1, len(unit.positions))
        chain = reductions(unit.numel, unit.shards, unit.shard_group, sums, plan.table.elements)
        assert [(step.takes, step.makes) for step in chain[:3]] == [("wgrad", "wsum"), ("wsum", "wsum"),
                                                                    ("wsum", chain[2].makes)]
        parameters[p] = replace(unit, reductions=chain)
    table = replace(plan.table, parameters=parameters)
    _, programs = stages_of(config, pipeline, table, "train")[-1]
    check(Plan(table, {"train": [tuple(program) for program in programs]}, config))
    without = [[item for item in program if item.group != "tp"] for program in programs]
    with pytest.raises(threed.ThreedError):
        check(Plan(table, {"train": [tuple(program) for program in without]}, config))

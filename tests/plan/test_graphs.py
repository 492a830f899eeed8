"""Which instructions share a CUDA graph, and in which memory."""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.harness import schedule_config, tiny
from threed.api import plans as api
from threed.planner import analyse
from threed.planner.from_config import analysed
from threed.program.effects import effects
from threed.program.graphs import graphs
from threed.program.instruction import COMPUTE, PARAMETER_KINDS
from threed.program.plan import Plan
from threed.schedules.orders import SCHEDULES


def passes(plan: Plan, position: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(stage, micro-batch) -> the first instruction that computes, and the last that uses what was made."""
    table, spans, maker = plan.table, {}, {}
    for index, item in enumerate(plan.programs["train"][position]):
        effect = effects(item, table, position)
        if item.op in COMPUTE:
            which = table.units[item.unit].stage, item.microbatch
            spans[which] = spans.get(which, (index, index))[0], index
            maker |= {slot: which for slot in (*effect.writes, *effect.adds)
                      if slot.kind not in (*PARAMETER_KINDS, "loss")}
        for slot in (*effect.reads, *effect.frees):
            if slot in maker:
                spans[maker[slot]] = spans[maker[slot]][0], index
    return spans


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_passes_that_are_alive_together(schedule):
    """They have memory of their own. And no more memory than there must be."""
    analysis = analyse(schedule_config(schedule, 2, 1, 1, "3p+1"))
    plan = analysis.plan
    for position, program in enumerate(plan.programs["train"]):
        found, spans = graphs(analysis, position), passes(plan, position)
        set_of = {}
        for index, turn in found.turns.items():
            which = turn.key.stage, program[index].microbatch
            assert set_of.setdefault(which, turn.key.set) == turn.key.set
        for a, b in combinations(spans, 2):
            if a[0] == b[0] and spans[a][0] <= spans[b][1] and spans[b][0] <= spans[a][1]:
                assert set_of[a] != set_of[b], (a, b)
        for stage in {stage for stage, _ in spans}:
            mine = [span for (other, _), span in spans.items() if other == stage]
            together = max(sum(first <= at <= last for first, last in mine) for at, _ in mine)
            assert len({home for home in found.peaks if home[0] == stage}) == together
        assert set(found.turns) == {index for index, item in enumerate(program) if item.op in COMPUTE}


def test_one_forward_one_backward():
    """As many sets as micro-batches in flight. The first micro-batch begins a gradient, the others add."""
    analysis = analyse(tiny("parallel.pp=4", "model.layers=6", "parallel.schedule=1f1b"))
    found = [graphs(analysis, position) for position in range(4)]
    assert [len(each.peaks) for each in found] == [4, 3, 2, 1]
    assert [len({turn.key.variant for turn in each.turns.values()}) for each in found] == [2] * 4
    assert [each.count for each in found] == [2 * 2 * (sets + 1) for sets in (4, 3, 2, 1)]


def test_buffers_are_those_of_a_variant():
    """Under ZeRO-3 with an odd number of uses, a unit's parameters are in another buffer each time."""
    found = graphs(analyse(tiny("zero.stage=3", "zero.residency=2", "parallel.dp=2", "model.layers=5",
                                "train.global_batch_size=8")), 0)
    assert 1 < len({turn.key.variant for turn in found.turns.values()}) <= 4
    assert len(found.peaks) == 1


def test_what_check_says():
    config = tiny("parallel.pp=2", "run.cuda_graphs=true")
    assert [row["graph_sets"] for row in api.check(config)["stages"]] == [2, 1]
    text = api.show_check(analysed(config), config)
    assert "CUDA graphs: pp0 24 in 2 sets of buffers, pp1 16 in 1 set" in text

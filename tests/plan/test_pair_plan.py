"""Plans with parallel.pair: what is refused, drawn, gathered, and by which costs pairs are put in order."""

from __future__ import annotations

import pytest

import threed
from threed.base.errors import ConfigError
from threed.planner import analyse, make_plan
from threed.planner.facts import FLOPS_A_BYTE, FLOPS_A_FAR_BYTE
from threed.program.analysis import Analysis
from threed.program.costs import save_costs
from threed.program.instruction import Op
from threed.program.pairs import cost_in_pair, has_pairs
from threed.program.show import grid, legend
from threed.program.summary import stages
from threed.schedules.orders import SCHEDULES, Schedule, one_f_one_b

TOY, PAIR = "configs/toy-moe.yaml", "parallel.pair=true"
LAYERS = ["model.layers=16", "model.tie_embeddings=false", "parallel.tp=1",
          "parallel.sequence_parallel=false"]


def toy(*overrides: str):
    return threed.load(TOY, [PAIR, *overrides])


@pytest.mark.parametrize("path, overrides, says", [
    (TOY, ["parallel.schedule=gpipe"], r"all of a group \(gpipe, breadth-first, vertical\), has"),
    (TOY, ["parallel.schedule=breadth-first", "parallel.virtual_stages=2"], "runs all forwards first"),
    (TOY, ["parallel.ep=1"], "none travels here: raise parallel.ep, or leave it out"),
    ("configs/toy.yaml", [], "none travels here: leave it out"),
])
def test_refused(path, overrides, says):
    with pytest.raises(ConfigError, match=says):
        threed.load(path, [PAIR, *overrides])


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_a_budget_of_what_full_keeps(schedule):
    """It was refused, with the message that as much as the budget, or less, was kept with all recomputed."""
    def most(*overrides: str) -> int:
        plan = analyse(toy("model.layers=2", "parallel.tp=1", "parallel.sequence_parallel=false",
                           "train.micro_batch_size=1", "train.global_batch_size=8",
                           f"parallel.schedule={schedule}", *overrides))
        return max(row.activation_peak_bytes for row in stages(plan))

    least = most("activation.policy=full")
    assert most("activation.policy=budget", f"activation.budget={least}") <= least


def test_a_schedule_of_a_script_is_refused(monkeypatch):
    """A row that a script adds says of itself whether it has pairs."""
    monkeypatch.setitem(SCHEDULES, "mine", Schedule(one_f_one_b, paired=False))
    with pytest.raises(ConfigError, match=r"parallel\.pair=true"):
        toy("parallel.schedule=mine")


def test_one_more_forward_ahead():
    for name, row in SCHEDULES.items():
        assert callable(row.paired) == (name in ("1f1b", "zb-h1"))
    assert [[*row[:3]] for row in one_f_one_b(2, 3, more=1)] == [
        [("F", 0, 0), ("F", 0, 1), ("F", 0, 2)], [("F", 1, 0), ("F", 1, 1), ("B", 1, 0)]]


def test_drawn():
    """A cell has a forward and a backward; below each position is what it exchanges."""
    paired, alone = (analyse(threed.load(TOY, ["parallel.schedule=dualpipe-v", *more]))
                     for more in ([PAIR], []))
    for analysis, mixed in ((paired, True), (alone, False)):
        rows = grid(analysis).splitlines()
        assert [row[:6].strip() for row in rows] == ["pp0", "ep", "pp1", "ep"]
        assert any("F3B1" in row for row in rows) == mixed
        assert "all exchanges of a forward or a backward as 1" in legend(analysis.plan)
    plain = grid(analyse(threed.load("configs/toy.yaml"))).splitlines()
    assert [row[:6].strip() for row in plain] == ["pp0", "pp1"]


@pytest.mark.parametrize("more, each", [
    (["parallel.dp=2", "parallel.ep=2"], FLOPS_A_BYTE),
    (["parallel.dp=16", "parallel.ep=16", "model.experts=16", "train.global_batch_size=128"],
     FLOPS_A_FAR_BYTE)])
def test_costs(more, each):
    """FLOPs of a rank's share, and a byte to another rank of a node or of another node."""
    table = make_plan(toy(*LAYERS, *more)).table
    assert table.pair is not None
    unit, (forward, first, second) = table.units[1], table.pair.units[1]
    per_flop = (forward + first + second) / (3 * (unit.forward_flops + 1))
    assert table.pair.byte["ep"] == pytest.approx(each * per_flop, rel=0.01)
    items = make_plan(toy(*LAYERS, *more)).programs["train"][0]
    exchange = next(item for item in items if item.op == Op.EXCHANGE and item.kind == "routed")
    compute = next(item for item in items if item.op == Op.FORWARD and item.unit == 1)
    assert cost_in_pair(exchange, table) > 0 and cost_in_pair(compute, table) == forward


def test_units_of_both_are_resident():
    """zero.residency=1 is one unit of the forward and one of the backward: none is gathered twice for it."""
    more = [*LAYERS, "zero.stage=3", "parallel.schedule=dualpipe-v", "parallel.dp=4",
            "train.global_batch_size=64"]
    counts = []
    for pair in ("true", "false"):
        program = make_plan(threed.load(TOY, [*more, f"parallel.pair={pair}"])).programs["train"][0]
        counts.append(sum(item.op == Op.GATHER and not item.of_slot for item in program))
    assert counts[0] <= counts[1]


def test_memory_under_recomputation():
    """Units are computed again one ahead, whether or not those between them are."""
    config = ["model.name=mixtral-8x7b", "model.layers=8", "model.seq_len=4096", "train.global_batch_size=32",
              "parallel.pp=2", "parallel.dp=4", "parallel.ep=4", "parallel.schedule=interleaved",
              "parallel.virtual_stages=2", "zero.stage=1", "activation.policy=full"]
    plain, paired = (stages(Analysis(threed.plan(threed.load("configs/llama3-8b.yaml", [*config, *more]))))
                     for more in ([], [PAIR]))
    for row, other in zip(plain, paired, strict=True):
        assert other.activation_peak_bytes < 2 * row.activation_peak_bytes


def test_measured_costs(tmp_path):
    """By the times of a run: an exchange costs as much of them as of FLOPs."""
    plan = make_plan(toy(*LAYERS))
    ops = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
    costs = {(0, op, unit): 1e-3 for unit in range(len(plan.table.units)) for op in ops}
    save_costs(tmp_path / "costs.json", costs, "", 1)
    table = make_plan(toy(*LAYERS, f"parallel.costs={tmp_path}")).table
    assert table.pair is not None and set(table.pair.units) == {(1e-3, 1e-3, 1e-3)}
    flops = sum(3 * (unit.forward_flops + 1) for unit in table.units)
    assert table.pair.byte["ep"] == pytest.approx(FLOPS_A_BYTE * 3e-3 * len(table.units) / flops)


def test_one_micro_batch_has_none():
    plan = make_plan(toy("train.global_batch_size=8"))
    assert plan.table.num_microbatches == 1
    assert not any(has_pairs(program, plan.table) for program in plan.programs["train"])

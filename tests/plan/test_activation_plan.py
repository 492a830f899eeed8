"""What activation policies put into a plan, and which they refuse. No torch."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from threed.base.errors import ConfigError, InputError
from threed.base.quantity import show_bytes
from threed.config.load import load
from threed.config.validate import warnings
from threed.features.activation import plan as activation
from threed.planner import analyse, make_pipeline, make_plan, make_table, unit_costs
from threed.planner.passes import run_passes
from threed.prediction.analytic import cost as analytic_cost
from threed.prediction.hardware import Hardware
from threed.prediction.prices import Prices
from threed.program.analysis import Analysis
from threed.program.check import check
from threed.program.instruction import Instruction, Op, Slot
from threed.program.plan import Plan
from threed.program.summary import stages
from threed.program.traffic import sent_by
from threed.schema import Config

TOY = ["model.layers=6", "model.hidden=64", "model.heads=4", "model.seq_len=32", "model.vocab=128",
       "train.global_batch_size=8",
       "train.micro_batch_size=1", "parallel.pp=2"]
FULL = ["activation.policy=full"]


def config_of(*others: str) -> Config:
    return load(None, [*TOY, *others])


def plan_of(*others: str) -> Plan:
    return make_plan(config_of(*others))


SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v", "breadth-first"]
WAYS = {
    "all": [], "every-2": ["activation.every=2"], "every-3": ["activation.every=3"],
    "partition": ["activation.partition=true"], "cpu": ["activation.offload=cpu"],
    "contiguous": ["activation.contiguous=true"],
    "partition-cpu": ["activation.partition=true", "activation.offload=cpu"],
    "partition-contiguous": ["activation.partition=true", "activation.contiguous=true"],
}
CELLS = list(itertools.product(SCHEDULES, WAYS, (1, 3)))


def full(schedule: str, way: str, zero: int) -> list[str]:
    virtual = ["parallel.virtual_stages=2"] if schedule in ("interleaved", "breadth-first") else []
    return [f"parallel.schedule={schedule}", *virtual, "parallel.tp=2", f"zero.stage={zero}", *FULL,
            *WAYS[way]]


@pytest.mark.parametrize("schedule, way, zero", CELLS, ids=lambda value: str(value))
def test_passes(schedule, way, zero):
    """One RECOMPUTE too many or too few, or one before the wrong half of backward; a RELEASE without its
    GATHER; a FETCH of an input that was never offloaded, or after the input's use."""
    plan = plan_of(*full(schedule, way, zero))
    table = plan.table
    for program in plan.programs["train"]:
        at = {item[:3]: index for index, item in enumerate(program)}
        count = Counter((item.op, item.kind) for item in program)
        kept = {item[1:3] for item in program if item.keep == "input"}
        assert kept == {item[1:3] for item in program
                        if item.op == Op.RECOMPUTE} and len(kept) == count[Op.RECOMPUTE, ""]
        assert kept and all(table.units[u].recompute for u, _ in kept)
        inner = {key for key in kept if key[0] > 0}
        parts = {item[1:3] for item in program if item.op == Op.RELEASE and item.of_slot}
        assert parts == {item[1:3] for item in program
                         if item.op == Op.GATHER and item.of_slot} == (inner if "partition" in way else set())
        kind = "kpart" if "partition" in way else "kept"
        away = {item[1:3] for item in program if item.op == Op.OFFLOAD}
        assert away == {item[1:3] for item in program if item.op == Op.FETCH} and away <= inner
        assert count[Op.OFFLOAD, kind] == count[Op.FETCH, kind] == len(away) and bool(away) == ("cpu" in way)
        for u, m in kept:
            first = at.get((Op.BACKWARD, u, m), at.get((Op.BACKWARD_INPUT, u, m)))
            order = [at[Op.FORWARD, u, m], *(at[op, u, m] for op, those in (
                (Op.RELEASE, parts), (Op.OFFLOAD, away), (Op.FETCH, away),
                (Op.GATHER, parts)) if (u, m) in those),
                at[Op.RECOMPUTE, u, m], first]
            assert order == sorted(order), (u, m)
        ahead = [(u, m) for op, u, m, *_ in program if op == Op.RECOMPUTE and u > 0]
        for before, (u, m) in zip(ahead, ahead[1:]):  # one ahead: sooner, it would lie on the device for long
            if (u, m) in away and before in away:
                assert at[Op.FETCH, u, m] > at[Op.FETCH, before[0], before[1]]


def test_not_where_backward_follows_at_once():
    """A unit whose backward follows its forward directly keeps everything: the last unit of 1F1B is marked,
    and never recomputed."""
    plan = plan_of(*FULL)
    last = plan.table.last
    assert plan.table.units[last].recompute
    assert not any(item.op == Op.RECOMPUTE and item.unit == last for item in plan.programs["train"][1])
    table = make_table(config_of(*FULL), (0, 1))
    table = activation.mark(table, {1})
    f, g, b = (Instruction(op, 1, m) for op, m in ((Op.FORWARD, 0), (Op.FORWARD, 1), (Op.BACKWARD, 0)))
    assert activation.recompute([[f, b]], table) == [[f, b]]
    marked = [f._replace(keep="input"), g._replace(keep="input"), Instruction(Op.RECOMPUTE, 1, 0), b]
    assert activation.recompute([[f, g, b]], table) == [marked]


def test_which_units():
    """`every` that counts from the wrong unit; a unit that is recomputed although it keeps no more than its
    input."""
    for every in (1, 2, 3):
        table = plan_of(*FULL, f"activation.every={every}").table
        for u, unit in enumerate(table.units):
            assert unit.recompute == (u % every == 0 and unit.saved_bytes > table.size(Slot("kept", u)))
    assert not any(unit.recompute for unit in plan_of("activation.policy=selective").table.units)


def most_taken(plan: Plan, position: int, name: str) -> Counter[int]:
    """Elements -> the most buffers of that size in use at one time, by the ops that take and return them."""
    table, taken, most = plan.table, set(), Counter()
    for item in plan.programs["train"][position]:
        slot = Slot(name.removeprefix("host_"), item.unit, item.microbatch)
        cut, gathered = ((item.op, item.of_slot) == (op, True) for op in (Op.RELEASE, Op.GATHER))
        takes = {"kept": item.keep == "input", "kpart": cut}.get(name, item.op == Op.OFFLOAD)
        gives = {"kept": item.op == Op.RECOMPUTE, "kpart": gathered}.get(name, item.op == Op.FETCH)
        if takes and item.unit > 0:
            taken.add(slot)
        elif gives and item.unit > 0:
            taken.remove(slot)
        most |= Counter(table.size(slot) // table.elements.param for slot in taken)
    return most


@pytest.mark.parametrize("schedule, way", list(itertools.product(SCHEDULES, WAYS)))
def test_pools_are_as_large_as_needed(schedule, way):
    """An arena or a host's pool that would run out in the middle of a step, or one larger than is ever
    used."""
    plan = plan_of(*full(schedule, way, 1))
    analysis = Analysis(plan)
    for position in range(2):
        pools = analysis.buffers(position)
        kind = "kpart" if "partition" in way else "kept"
        assert pools.kept == (most_taken(plan, position, kind) if "contiguous" in way else {})
        assert pools.host_kept == (most_taken(plan, position, f"host_{kind}") if "cpu" in way else {})


# ---------------------------------------------------------------- budget

def every_choice(config: Config) -> list[tuple[int, float]]:
    """Peak bytes and cost of each subset of the units that may be recomputed; that of none first."""
    pipeline = make_pipeline(config)
    table, costs = make_table(config, pipeline.place), unit_costs(config)
    units = activation.worthwhile(table)
    subsets = [set(some) for n in range(len(units) + 1) for some in itertools.combinations(units, n)]
    plans = (run_passes(config, pipeline, activation.mark(table, some)) for some in subsets)
    return [(max(row.activation_peak_bytes for row in stages(Analysis(plan))),
             sum(costs[u][0] for u in some))
            for plan, some in zip(plans, subsets)]


BUDGETS = {
    "1f1b": ["parallel.schedule=1f1b"], "gpipe": ["parallel.schedule=gpipe"],
    "zb-h1": ["parallel.schedule=zb-h1"],
    "alone": ["parallel.pp=1"], "interleaved": ["parallel.schedule=interleaved", "parallel.virtual_stages=2"],
    "uneven": ["parallel.stage_units=[2,5]"], "dropout": ["model.dropout=0.1", "parallel.schedule=gpipe"],
    "partition": ["parallel.tp=2", "activation.partition=true"],
}


@pytest.mark.parametrize("name", BUDGETS)
def test_budget(name):
    """A choice above the budget, or dearer than it needs to be: against all subsets of units."""
    config = config_of("activation.policy=budget", "activation.budget=1TiB", "train.global_batch_size=4",
                       "model.layers=5", *BUDGETS[name])
    every, costs = every_choice(config), unit_costs(config)
    least, most = min(peak for peak, _ in every), every[0][0]
    assert least < most
    for budget in (most, most - 1, *sorted(random.Random(3).sample(range(least, most), 6)), least):
        config.activation.budget = str(budget)
        plan = make_plan(config)
        peak = max(row.activation_peak_bytes for row in stages(Analysis(plan)))
        cost = sum(costs[u][0] for u, unit in enumerate(plan.table.units) if unit.recompute)
        cheapest = min(cost for peak, cost in every if peak <= budget)
        assert peak <= budget and cost == cheapest, (budget, cost / cheapest if cheapest else cost)
    config.activation.budget = str(least - 1)
    with pytest.raises(InputError, match="with every unit recomputed") as error:
        make_plan(config)
    assert show_bytes(least) in str(error.value)


def test_budget_that_another_position_meets_late():
    """A position keeps less once another one recomputes, too: then its messages come later."""
    others = [*("model.layers=2", "model.hidden=16", "model.seq_len=8", "model.tie_embeddings=false"),
              *("model.vocab=30", "model.vocab_multiple=16", "zero.shard_size=2"),
              *("parallel.dp=2", "parallel.tp=2", "zero.stage=3", "train.global_batch_size=6"),
              *("parallel.schedule=breadth-first", "parallel.virtual_stages=2"),
              *("model.lora_rank=1", "model.lora_targets=[down_proj]")]
    everything = plan_of(*others, *FULL)
    least = max(row.activation_peak_bytes for row in stages(Analysis(everything)))
    plan = plan_of(*others, "activation.policy=budget", f"activation.budget={least}")
    assert max(row.activation_peak_bytes for row in stages(Analysis(plan))) == least


def test_budget_above_everything_changes_nothing():
    """A generous budget that recomputes all the same."""
    assert plan_of("activation.policy=budget", "activation.budget=1TiB").programs == plan_of().programs


# ---------------------------------------------------------------- prices

def test_prices():
    """RECOMPUTE that is predicted to be free: it costs a forward, in time and in traffic. GATHER costs an
    all-gather of the input, and RELEASE a copy of a part of it."""
    plan = plan_of(*FULL, "activation.partition=true", "parallel.tp=2")
    cost, table = analytic_cost(plan, Hardware()), plan.table
    copied_s = Prices(Hardware(), 4).moved(table.act_bytes)  # it reads the half of it, and writes it
    for item in plan.programs["train"][0]:
        if item.op == Op.RECOMPUTE:
            forward = Instruction(Op.FORWARD, item.unit, item.microbatch)
            assert cost(0, item) == cost(0, forward) > 0 and sent_by(table, item) == sent_by(table, forward)
        elif item.op == Op.GATHER and item.of_slot:
            assert sent_by(table, item) == {"tp": table.act_bytes // 2} and cost(0, item) > 0
        elif item.op == Op.RELEASE and item.of_slot:
            assert not sent_by(table, item) and cost(0, item) == copied_s


# ---------------------------------------------------------------- refusals

@pytest.mark.parametrize("overrides, said", [
    (["activation.policy=most"], "must be one of none, full, selective, budget"),
    (["activation.offload=nvme", *FULL], "must be one of none, cpu"),
    (["activation.every=2"], "needs activation.policy=full, and it is none"),
    (["activation.policy=budget", "activation.budget=1GiB", "activation.every=2"],
     "needs activation.policy=full"),
    ([*FULL, "activation.every=0"], "activation.every=0: must be at least 1"),
    (["activation.policy=full", "activation.every=1.5"], "activation.every"),
    (["activation.pieces=[norm]"], "needs activation.policy=selective or budget, and it is none"),
    ([*FULL, "activation.pieces=[norm]"], "needs activation.policy=selective or budget, and it is full"),
    (["activation.policy=selective", "activation.pieces=[]"], "must be some of attention, norm, mlp_act"),
    (["activation.policy=selective", "activation.pieces=[norm,softmax]"],
     "must be some of attention, norm, mlp_act"),
    (["activation.budget=1GiB"], "needs activation.policy=budget, and it is none"),
    ([*FULL, "activation.budget=1GiB"], "needs activation.policy=budget, and it is full"),
    (["activation.policy=budget"], "needs activation.budget"),
    (["activation.policy=budget", "activation.budget=much"], "activation.budget: "),
    (["activation.policy=budget", "activation.budget=-1GiB"], "activation.budget: "),
    (["activation.partition=true"], "only a unit that is recomputed has a kept input"),
    (["activation.offload=cpu"], "only a unit that is recomputed has a kept input"),
    (["activation.contiguous=true"], "only a unit that is recomputed has a kept input"),
    (["activation.policy=selective", "activation.partition=true"], "needs activation.policy=full or budget"),
    (["activation.policy=selective", "activation.offload=cpu"], "needs activation.policy=full or budget"),
    (["activation.recompute=true"], "activation.recompute"),
])
def test_refusals(overrides, said):
    """A setting without meaning under the policy, or a wrong value: one problem alone, with the reason."""
    with pytest.raises(ConfigError) as error:
        config_of("parallel.tp=2", *overrides)
    assert said in str(error.value) and len(error.value.problems) == 1


@pytest.mark.parametrize("others, said", [
    (["parallel.tp=1"], "nobody to share"),
    (["parallel.tp=2", "parallel.sequence_parallel=true"], "cut kept inputs over tp already"),
])
def test_partition_without_effect(others, said):
    """Partitioned activations with sequence parallelism, or alone: a warning, and a plan without RELEASE and
    GATHER of slots."""
    config = config_of(*FULL, "activation.partition=true", *others)
    assert any("activation.partition=true does nothing here" in line and said in line
               for line in warnings(config))
    plan = make_plan(config)
    assert not any(item.of_slot for program in plan.programs["train"] for item in program)
    check(plan)
    assert not any("partition" in line
                   for line in warnings(config_of(*FULL, "activation.partition=true", "parallel.tp=2")))


def test_contiguous_without_effect():
    """An arena on the device that nobody uses, since kept inputs go to the host: a warning."""
    config = config_of(*FULL, "activation.contiguous=true", "activation.offload=cpu")
    assert any("activation.contiguous=true does nothing here" in line for line in warnings(config))
    assert not any(analyse(config).buffers(position).kept for position in range(2))

"""The shape of each schedule: its picture (golden), its bubble, and how many micro-batches it keeps alive."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from textwrap import indent

import pytest

from threed import show
from threed.base.errors import InputError, PlanError
from threed.config.load import load
from threed.features.pipeline.plan import communicate, expand
from threed.planner import make_plan, make_table
from threed.prediction.schedule_only import Times, predict_bare
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Op
from threed.program.link import link, memory
from threed.program.seam import seam_of
from threed.program.show import grid, legend, timeline, unit_cost
from threed.program.walk import Mode, walk
from threed.schedules import orders
from threed.schedules.orders import SCHEDULES, Task, can_run, gpipe, one_f_one_b
from threed.schedules.timed import StageTimes, play

UNIT = Times(1.0, 1.0, 1.0)
GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 4), (4, 2), (4, 8), (8, 5), (8, 16), (4, 13)]
PLAIN = ("gpipe", "1f1b")
CASES = [(name, v) for name, schedule in SCHEDULES.items()
         for v in ([schedule.virtual] if schedule.virtual else [2, 3])]


def make(name: str, p: int, m: int, v: int):
    """The order of a schedule, or a skip where it refuses the count of micro-batches."""
    if m < SCHEDULES[name].least(p):
        pytest.skip(f"{name} needs {SCHEDULES[name].least(p)} micro-batches")
    return SCHEDULES[name].make(p, m, v), SCHEDULES[name].place(p, v)


def plan_of(schedule: str, p: int, m: int, *others: str):
    """Stages of equal cost: four units each, so that a quarter of a stage is exact in binary."""
    return make_plan(load(None, [f"model.layers={4 * p - 2}", f"parallel.pp={p}",
                                 f"parallel.schedule={schedule}",
                                 f"train.global_batch_size={m}", f"parallel.stage_units={[4] * p}", *others]))


@pytest.mark.parametrize("name, v", CASES)
@pytest.mark.parametrize("p, m", SIZES)
def test_every_task_once(name, v, p, m):
    """A micro-batch that is left out, comes twice, goes backward before forward, or on another position than
    its stage's."""
    order, place = make(name, p, m, v)
    seen = Counter(task for tasks in order for task in tasks)
    assert max(seen.values()) == 1 and can_run(order)
    for stage in range(p * v):
        for k in range(m):
            kinds = "".join(kind for kind in "FBIW" if Task(kind, stage, k) in seen)
            assert kinds in ("FB", "FIW"), (stage, k, kinds)
    assert all(place[task.stage] == position for position, tasks in enumerate(order) for task in tasks)


def test_refused_counts():
    """The one schedule that refuses a count says which count it needs."""
    with pytest.raises(InputError,
                       match=r"dualpipe-v needs 8 micro-batches for parallel\.pp=4, and there are 7"):
        make_plan(load(None, ["model.layers=8", "parallel.pp=4", "parallel.schedule=dualpipe-v",
                              "train.global_batch_size=7"]))


def test_shapes():
    """GPipe: all forward, then all backward. 1F1B: p - rank - 1 ahead, then by turns, then what is left."""
    def kinds(order: list) -> list[str]:
        return ["".join(task.kind for task in tasks) for tasks in order]

    assert kinds(gpipe(2, 3)) == ["FFFBBB"] * 2
    assert kinds(one_f_one_b(3, 4)) == ["FFFBFBBB", "FFBFBFBB", "FBFBFBFB"]
    assert kinds(one_f_one_b(4, 2)) == ["FFBB", "FFBB", "FFBB", "FBFB"]


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (4, 13), (8, 16), (8, 24)])
def test_peak_activations(p, m):
    """What a schedule keeps on the fullest position, in micro-batches of its whole share."""
    def peak(name: str, v: int = 1) -> float:
        report = predict_bare(name, p, m, UNIT, v if v > 1 else None)
        return max(stage.peak_activations for stage in report.stages)

    assert peak("gpipe") == m
    assert peak("1f1b") == peak("zb-h1") == peak("zb-v") == p
    assert peak("zb-h2") == min(m, 2 * p - 1)
    assert peak("breadth-first", 2) == m
    if m % p == 0 and m > p:
        assert peak("interleaved", 2) == pytest.approx(p * (1 + (p - 1) / (2 * p)))  # Korthikanti et al. 2022


@pytest.mark.parametrize("schedule", PLAIN)
@pytest.mark.parametrize("p, m", SIZES)
def test_alive_micro_batches(schedule, p, m):
    """The memory meter on whole plans: m under GPipe, p - rank under 1F1B."""
    plan = plan_of(schedule, p, m)
    for position, program in enumerate(plan.programs["train"]):
        table, seam = plan.table, seam_of(plan.table, position)
        saved = memory(program, table, link(program, table, position, seam), seam).peak("saved")
        stage = sum(table.units[unit].saved_bytes for unit in table.units_of(position))
        assert saved == stage * (m if schedule == "gpipe" else min(m, p - position))


@pytest.mark.parametrize("schedule", PLAIN)
@pytest.mark.parametrize("p, m", SIZES)
@pytest.mark.parametrize("backward", [1, 2])
def test_bubble(schedule, p, m, backward):
    """With equal stages and free messages the idle share is exactly (p - 1) / (m + p - 1), on every
    position."""
    plan = plan_of(schedule, p, m)
    programs, table = plan.programs["train"], plan.table
    links = [link(program, table, position, seam_of(table, position))
             for position, program in enumerate(programs)]
    whole = unit_cost(table)

    def cost(position, instruction):
        return whole(position, instruction) * (backward / 2 if instruction.op == Op.BACKWARD else 1)

    when = walk(programs, links, Mode.BUFFERED, cost)
    assert when.total_s == (1 + backward) * (m + p - 1) and not when.stuck
    for position, program in enumerate(programs):
        busy = sum(cost(position, instruction) for instruction in program)
        assert 1 - busy / when.total_s == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
        assert all(0 <= a <= b for a, b in zip(when.start[position], when.end[position]))


@pytest.mark.parametrize("p, m", [(2, 4), (4, 8), (4, 12), (8, 16), (8, 32)])
def test_bubble_rates(p, m):
    """The closed formulas, in the zero-bubble paper's measure, for F = B = W and free messages."""
    def rate(name: str, v: int | None = None) -> float:
        return predict_bare(name, p, m, UNIT, v).bubble_rate

    assert rate("gpipe") == pytest.approx((p - 1) / (m + p - 1)) == rate("1f1b")
    for v in (2, 4):
        assert rate("interleaved", v) == pytest.approx((p - 1) / (v * m + p - 1)) == rate("breadth-first", v)
    assert rate("zb-h1") == pytest.approx((p - 1) / (3 * m + p - 1))
    assert rate("zb-v") == pytest.approx(0.0, abs=1e-12) == rate("zb-h2")
    plain = (p - 1) / (m + p - 1)
    assert rate("v-half") <= 0.6 * plain and rate("v-min") <= 0.75 * plain


@pytest.mark.parametrize("p, m", [(1, 1), (2, 1), (3, 5), (4, 2), (5, 20), (6, 18), (7, 40), (8, 24), (9, 30),
                                  (12, 36)])
def test_less_memory(p, m):
    """v-half keeps floor(p / 2) + 1 micro-batches and v-min floor((p + 4) / 3), at most."""
    for name, most in (("v-half", p // 2 + 1), ("v-min", (p + 4) // 3)):
        order, place = make(name, p, m, 2)
        peak = play(order, place, StageTimes.equal(2 * p, (1.0, 1.0, 1.0), 2)).peak / 2
        assert peak <= min(m, most) and (m < 3 * p or peak == most)


def test_blocks_fit():
    """Building blocks in which tasks of a position fall on the same slot are refused by an assertion."""
    for p in range(1, 40):
        assert can_run(orders.v_half(p, 2)) and can_run(orders.v_min(p, 2))


def test_messages_overlap_with_compute():
    """A host that waits for each message would show here: BLOCKING takes longer than BUFFERED, and both
    end."""
    plan = plan_of("1f1b", 4, 8)
    programs, table = plan.programs["train"], plan.table
    links = [link(program, table, position, seam_of(table, position))
             for position, program in enumerate(programs)]
    times = [walk(programs, links, mode, unit_cost(table)).total_s for mode in Mode]
    assert times == sorted(times) and times[0] == 3 * (8 + 4 - 1)


def test_an_order_that_waits_for_itself():
    """An order with a cycle (pp0 wants a gradient first, pp1 an activation) is refused when it is built."""
    table = make_table(load(None, ["parallel.pp=2", "train.global_batch_size=2"]), (0, 1))
    order = gpipe(2, 2)
    order[0] = [Task(kind, 0, m) for m in (0, 1) for kind in "FB"]
    with pytest.raises(PlanError, match=r"never run.*pp0 BACKWARD u\d+ m0; pp1 FORWARD u\d+ m1"):
        communicate(expand(order, table), table)


LONG = ("parallel.pp=2", "train.global_batch_size=8", "train.eval_every=1", "model.layers=2",
        "model.heads=64", "model.vocab=512", "model.seq_len=131072")


@pytest.mark.parametrize("schedule", [name for name, each in SCHEDULES.items() if each.virtual == 1])
@pytest.mark.parametrize("others", [
    ("model.hidden=16384", "parallel.stage_units=[1, 3]"),
    ("model.hidden=16384", "parallel.stage_units=[1, 3]", "activation.policy=full", "activation.offload=cpu"),
    ("model.family=moe", "model.hidden=8192", "model.experts=8", "model.experts_per_token=2",
     "model.expert_ffn_hidden=16384", "parallel.stage_units=[4, 4]", "zero.stage=3"),
], ids=["embedding", "offload", "experts"])
def test_many_flops(schedule, others):
    """A step of more than 2^53 FLOPs, where the clock of `communicate` loses the time of a layer without
    products to rounding: what that layer makes is still sent after it, and at once."""
    plan = make_plan(load(None, [*LONG, f"parallel.schedule={schedule}", *others]))
    table = plan.table
    end = table.units_of(0)[-1]
    assert 8 * sum(unit.forward_flops for unit in table.units) > 2 ** 53
    assert not table.units[end].forward_flops
    for name in ("train", "evaluate"):
        program = plan.programs[name][0]
        made, sent = ([index for index, item in enumerate(program) if item.op == op and item.unit == end
                       and (op == Op.FORWARD or item.kind == "act")] for op in (Op.FORWARD, Op.SEND))
        assert [program[index].microbatch for index in made] == [program[index].microbatch for index in sent]
        assert all(not any(item.op in COMPUTE for item in program[first + 1:then])
                   for first, then in zip(made, sent, strict=True))


@pytest.mark.parametrize("name", [*(name for name, v in CASES if v < 3), "evaluate"])
def test_golden(name):
    """The picture of a schedule changes only on purpose: then write the new one over tests/golden."""
    virtual = ["parallel.virtual_stages=2"] if SCHEDULES.get(name, SCHEDULES["1f1b"]).virtual is None else []
    shaped = name in SCHEDULES and SCHEDULES[name].virtual != 1
    stages = [f"model.layers={30 if shaped else 14}", f"parallel.stage_units={[4] * (8 if shaped else 4)}"]
    if name in SCHEDULES and SCHEDULES[name].by_unit:
        stages = ["model.layers=6", "parallel.group=4"]
    plan = make_plan(load(None, ["parallel.pp=4", "train.eval_every=1", "train.global_batch_size=8", *virtual,
                                 *stages, f"parallel.schedule={name if name in SCHEDULES else '1f1b'}"]))
    program = "evaluate" if name == "evaluate" else "train"
    assert grid(Analysis(plan), program) + "\n" == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_pictures_of_the_source(schedule):
    """The pictures at the top of schedules/orders.py are those that the programs give."""
    assert indent(grid(Analysis(plan_of(schedule, 3, 4))), "    ") + "\n" in (orders.__doc__ or "")


FORWARD, WHOLE = "a forward of a stage drawn as 1", "a backward as 2"
HALVES = "each half of a split backward as 1: B the input's gradient, W the weights'"


@pytest.mark.parametrize("schedule, said, widths", [
    ("1f1b", (FORWARD, WHOLE), {"F": 1, "B": 2}), ("zb-h1", (FORWARD, HALVES), {"F": 1, "B": 1, "W": 1}),
    ("dualpipe-v", (FORWARD, WHOLE, HALVES), None)])
def test_legend(schedule, said, widths):
    """The legend tells how wide items are drawn, also where backward is split."""
    plan = make_plan(load("configs/toy.yaml", [f"parallel.schedule={schedule}"]))
    drawn = grid(Analysis(plan))
    assert legend(plan) == ", ".join(said) and show(plan).endswith(f"({legend(plan)})\n{drawn}")
    for row in drawn.splitlines() if widths else ():
        items = [item for item in row.split()[1:] if item != "."]
        assert Counter(items) == {f"{letter}{m}": width for letter, width in widths.items() for m in range(4)}


def test_grid_says_what_the_programs_do():
    """A picture with another number of forwards than the program, or that is longer than the step."""
    plan = plan_of("1f1b", 4, 6)
    rows = grid(Analysis(plan)).splitlines()
    assert len(rows) == 4 and all(row.split().count(f"F{m}") == 1 for row in rows for m in range(6))
    assert all(row.split().count(f"B{m}") == 2 for row in rows for m in range(6))
    assert max(len(row.split()) - 1 for row in rows) <= timeline(Analysis(plan)).total_s

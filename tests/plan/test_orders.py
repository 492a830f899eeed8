"""The shape of each schedule: its picture (golden), its bubble, and how many micro-batches it keeps alive."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest

from threed.config import load
from threed.errors import PlanError
from threed.pipeline import orders
from threed.pipeline.orders import ORDERS, Task, forward_only, gpipe, one_f_one_b
from threed.pipeline.plan import communicate, expand
from threed.planner import make_plan, make_table
from threed.program.instruction import Op
from threed.program.show import grid, timeline, unit_cost
from threed.program.walk import Mode, link, memory, walk

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 4), (4, 2), (4, 8), (8, 5)]


def plan_of(schedule: str, p: int, m: int, *others: str):
    """Stages of equal cost: four units each, so that a quarter of a stage is exact in binary."""
    return make_plan(load(None, [f"model.layers={4 * p - 2}", f"parallel.pp={p}", f"parallel.schedule={schedule}",
                                 f"train.global_batch_size={m}", f"parallel.stage_units={[4] * p}", *others]))


@pytest.mark.parametrize("schedule", ORDERS)
@pytest.mark.parametrize("p, m", SIZES)
def test_every_task_once(schedule, p, m):
    """A micro-batch that is left out, comes twice, or goes backward before forward."""
    for position, tasks in enumerate(ORDERS[schedule](p, m)):
        assert sorted(tasks) == sorted(Task(kind, position, k) for kind in "FB" for k in range(m))
        assert all(tasks.index(Task("F", position, k)) < tasks.index(Task("B", position, k)) for k in range(m))
    assert forward_only(p, m) == [[Task("F", position, k) for k in range(m)] for position in range(p)]


def test_shapes():
    """GPipe: all forward, then all backward. 1F1B: p - rank - 1 ahead, then by turns, then what is left."""
    assert ["".join(task.kind for task in tasks) for tasks in gpipe(2, 3)] == ["FFFBBB"] * 2
    assert ["".join(task.kind for task in tasks) for tasks in one_f_one_b(3, 4)] == ["FFFBFBBB", "FFBFBFBB", "FBFBFBFB"]
    assert ["".join(task.kind for task in tasks) for tasks in one_f_one_b(4, 2)] == ["FFBB", "FFBB", "FFBB", "FBFB"]


@pytest.mark.parametrize("schedule", ORDERS)
@pytest.mark.parametrize("p, m", SIZES)
def test_alive_micro_batches(schedule, p, m):
    """What a schedule keeps: m under GPipe, p - rank under 1F1B. It is why 1F1B exists."""
    plan = plan_of(schedule, p, m)
    for position, program in enumerate(plan.programs["train"]):
        table, seam = plan.table, plan.table.seam(position)
        saved = memory(program, table, link(program, table, position, seam), seam).peak("saved")
        stage = sum(table.units[unit].saved_bytes for unit in table.units_of(position))
        assert saved == stage * (m if schedule == "gpipe" else min(m, p - position))


@pytest.mark.parametrize("schedule", ORDERS)
@pytest.mark.parametrize("p, m", SIZES)
@pytest.mark.parametrize("backward", [1, 2])
def test_bubble(schedule, p, m, backward):
    """With equal stages and free messages the idle share is exactly (p - 1) / (m + p - 1), on every position."""
    plan = plan_of(schedule, p, m)
    programs, table = plan.programs["train"], plan.table
    links = [link(program, table, position, table.seam(position)) for position, program in enumerate(programs)]
    whole = unit_cost(table)

    def cost(position, instruction):
        return whole(position, instruction) * (backward / 2 if instruction.op == Op.BACKWARD else 1)

    when = walk(programs, table, links, Mode.BUFFERED, cost)
    assert when.total_s == (1 + backward) * (m + p - 1) and not when.stuck
    for position, program in enumerate(programs):
        busy = sum(cost(position, instruction) for instruction in program)
        assert 1 - busy / when.total_s == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
        assert all(0 <= a <= b for a, b in zip(when.start[position], when.end[position]))


def test_messages_overlap_with_compute():
    """A host that waits for each message would show here: BLOCKING takes longer than BUFFERED, and both end."""
    plan = plan_of("1f1b", 4, 8)
    programs, table = plan.programs["train"], plan.table
    links = [link(program, table, position, table.seam(position)) for position, program in enumerate(programs)]
    times = [walk(programs, table, links, mode, unit_cost(table)).total_s for mode in Mode]
    assert times == sorted(times) and times[0] == 3 * (8 + 4 - 1)


def test_an_order_that_waits_for_itself():
    """An order with a circle (pp0 wants a gradient first, pp1 an activation) is refused where it is made."""
    table = make_table(load(None, ["parallel.pp=2", "train.global_batch_size=2"]))
    order = gpipe(2, 2)
    order[0] = [Task(kind, 0, m) for m in (0, 1) for kind in "FB"]
    with pytest.raises(PlanError, match=r"never run.*pp0 BACKWARD u\d+ m0; pp1 FORWARD u\d+ m1"):
        communicate(expand(order, table), table)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "evaluate"])
def test_golden(name):
    """The picture of a schedule changes only on purpose: then write the new one over tests/golden."""
    plan = plan_of("gpipe" if name == "gpipe" else "1f1b", 4, 6, "train.eval_every=1")
    program = "evaluate" if name == "evaluate" else "train"
    assert grid(plan, program) + "\n" == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("schedule", ORDERS)
def test_pictures_of_the_source(schedule):
    """The pictures at the top of pipeline/orders.py are those that the programs give."""
    assert indent(grid(plan_of(schedule, 3, 4)), "    ") + "\n" in (orders.__doc__ or "")


def test_grid_says_what_the_programs_do():
    """A picture with another number of forwards than the program, or that is longer than the step."""
    plan = plan_of("1f1b", 4, 6)
    rows = grid(plan).splitlines()
    assert len(rows) == 4 and all(row.split().count(f"F{m}") == 1 for row in rows for m in range(6))
    assert all(row.split().count(f"B{m}") == 2 for row in rows for m in range(6))
    assert max(len(row.split()) - 1 for row in rows) <= timeline(plan).total_s

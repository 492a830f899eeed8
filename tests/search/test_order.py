"""For which instructions each one waits: all that is needed, and nothing else."""

from __future__ import annotations

import pytest

from tests.harness import cell_config, covering, each_value, tiny
from tests.races import is_no_race, races
from threed.planner import analyse, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.plan import Plan
from threed.program.walk import Mode, walk
from threed.schema import Config

ZERO_3, UNTIED = "zero.stage=3", "model.tie_embeddings=false"
CPU = ("offload.optimizer=cpu", "offload.parameters=cpu")
NVME = ("offload.optimizer=nvme", "offload.parameters=nvme", "offload.nvme_path=/disk")
TRAVEL = "model.family=tests/families/travelling.py:TRAVELLING"
KEPT = ("activation.policy=full", "activation.offload=cpu")
LARGE: dict[str, list[str]] = {
    "zero3": ["parallel.dp=2", ZERO_3, "zero.prefetch=1"],
    "zero3-cpu": ["parallel.dp=2", ZERO_3, "zero.prefetch=2", *CPU],
    "zero3-nvme": ["parallel.dp=2", "parallel.pp=2", ZERO_3, "zero.prefetch=1", *NVME],
    "zero2-nvme": ["parallel.dp=2", "zero.stage=2", *NVME[:1], NVME[2], UNTIED],
    "zero1-cpu": ["parallel.dp=2", "zero.stage=1", CPU[0]],
    "zero1-cpu-no-overlap": ["parallel.dp=2", "zero.stage=1", CPU[0], "offload.overlap=none"],
    "zero2-cpu-half-tied": ["parallel.dp=2", "parallel.pp=2", "zero.stage=2", CPU[0], "offload.ratio=0.5"],
    "zero2-cpu-gradients": ["parallel.dp=2", "zero.stage=2", CPU[0], "offload.gradients=host"],
    "zero3-cpu-no-overlap": ["parallel.dp=2", ZERO_3, "zero.prefetch=2", *CPU, "offload.overlap=none"],
    "kept-cpu": ["parallel.pp=2", *KEPT],
    "kept-zero3-cpu": ["parallel.dp=2", ZERO_3, *CPU, *KEPT, "zero.prefetch=1"],
    "travel": ["parallel.dp=2", TRAVEL, "activation.policy=full", "zero.stage=2"],
    "travel-gathered": ["parallel.dp=2", TRAVEL, "model.by=gather", ZERO_3, "parallel.pp=2",
                        "parallel.schedule=zb-h1"],
    "kept-parts": ["parallel.tp=2", *KEPT, "activation.partition=true"],
}


def orders(plan: Plan):
    """(program, order, table, pools) of each program and position."""
    analysis = Analysis(plan)
    for name, programs in plan.programs.items():
        for position, program in enumerate(programs):
            yield program, analysis.order(name, position), plan.table, analysis.buffers(position)


def check(config: Config) -> None:
    for program, order, table, pools in orders(make_plan(config)):
        assert races(program, order.effects, order.waits, table, pools) == []


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.id, marks=[pytest.mark.core] * (
    cell in each_value(covering()))) for cell in covering()])
def test_the_contracts_sample_has_no_race(cell):
    check(cell_config(cell, ranks=8))


@pytest.mark.core
@pytest.mark.parametrize("name", LARGE)
def test_no_race(name):
    check(tiny(*LARGE[name]))


@pytest.mark.core
@pytest.mark.parametrize("name", LARGE)
def test_every_wait_is_needed(name):
    """Without any single one there is a race: none is there for good measure, and each is tested."""
    needed = 0
    for program, order, table, pools in orders(make_plan(tiny(*LARGE[name], "model.layers=3"))):
        for index, needs in enumerate(order.waits):
            for need in needs:
                if is_no_race(program, order.effects, index, need):
                    continue
                less = [[other for other in row if (at, other) != (index, need)]
                        for at, row in enumerate(order.waits)]
                assert races(program, order.effects, less, table, pools), (
                    f"'{program[index]}' need not wait for '{program[need]}'")
                needed += 1
    assert needed


def waits_of(plan: Plan, index: int) -> list[Instruction]:
    program = plan.programs["train"][0]
    order = Analysis(plan).order("train", 0)
    return [program[need] for need in order.waits[index]]


@pytest.mark.core
def test_lanes_wait_for_lanes():
    """Gradients go to the host, are stepped there, and fetched parameters are gathered, behind the
    computation's back; the computation waits for what it reads."""
    plan = make_plan(tiny(*LARGE["zero3-cpu"], UNTIED))
    program = plan.programs["train"][0]
    for index, item in enumerate(program):
        if item.op == Op.STEP:
            assert Instruction(Op.OFFLOAD, item.unit, kind="gprev") in waits_of(plan, index)
        if item.op == Op.FETCH:
            first = program.index(item) == index
            assert (Instruction(Op.STEP, item.unit, age="prev") in waits_of(plan, index)) == first
        if item.op == Op.GATHER and item.unit > 2:
            assert Instruction(Op.FETCH, item.unit, kind="pshard") in waits_of(plan, index)
    compute = [other.op for index, item in enumerate(program) if item.op in COMPUTE
               for other in waits_of(plan, index)]
    assert set(compute) <= {Op.GATHER, Op.REDUCE}  # REDUCE: of the gradient whose buffer it takes


@pytest.mark.core
def test_a_part_of_a_gradient_goes_down_behind_its_reduction():
    """Where gradients are added up on the host: CLIP, which reads them there, waits for the last of them."""
    plan = make_plan(tiny(*LARGE["zero2-cpu-gradients"], UNTIED, "zero.reduce_every=1"))
    program, downs = plan.programs["train"][0], []
    for index, item in enumerate(program):
        if item.op == Op.OFFLOAD:
            assert [(other.op, other.unit) for other in waits_of(plan, index)] == [(Op.REDUCE, item.unit)]
            downs.append(item)
    clip = next(index for index, item in enumerate(program) if item.op == Op.CLIP)
    assert downs[-1] in waits_of(plan, clip) and len(downs) > len({*downs})


def waits_behind(plan: Plan, index: int) -> set[int]:
    """All instructions that have ended when one begins, as far as waits say."""
    order, seen = Analysis(plan).order("train", 0), set[int]()
    todo = [*order.waits[index]]
    while todo:
        need = todo.pop()
        if need not in seen:
            seen.add(need)
            todo += order.waits[need]
    return seen


@pytest.mark.core
@pytest.mark.parametrize("name", ["zero1-cpu", "zero3-cpu"])
def test_a_unit_waits_for_its_own_update_alone(name):
    """The first FORWARD of a unit begins when its weights are there, whatever the updates of units behind it
    do; and with all updates before it there would be nothing to hide them."""
    plan = make_plan(tiny(*LARGE[name], UNTIED))
    program = plan.programs["train"][0]
    stepped = {item.unit: index for index, item in enumerate(program) if item.op == Op.STEP}
    seen: set[int] = set()
    for index, item in enumerate(program):
        if item.op == Op.FORWARD and item.unit not in seen:
            seen.add(item.unit)
            behind = waits_behind(plan, index)
            own = plan.table.units[item.unit].parameters
            assert all(stepped[p] in behind for p in own)
            assert not any(at in behind for p, at in stepped.items() if p > max(own))
    assert len(seen) > 4


@pytest.mark.core
def test_what_is_awaited_already_is_left_out():
    """A second FORWARD reads the same gathered parameters without another wait."""
    plan = make_plan(tiny("parallel.dp=2", "zero.stage=1"))
    program = plan.programs["train"][0]
    forwards = [index for index, item in enumerate(program) if item.op == Op.FORWARD and item.unit == 1]
    assert [bool(waits_of(plan, index)) for index in forwards] == [True, *[False] * (len(forwards) - 1)]


@pytest.mark.core
@pytest.mark.parametrize("name", LARGE)
def test_predicted_is_what_is_issued(name):
    """The simulator begins an instruction when its lane is free, all that it waits for has ended, and the
    host has read the result of CLIP; not before, and not later."""
    analysis = analyse(tiny(*LARGE[name]))
    plan, links = analysis.plan, analysis.simulated("train")
    times = {Op.FORWARD: 2.0, Op.BACKWARD: 4.0, Op.GATHER: 1.5, Op.REDUCE: 2.5, Op.OFFLOAD: 1.2,
             Op.FETCH: 0.7}
    when = walk(plan.programs["train"], links, Mode.BUFFERED, lambda _, item: times.get(item.op, 0.1))
    for position, program in enumerate(plan.programs["train"]):
        order = analysis.order("train", position)
        ended, clip_s = dict[str, float](), 0.0
        for index, effect in enumerate(order.effects):
            least = max(ended.get(effect.lane, 0.0), clip_s,
                        *(when.end[position][need] for need in order.waits[index]))
            if index in order.jobs and effect.lane != "tie":  # no other position holds it up
                assert when.start[position][index] == pytest.approx(least)
            assert when.start[position][index] >= least - 1e-9
            ended[effect.lane] = when.end[position][index]
            clip_s = when.end[position][index] if program[index].op == Op.CLIP else clip_s

"""The program that copies what a checkpoint keeps: what is in it, what it costs, and that edits of it are
refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from threed.base.errors import PlanError
from threed.config.load import load
from threed.planner import make_plan
from threed.prediction.analytic import cost as analytic_cost
from threed.prediction.hardware import Hardware
from threed.prediction.predict import prediction, priced
from threed.prediction.report import show
from threed.program.analysis import Analysis
from threed.program.check import check
from threed.program.effects import effects
from threed.program.instruction import Instruction, Op, Slot, Tier
from threed.program.names import SNAPSHOT
from threed.program.plan import Plan
from threed.program.seam import seam_of
from threed.program.summary import stages
from threed.program.traffic import moved_by

TINY = ["model.layers=4", "model.hidden=32", "model.heads=8", "model.vocab=120", "model.vocab_multiple=64",
        "model.seq_len=16",
        "train.global_batch_size=8", "checkpoint.every=10"]
MESHES = {
    "pp": ["parallel.pp=2"], "zero-0": ["parallel.dp=2", "zero.stage=0"],
    "zero-3": ["parallel.dp=4", "zero.stage=3"],
    "groups": ["parallel.dp=4", "zero.stage=2", "zero.shard_size=2"],
    "v": ["parallel.pp=2", "parallel.schedule=zb-v"],
    "cpu": ["parallel.dp=2", "zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"],
    "overlap": ["parallel.pp=2", "offload.optimizer=cpu"],
    "no overlap": ["parallel.pp=2", "offload.optimizer=cpu", "offload.overlap=none"],
    "bf16": ["parallel.tp=2", "precision.dtype=bf16"],
}


def plan_of(*others: str) -> Plan:
    return make_plan(load(None, [*TINY, *others]))


@pytest.mark.parametrize("mesh", MESHES)
def test_every_unit_is_copied_once(mesh):
    """Each unit is copied at the position that writes it; the first of its two positions writes a tied
    embedding."""
    plan = plan_of(*MESHES[mesh])
    copied = [(position, item.unit) for position, program in enumerate(plan.programs[SNAPSHOT])
              for item in program]
    assert sorted(unit for _, unit in copied) == sorted(plan.table.parameters)
    assert all(plan.table.parameters[unit].positions[0] == position for position, unit in copied)
    assert check(plan).plan is plan


@pytest.mark.parametrize("others", [["checkpoint.every=0"], ["checkpoint.background=false"],
                                    ["offload.optimizer=nvme", "offload.nvme_path=/tmp"]])
def test_where_there_is_none(others):
    """Without a snapshot program STEP waits for nothing and the host holds nothing."""
    plan = plan_of(*others)
    assert SNAPSHOT not in plan.programs and not any(row.snapshot_bytes for row in stages(Analysis(plan)))
    assert not any(slot.kind == "snapshot" for slot in seam_of(plan.table, 0))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_waits_for_its_copy(mesh):
    plan = plan_of(*MESHES[mesh])
    for position, program in enumerate(plan.programs["train"]):
        for item in program:
            if item.op == Op.STEP:
                waits = Slot("snapshot", item.unit,
                             tier=Tier.HOST) in effects(item, plan.table, position).reads
                assert waits == plan.table.saves(position, item.unit)


EDITS = {
    "one is missing": lambda program: program[1:],
    "one is copied twice": lambda program: (*program, program[0]),
    "one with what waits": lambda program: (program[0]._replace(age="prev"), *program[1:]),
    "one of another position": lambda program: (program[0]._replace(unit=5), *program[1:]),
    "one that is none": lambda program: (program[0]._replace(unit=99), *program[1:]),
    "one of a micro-batch": lambda program: (program[0]._replace(microbatch=0), *program[1:]),
    "something else": lambda program: (*program, Instruction(Op.RELEASE, 0)),
    "it comes back": lambda program: (*program, Instruction(Op.FETCH, program[0].unit, kind="snapshot")),
    "a step in between": lambda program: (*program, Instruction(Op.STEP, program[0].unit)),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_are_refused(edit):
    plan = plan_of("parallel.pp=2", "parallel.dp=2")
    first, second = plan.programs[SNAPSHOT]
    edited = replace(plan, programs={**plan.programs, SNAPSHOT: [tuple(EDITS[edit](first)), second]})
    with pytest.raises(PlanError, match=r"program 'snapshot', position pp0"):
        check(edited)


def test_a_copy_in_the_step_is_refused():
    """Copies are made between steps: within a step the unit may have been updated already."""
    plan = plan_of()
    train = (*plan.programs["train"][0], plan.programs[SNAPSHOT][0][0])
    check(plan)
    late = replace(plan, programs={**plan.programs, "train": [train]})
    with pytest.raises(PlanError):
        check(late)


@pytest.mark.parametrize(("others", "kinds", "share"), [
    ([], 3, 1),
    (["parallel.dp=4", "zero.stage=0"], 3, 4),
    (["parallel.dp=4", "zero.stage=2", "zero.shard_size=2"], 3, 2),
    (MESHES["overlap"][1:], 3, 1),
])
def test_bytes(others, kinds, share):
    """fp32 of the weights and the two moments, of this rank's shard: no gradient waits."""
    plan = plan_of(*others)
    (row,) = stages(Analysis(plan))
    numel = sum(unit.numel for unit in plan.table.parameters.values())
    assert row.snapshot_bytes == numel // share * 4 * kinds


def test_what_it_costs():
    """A copy takes the time of the link to the host, and blocks nothing if it ends before the first STEP that
    needs it."""
    plan = plan_of("parallel.pp=2")
    for link_gbps, blocked in ((1e6, False), (1e-4, True)):
        machine, costs = priced(Analysis(plan), f"link_gbps={link_gbps}", None)
        found = prediction(costs, machine)
        saved, rows = found.step.checkpoint, found.step.stages
        assert saved is not None and saved.bytes == max(row.summary.snapshot_bytes for row in rows)
        assert saved.copy_s > 0 and (saved.blocked_s > 0.01 * saved.copy_s) == blocked
        assert "a checkpoint copies" in show(found)
    machine, costs = priced(Analysis(plan_of("checkpoint.every=0")), "", None)
    assert prediction(costs, machine).step.checkpoint is None


@pytest.mark.parametrize("home, gbps", [("none", 100.0), ("cpu", 50.0)])
def test_the_link_of_a_copy(home, gbps):
    """State that the host steps is copied inside the host, and does not take the device's link."""
    plan = plan_of("parallel.dp=2", "zero.stage=2", f"offload.optimizer={home}")
    cost = analytic_cost(plan, Hardware(link_gbps=100.0, host_gbps=50.0, kernel_us=0.0))
    for item in plan.programs[SNAPSHOT][0]:
        lane = "d2h" if home == "none" else "host"
        assert effects(item, plan.table, 0).lane == lane
        assert cost(0, item) == pytest.approx(moved_by(plan.table, item) * 8 / (gbps * 1e9))

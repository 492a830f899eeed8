"""The rehearsal of a step that is computed twice: all of the step but its update."""

from __future__ import annotations

import json
import tempfile

import pytest

from threed.base.errors import PlanError
from threed.cli.main import app
from threed.config.load import load
from threed.config.validate import warnings
from threed.planner import make_plan
from threed.program.check import check_programs
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.plan import Plan

BASE = ["model.layers=4", "parallel.pp=2", "parallel.dp=2", "train.global_batch_size=6",
        "parallel.stage_units=[3,3]"]
NVME = ["offload.optimizer=nvme", f"offload.nvme_path={tempfile.gettempdir()}"]
CPU = ["offload.optimizer=cpu"]
WORK = {*COMPUTE, Op.SEND, Op.RECV, Op.REDUCE}


def plan_of(*overrides: str) -> Plan:
    return make_plan(load(None, [*BASE, "run.verify_every=5", *overrides]))


@pytest.mark.parametrize("overrides", [
    [], ["zero.stage=0"], ["zero.stage=2"], ["zero.stage=3", "parallel.schedule=zb-h1"], NVME, CPU,
    [*CPU, "offload.overlap=none"], [*NVME, "offload.overlap=none"],
    [*CPU, "zero.stage=2", "offload.gradients=host"], [*NVME, "offload.parameters=nvme", "zero.stage=3"],
    ["activation.policy=full", "activation.offload=cpu"]], ids=str)
def test_it_is_the_step_without_its_update(overrides):
    """Work in another order, or other work, and the two do not compare; an update that is taken twice."""
    plan = plan_of(*overrides)
    for position, program in enumerate(plan.programs["verify"]):
        assert program[-1] == Instruction(Op.CLIP, gradients="drop")
        assert not any(item.op == Op.STEP or item.kind == "state" or item.age for item in program)
        for name in plan.programs.keys() - {"verify", "settle"}:
            step = [item for item in plan.programs[name][position] if item.op in WORK]
            assert [item for item in program if item.op in WORK] == step, name


def test_without_the_key_there_is_none():
    """Without run.verify_every plans, digests and buffers are unchanged."""
    plain = make_plan(load(None, BASE))
    assert "verify" not in plain.programs and plain.digest != plan_of().digest
    assert plan_of().programs["train"] == plain.programs["train"]


@pytest.mark.parametrize("overrides", [[], CPU, [*CPU, "offload.overlap=none"]],
                         ids=["usual", "overlap", "no-overlap"])
def test_what_is_refused(overrides):
    """Gradients of a rehearsal that are not dropped, gradients of a real step that are; an update in a
    rehearsal."""
    plan = plan_of(*overrides)
    def fault(name: str, change) -> str:
        with pytest.raises(PlanError) as caught:
            check_programs(name, [tuple(change(list(program))) for program in plan.programs[name]],
                           plan.table)
        return str(caught.value)

    def keep(how: str):
        return lambda program: [item._replace(gradients=how) if item.op == Op.CLIP else item
                                for item in program]

    assert "gshard" in fault("verify", keep("step"))
    assert "behind" in fault("verify", keep("wait"))
    for name in plan.programs.keys() & {"train", "enter"}:
        lost = "has lost 'gprev p1'" if "enter" in plan.programs else "is not alive"
        assert lost in fault(name, keep("drop"))
    assert "wgrad" in fault("verify", lambda program: [item for item in program if item.op != Op.BACKWARD])
    down = [Instruction(Op.OFFLOAD, -1, kind="gshard")] * bool(overrides)
    stepped = fault("verify", lambda program: [*program[:-1], Instruction(Op.CLIP), *(
        item._replace(unit=unit)
        for unit in sorted({item.unit for item in program if item.op == Op.REDUCE})
        for item in (*down, Instruction(Op.STEP, -1)))])
    assert "STEP runs for" in stepped or "behind" in stepped


def test_show_and_predict(capsys):
    """The rehearsal is printed and priced like other programs."""
    app(["show", "configs/toy.yaml", "run.verify_every=10", "--program", "verify", "--rank", "0"],
        standalone_mode=False)
    assert capsys.readouterr().out.rstrip().endswith("CLIP gradients=drop")
    app(["predict", "configs/toy.yaml", "run.verify_every=10", "--json"], standalone_mode=False)
    predicted = json.loads(capsys.readouterr().out)
    assert predicted["verify"]["every"] == 10
    assert predicted["verify"]["rehearsal_s"] == pytest.approx(10 * predicted["verify"]["step_s"])
    assert 0.8 * predicted["step_time"] < predicted["verify"]["rehearsal_s"] <= predicted["step_time"]
    app(["predict", "configs/toy.yaml", "run.verify_every=10"], standalone_mode=False)
    assert "every 10 steps one is computed twice: " in capsys.readouterr().out
    app(["predict", "configs/toy.yaml", "--json"], standalone_mode=False)
    assert "verify" not in json.loads(capsys.readouterr().out)


def test_checkpoints_that_are_too_few():
    """A user who learns of wrong results wants a checkpoint from before them."""
    def words(*overrides: str) -> str:
        return "".join(warnings(load(None, ["checkpoint.every=10", "checkpoint.keep=2", *overrides])))

    assert "no checkpoint is left from before it was last verified" in words("run.verify_every=21")
    for overrides in (["run.verify_every=20"], [], ["run.verify_every=99", "checkpoint.keep=0"]):
        assert "verify" not in words(*overrides)

"""Costs of one run for another plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from threed.base.errors import InputError
from threed.config.load import load
from threed.planner import make_plan
from threed.planner.from_config import save_config
from threed.prediction.analytic import cost as analytic_cost
from threed.prediction.hardware import Hardware
from threed.prediction.hardware import load as load_hardware
from threed.prediction.predict import predict, priced
from threed.prediction.rescale import transferred
from threed.program.analysis import Analysis
from threed.program.costs import save_costs
from threed.program.instruction import COMPUTE, Op
from threed.program.plan import Plan

RUN = ("parallel.dp=2", "parallel.tp=2", "parallel.pp=2", "run.device=cpu")
OTHERS = {
    "mesh": ("parallel.dp=1", "parallel.tp=1", "parallel.pp=4", "model.layers=8"),
    "micro-batch": (*RUN, "train.micro_batch_size=1"),
    "schedule": (*RUN, "parallel.schedule=zb-v", "model.layers=6"),
    "recomputation": (*RUN, "activation.policy=full"),
    "zero-3": (*RUN, "zero.stage=3"),
}


def plan_of(*overrides: str) -> Plan:
    return make_plan(load("configs/toy.yaml", list(overrides)))


def slower(plan: Plan, hardware: Hardware, factor: float) -> dict[tuple[int, Op, int], float]:
    """What a run measures on a machine that computes so much slower than its prices say."""
    price = analytic_cost(plan, hardware)
    return {(position, item.op, item.unit): factor * price(position, item)
            for position, program in enumerate(plan.programs["train"]) for item in program
            if item.op in COMPUTE or item.op == Op.STEP}


@pytest.mark.parametrize("name", OTHERS)
def test_a_slower_machine(name):
    """Where everything takes twice its price, so does it elsewhere; communication has its price."""
    hardware, run, plan = load_hardware("cpu-core"), plan_of(*RUN), plan_of(*OTHERS[name])
    price, moved = analytic_cost(plan, hardware), transferred(plan, hardware, run, slower(run, hardware, 2.0))
    for position, program in enumerate(plan.programs["train"]):
        for item in program:
            factor = 2.0 if item.op in COMPUTE or item.op == Op.STEP else 1.0
            if item.op in (Op.RECOMPUTE, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
                assert moved.cost(position, item) > 0  # the run had none; derived from its whole backward
            else:
                assert moved.cost(position, item) == pytest.approx(factor * price(position, item))


def test_what_is_said(tmp_path):
    """The same sizes count as measured; others are scaled, and far ones are said to be far."""
    run = load("configs/toy.yaml", [*RUN, f"run.dir={tmp_path}"])
    plan, hardware = make_plan(run), load_hardware("cpu-core")
    save_config(run)
    save_costs(tmp_path / "costs.json", slower(plan, hardware, 2.0), plan.digest, 5)

    def source(*overrides: str) -> str:
        return priced(Analysis(plan_of(*overrides)), "cpu-core", tmp_path)[1].source

    assert source(*RUN) == str(tmp_path)
    assert source(*RUN, "parallel.schedule=gpipe").endswith("all computation measured at these sizes")
    assert "of the computation measured at these sizes, the rest scaled by" in source(
        *RUN, "train.micro_batch_size=1")
    assert "far from what was measured" in source(*RUN, "model.hidden=1024")
    assert predict(plan_of(*RUN, "parallel.schedule=gpipe"), "cpu-core", tmp_path)["step_time"] > 0


def test_another_model():
    """A unit that the run has not is named."""
    hardware, plan = load_hardware("cpu-core"), plan_of(*RUN)
    renamed = tuple(replace(unit, name=f"layer {index}") for index, unit in enumerate(plan.table.units))
    run = replace(plan, table=replace(plan.table, units=renamed))
    with pytest.raises(InputError, match="none for a unit like embedding: the run had layer 0, layer 1"):
        transferred(plan, hardware, run, slower(plan, hardware, 1.0))

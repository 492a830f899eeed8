"""Planner: makes the plan of a config: units and stages, their order, then the passes, then the check.

It knows the passes of `features` and what is below; no torch. `facts` is what a plan knows of a model, `auto`
searches an order within a memory budget, `passes` calls each feature's pass in turn.
"""

from __future__ import annotations

from dataclasses import replace

from threed.base.remember import remembering
from threed.planner.auto import (
    check_limit,
    choose,
    decided,
    make_pipeline,
    unchecked_plan,
    with_choices,
)
from threed.planner.facts import (
    layouts,
    make_mesh,
    make_table,
    saved_by_piece,
    unit_costs,
    unit_parameters,
    with_logits,
)
from threed.planner.passes import Pipeline, forward_recipe, run_passes
from threed.program.analysis import Analysis
from threed.program.check import check
from threed.program.names import GENERATE
from threed.program.plan import Plan
from threed.schema import Config

__all__ = ["Pipeline", "analyse", "forward_plan", "layouts", "make_mesh", "make_pipeline", "make_plan",
           "make_table", "saved_by_piece", "unit_costs", "unit_parameters"]


def make_plan(config: Config, pipeline: Pipeline | None = None, room: float | None = None) -> Plan:
    """The checked plan of a config: see `analyse`."""
    return analyse(config, pipeline, room).plan


@remembering()
def analyse(config: Config, pipeline: Pipeline | None = None, room: float | None = None) -> Analysis:
    """The checked plan of a config, with what was derived from it for the check. `pipeline`: its order, where
    another rank has made it already. `room`: bytes of a device that the plan may take, on which keys that are
    `auto` depend (`auto.choices`); the plan's own config has what was chosen. Raises PlanError where the
    programs are not legal (a bug, or a user's own order), and InputError where the plan keeps more than
    `parallel.activation_limit`."""
    chosen = choose(config, room)
    if pipeline is None and chosen.analysis is not None:
        return check(chosen.analysis)
    config = with_choices(config, chosen.values)
    pipeline = pipeline or make_pipeline(config)
    analysis = check(unchecked_plan(config, pipeline))
    check_limit(config, pipeline, analysis)
    return analysis


@remembering()
def forward_plan(config: Config, name: str, pipeline: Pipeline | None = None) -> Plan:
    """The checked plan of one program that only runs forward, `evaluate` or `generate`, for ranks that train
    nothing: they have no gradients. Errors as from `make_plan`."""
    config = decided(config)
    pipeline = pipeline or make_pipeline(config)
    table = replace(make_table(config, pipeline.place), trains=False)
    if name == GENERATE:
        table = with_logits(config, table)
    plan = run_passes(config, pipeline, table, {name: forward_recipe(name, config, pipeline, table)})
    check(plan)
    return plan

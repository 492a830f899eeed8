"""Planned: lets functions that read plans take a config as well."""

from __future__ import annotations

from threed.errors import InputError
from threed.planner import make_plan
from threed.program.table import Plan
from threed.schema import Config


def planned(what: Config | Plan) -> Plan:
    """The plan of a config, or the plan itself. InputError where it is neither."""
    if isinstance(what, Plan):
        return what
    if not isinstance(what, Config):
        raise InputError(f"{what!r} is neither a Config nor a Plan: give what threed.load or threed.plan "
                         "returns")
    return make_plan(what)


def config_of(plan: Plan) -> Config:
    """The config that a plan was made from. InputError where the plan has none."""
    if plan.config is None:
        raise InputError("this plan does not know its config: make it with threed.plan, or change one by "
                         "dataclasses.replace")
    return plan.config

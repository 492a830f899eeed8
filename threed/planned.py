"""Planned: lets functions that read plans take a config as well."""

from __future__ import annotations

import reprlib

from threed.config import checked
from threed.errors import InputError
from threed.planner import make_plan
from threed.program.table import Plan
from threed.schema import Config


def planned(what: Config | Plan) -> Plan:
    """The plan of a config, or the plan itself. ConfigError where the config cannot run (a script may have
    made or changed it since it was loaded), InputError where it is neither."""
    if isinstance(what, Plan):
        if "train" not in what.programs:
            raise InputError("this plan has no program 'train', which runs the steps; it has "
                             f"{', '.join(what.programs) or 'none'}")
        return what
    if not isinstance(what, Config):
        raise InputError(f"{reprlib.repr(what)} is neither a Config nor a Plan: give what threed.load or "
                         "threed.plan returns")
    return make_plan(checked(what))


def config_of(plan: Plan) -> Config:
    """The config that a plan was made from. InputError where the plan has none."""
    if plan.config is None:
        raise InputError("this plan does not know its config: make it with threed.plan, or change one by "
                         "dataclasses.replace")
    return plan.config

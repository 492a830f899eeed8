"""The verb `threed.predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from threed.errors import check_type
from threed.planned import config_of, planned
from threed.prediction.analytic import Hardware
from threed.prediction.cost import load_costs
from threed.prediction.report import report
from threed.program.table import Plan
from threed.schema import Config


def predict(what: Config | Plan, hardware: str = "", costs: str | Path | None = None) -> dict[str, Any]:
    """Predict a step by walking the plan with a clock.

    `hardware` is what `threed predict --hardware` takes ("tflops=989,efficiency=0.4,dp_gbps=400"; the default
    is an A100). `costs`: the folder or the costs.json of a run, whose measured seconds replace the analytic
    costs. Returns the document of `threed predict --json`: `step_time` in seconds, `bubble` as a share of it,
    and `stages`, a row a pipeline position (`peak_bytes` by tier, `busy_s`, `sent_bytes` by axis). Raises
    InputError, also for a wrong `hardware` or `costs`.

    >>> threed.predict(threed.load("configs/toy.yaml"), "tflops=989")["step_time"]
    """
    check_type("hardware", hardware, str, 'a text such as "tflops=989,efficiency=0.4"')
    check_type("costs", costs, (str, Path, None), "the folder of a run, or its costs.json")
    plan = planned(what)
    cost = Hardware.parse(hardware).cost(plan.table, load_costs(costs) if costs is not None else None)
    source = str(costs) if costs is not None else "analytic"
    return report(plan, cost, source, config_of(plan).run.verify_every)

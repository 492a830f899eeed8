"""From config: the analysis of a config, for functions that read plans; and the config in a run's folder."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path

from threed.base.errors import ConfigError, InputError
from threed.base.files import write_whole
from threed.config.load import checked, of_values
from threed.planner import analyse
from threed.program.analysis import Analysis
from threed.program.plan import Plan
from threed.schema import Config

CONFIG = "config.json"
_ADDED = ("parallel.schedule", "optimizer.name", "model.family")  # whose values a script may add


def analysed(what: Config | Plan | Analysis, room: float | None = None) -> Analysis:
    """The analysis of a config's plan, which is checked, or of a plan; or the analysis itself. `room`: as
    `analyse` takes it.
    ConfigError where the config cannot run (a script may have made or changed it since it was loaded),
    InputError where it is neither."""
    if isinstance(what, Analysis):
        return what
    if isinstance(what, Plan):
        if "train" not in what.programs:
            raise InputError("this plan has no program 'train', which runs the steps; it has "
                             f"{', '.join(what.programs) or 'none'}")
        return Analysis(what)
    if not isinstance(what, Config):
        raise InputError(f"{reprlib.repr(what)} is neither a Config nor a Plan: give what threed.load or "
                         "threed.plan returns")
    return analyse(checked(what), room=room)


def config_of(plan: Plan) -> Config:
    """The config that a plan was made from. InputError where the plan has none."""
    if plan.config is None:
        raise InputError("this plan does not know its config: make it with threed.plan, or change one by "
                         "dataclasses.replace")
    return plan.config


def save_config(config: Config) -> list[str]:
    """Write the config of a run, with every default and override resolved, to its folder. Returns
    warnings."""
    folder = Path(config.run.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / CONFIG, json.dumps(config.to_dict(), indent=1) + "\n")
    except OSError as error:
        return [f"{folder / CONFIG} was not written: {error}; threed compare will not know this run"]
    return []


def load_config(run: Path) -> Config:
    """The config with which a run was last started."""
    file = run / CONFIG
    try:
        values = json.loads(file.read_text())
        if not isinstance(values, dict):
            raise ValueError(f"it has a {type(values).__name__}, and must have the sections of a config")
    except FileNotFoundError:
        raise InputError(f"{file}: there is none; is {run} the run.dir of a run?") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    try:
        return of_values(values, str(file))
    except ConfigError as error:
        if not any(each.key in _ADDED for each in error.problems):
            raise
        advice = ("The run has started with it, so its script adds it (threed.extend): call threed.evaluate, "
                  "threed.generate or threed.report there, in place of the command")
        raise ConfigError(error.problems, str(file), advice) from None

"""The verb `threed.report`."""

from __future__ import annotations

import os
from pathlib import Path

from threed.base.errors import InputError, check_type
from threed.base.files import write_whole
from threed.html_report.content import Content
from threed.html_report.html import page
from threed.monitor.run import Run
from threed.planner import analyse
from threed.planner.from_config import analysed, config_of
from threed.prediction.hardware import OF_CPUS
from threed.prediction.predict import priced
from threed.program.costs import FILE as COSTS
from threed.program.costs import device_of
from threed.program.plan import Plan
from threed.schema import Config


def report(what: Config | Plan | Run | str | Path, output: str | Path, hardware: str = "",
           costs: str | Path | None = None) -> Path:
    """Draw a plan, or a run, as one HTML file that needs no network.

    `what`: a config or a plan, of which the prediction is drawn, or a run (its folder), whose measurements
    are drawn beside it. `hardware` and `costs` are those of `threed.predict`; without `costs`, a run's own
    are taken, if it has traced a step. Returns `output`, the file. Raises InputError where it cannot be
    written, where there is no such run, and where plotly is not installed (`pip install
    plotly`).

    >>> threed.report(threed.load("configs/toy.yaml"), "page.html")
    """
    check_type("what", what, (Config, Plan, Run, str, Path), "a Config, a Plan, a Run, or a run's folder")
    check_type("output", output, (str, Path), "the file to write")
    file = Path(output)
    if os.path.isdir(file) or not file.parent.is_dir():  # Path.is_dir fails where a name is too long
        raise InputError(f"{file}: " + ("is a folder; give a file in it" if os.path.isdir(file) else
                                        f"there is no folder {file.parent}"))
    text = page(content(what, hardware, costs))
    try:
        write_whole(file, text)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from None
    return file


def content(what: Config | Plan | Run | str | Path, hardware: str = "",
            costs: str | Path | None = None) -> Content:
    """What the page shows. The arguments are those of `report`."""
    run = what if isinstance(what, Run) else Run(what) if isinstance(what, str | Path) else None
    analysis = analysed(what) if isinstance(what, Config | Plan) else analyse(run.config if run else Config())
    if run is not None and costs is None and (run.path / COSTS).exists():
        costs = run.path
    measured = run is not None and costs == run.path and device_of(run.path).startswith("CPU")
    if measured and not hardware:
        hardware = OF_CPUS  # it has neither CUDA nor the memory of a device
    machine, step = priced(analysis, hardware, costs)
    found = Content(config_of(analysis.plan), step, machine, run)
    if run is not None and costs is None:
        found.notes.append("No measured costs: no step was traced (monitor.trace_every), so the prediction "
                           "is analytic, for the hardware that --hardware names.")
    elif run is not None and costs == run.path:
        found.notes.append("Predicted with the times of compute instructions that the run measured, and with "
                           "free messages: what is measured takes longer by communication and the host.")
    return found

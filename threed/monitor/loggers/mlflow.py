"""MLflow: a store in run.dir/mlflow, or what MLFLOW_TRACKING_URI names. A run that goes on is the same run
there; it keeps numbers of repeated steps beside the new ones, as MLflow removes none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from threed.monitor.loggers.logger import (
    About,
    Logger,
    Metrics,
    by_position,
    flat,
    known,
    name_of,
    tags_of,
    unreachable,
)
from threed.monitor.state import ENDED, FAILED

MOST_METRICS, MOST_PARAMS, MOST_CHARACTERS = 1000, 100, 500  # of a request, of a value: its own limits


class MLflow(Logger):
    def __init__(self) -> None:
        self._client: Any = None
        self._id = ""

    def start(self, about: About, run_id: str | None) -> str | None:
        address = os.environ.get("MLFLOW_TRACKING_URI", "")
        if address and (problem := unreachable(address)) is not None:
            raise ConnectionError(problem)
        # MLflow asks for this word before it writes plain files, which need no database.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
        from mlflow import MlflowClient

        folder = about.folder("mlflow")
        self.place = address or str(folder)
        self._client = MlflowClient(address or folder.absolute().as_uri())
        if run_id is None:
            run_id = self._new(about)
        else:
            if not address:
                _drop_empty(folder, run_id)
            self._client.update_run(run_id, status="RUNNING")
        self._id, self.kept = run_id, f"; {self.place} has what came before"
        return run_id

    def _new(self, about: About) -> str:
        config, client = about.config, self._client
        found = client.get_experiment_by_name(config.monitor.project)
        experiment = found.experiment_id if found else client.create_experiment(config.monitor.project)
        tags = {"tags": ", ".join(tags_of(config)), **({"group": config.monitor.group} if config.monitor.group
                                                       else {})}
        run_id = client.create_run(experiment, run_name=name_of(config), tags=tags).info.run_id
        from mlflow.entities import Param

        params = [Param(key, str(value)[:MOST_CHARACTERS]) for key, value in flat(config).items()]
        for first in range(0, len(params), MOST_PARAMS):
            client.log_batch(run_id, params=params[first:first + MOST_PARAMS])
        return run_id

    def metrics(self, rows: Sequence[tuple[int, Metrics]]) -> None:
        from mlflow.entities import Metric

        found = [Metric(_named(name), value, int(1000 * (numbers.get("run/time") or 0)), step)
                 for step, numbers in rows for name, value in known(numbers)]
        for first in range(0, len(found), MOST_METRICS):
            self._client.log_batch(self._id, metrics=found[first:first + MOST_METRICS])

    def texts(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        self._client.log_dict(self._id, [{"prompt": prompt, "text": text} for prompt, text in rows],
                              f"texts/step-{step:08d}.json")

    def picture(self, step: int, svg: str) -> None:
        self._client.log_text(self._id, svg, f"timeline/step-{step:08d}.svg")

    def finish(self, state: str) -> None:
        status = {ENDED: "FINISHED", FAILED: "FAILED"}.get(state, "KILLED")  # MLflow's word for stopped
        self._client.set_terminated(self._id, status)


def _drop_empty(folder: Path, run_id: str) -> None:
    """Remove files of metrics to which a run that was killed had not yet written a number: MLflow could read
    nothing of the run any more."""
    for path in folder.glob(f"*/{run_id}/metrics/**/*"):
        if path.is_file() and not path.stat().st_size:
            path.unlink()


def _named(name: str) -> str:
    """The name of a metric in MLflow. time/compute/0 becomes time/compute_by_position/0, because MLflow
    stores time/compute in a file, and a file cannot be a folder, too."""
    what, position = by_position(name)
    return name if position is None else f"{what}_by_position/{position}"

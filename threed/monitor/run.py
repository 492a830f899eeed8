"""Run: read the files in the folder of a run, finished or under way."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from threed.base.errors import InputError, check_type
from threed.monitor.compare import compare
from threed.monitor.folders import as_run
from threed.monitor.traces import RunTrace, read_run
from threed.planner.from_config import load_config
from threed.schema import Config


class Run:
    """The files in a run's folder (`run.dir`). Each file is read when it is first used.

    Raises InputError where the folder or a file does not exist, and where a file is damaged.

    >>> run = threed.Run("runs/toy")
    >>> run.metrics[-1]["train/loss"], run.compare()["step"]
    """

    def __init__(self, path: str | Path):
        check_type("path", path, (str, Path), "the folder that run.dir named")
        self.path = as_run(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @cached_property
    def config(self) -> Config:
        """The config with which the run was last started."""
        return load_config(self.path)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """A row a step, in order: `step`, and numbers by the names that `threed/monitor/log.py` lists."""
        file = self.path / "metrics.jsonl"
        try:
            lines = file.read_text().splitlines(keepends=True)
        except FileNotFoundError:
            raise InputError(f"{file}: there is none; the run has not ended a step") from None
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{file} cannot be read: {error}") from None
        return [_row(line, f"{file}, line {number}") for number, line in enumerate(lines, 1)
                if line.endswith("\n")]  # half a line at the end is what a kill leaves

    @cached_property
    def traces(self) -> RunTrace:
        """When each instruction of each traced step ran, on every rank (monitor.trace_every)."""
        return read_run(self.path)

    def compare(self) -> dict[str, Any]:
        """Predicted and measured seconds of the step, by op, lane, unit and stage, and where each rank's time
        went: the document of `threed compare --json`."""
        return asdict(compare(self.path))


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
        if not isinstance(values, dict) or "step" not in values:
            raise ValueError("no step")
    except ValueError as error:
        raise InputError(f"{where} is damaged: {error}") from None
    return values

"""trackio: a local database in run.dir/trackio, or where TRACKIO_DIR says. `TRACKIO_DIR=RUN/trackio trackio
show` shows it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from threed.monitor.loggers.logger import About, Logger, Metrics, finite, flat, name_of


class Trackio(Logger):
    def __init__(self) -> None:
        self._run: Any = None

    def start(self, about: About, run_id: str | None) -> str | None:
        folder = about.folder("trackio")
        self.place = os.environ.get("TRACKIO_DIR") or str(folder)
        os.environ["TRACKIO_DIR"] = os.path.abspath(self.place)
        import trackio

        for module in map(import_module, ("trackio", "trackio.run", "trackio.utils")):
            vars(module)["print"] = _silent  # it tells how to start its page, at each start and end
        config = about.config
        self._run = trackio.init(config.monitor.project, name=run_id or name_of(config),
                                 group=config.monitor.group, config=flat(config),
                                 resume="allow" if run_id else "never", embed=False,
                                 auto_log_gpu=False, auto_log_cpu=False)
        self.kept = f"; {self.place} has what came before"
        return self._run.name

    def metrics(self, rows: Sequence[tuple[int, Metrics]]) -> None:
        for step, numbers in rows:
            self._run.log(dict(finite(numbers)), step=step)

    def texts(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        import trackio

        table = [{"prompt": prompt, "text": text} for prompt, text in rows]
        self._run.log({"texts": trackio.Table(data=[list(row.values()) for row in table],
                                              columns=["prompt", "text"])}, step=step)

    def finish(self, state: str) -> None:
        self._run.finish()


def _silent(*words: object, **how: object) -> None:
    """In place of `print`."""

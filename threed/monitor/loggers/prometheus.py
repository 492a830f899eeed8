"""Prometheus: the numbers of the last step, as text on a port, or in a file for node_exporter's textfile
collector.

    threed_train_loss{run="toy pp2 dp2 tp2"} 6.31
    threed_time_compute_by_position{run="toy pp2 dp2 tp2",position="0"} 0.41
    threed_step{run="toy pp2 dp2 tp2"} 20
    threed_running{run="toy pp2 dp2 tp2"} 1             0 once the run has ended, in the file
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from threed.monitor.loggers.logger import About, Logger, Metrics, by_position, name_of

_OTHER = re.compile(r"[^a-zA-Z0-9_]+")


class Prometheus(Logger):
    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {}
        self._server: Any = None
        self._file: Path | None = None

    def start(self, about: About, run_id: str | None) -> str | None:
        from prometheus_client import CollectorRegistry, start_http_server

        monitor = about.config.monitor
        self._registry, self._run = CollectorRegistry(), name_of(about.config)
        self._file = Path(monitor.prometheus_file) if monitor.prometheus_file else None
        places = [str(self._file)] if self._file else []
        if monitor.prometheus_port is not None:
            try:
                self._server = start_http_server(monitor.prometheus_port, registry=self._registry)[0]
                places.insert(0, f"http://localhost:{self._server.server_port}/metrics")
            except OSError as error:
                why = f"monitor.prometheus_port={monitor.prometheus_port} cannot be used: {error.strerror}"
                if self._file is None:
                    raise OSError(f"{why}; take another port") from None
                about.warn(f"warning: {why}; the run goes on with {self._file}")
        self.place = ", ".join(places)
        self._set("running", 1.0)
        self._set("step", float(about.step))
        self._write()
        if monitor.prometheus_port == 0:
            about.warn(f"prometheus reads {places[0]}")
        return None

    def metrics(self, rows: Sequence[tuple[int, Metrics]]) -> None:
        step, numbers = rows[-1]  # what came between was not asked for
        self._set("step", float(step))
        for name, value in numbers.items():
            self._set(name, math.nan if value is None else float(value))
        self._write()

    def finish(self, state: str) -> None:
        self._set("running", 0.0)
        self._write()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _set(self, name: str, value: float) -> None:
        from prometheus_client import Gauge

        what, position = by_position(name)
        plain = "threed_" + _OTHER.sub("_", what) + ("" if position is None else "_by_position")
        if (gauge := self._gauges.get(plain)) is None:
            labels = ["run", "position"][:1 if position is None else 2]
            gauge = self._gauges[plain] = Gauge(plain, what, labels, registry=self._registry)
        gauge.labels(self._run, *([] if position is None else [position])).set(value)

    def _write(self) -> None:
        """Replace the file as a whole: its reader never sees half of it."""
        from prometheus_client import write_to_textfile

        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_to_textfile(str(self._file), self._registry)

"""Loggers by their name in `monitor.loggers`. A new one is a file, in monitor/loggers or with a script, and a
row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LoggerRow:
    """A row of `LOGGERS`."""

    kind: str | Callable[[], Any]  # the class, or "module:Class", which is imported when a run has the logger
    module: str = ""  # of the library that the logger imports; "": none
    package: str = ""  # what pip calls the library
    draws: bool = False  # whether it takes pictures (`monitor.timeline_every`)


_HERE = "threed.monitor.loggers"
LOGGERS: dict[str, LoggerRow] = {
    "wandb": LoggerRow(f"{_HERE}.wandb:Wandb", "wandb", "wandb", draws=True),
    "tensorboard": LoggerRow(f"{_HERE}.tensorboard:TensorBoard", "tensorboard", "tensorboard"),
    "mlflow": LoggerRow(f"{_HERE}.mlflow:MLflow", "mlflow", "mlflow-skinny", draws=True),
    "trackio": LoggerRow(f"{_HERE}.trackio:Trackio", "trackio", "trackio"),
    "prometheus": LoggerRow(f"{_HERE}.prometheus:Prometheus", "prometheus_client", "prometheus-client"),
}

"""Sections of the run itself: what it tells, and the processes and devices that it has."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from threed import devices
from threed.base.errors import InputError
from threed.base.paths import expanded
from threed.base.quantity import parse_seconds
from threed.schema.keys import key
from threed.schema.loggers import LOGGERS

# What is wrong with a value: how the message goes on after the key.


def _loggers(names: list[str]) -> Iterator[str]:
    given = f"=[{','.join(map(str, names))}]"
    for name in dict.fromkeys(names):
        if name not in LOGGERS:
            near = difflib.get_close_matches(str(name).lower(), LOGGERS, 1)
            hint = f"; did you mean {near[0]}?" if near else ", or a row of threed.extend.LOGGERS"
            yield f"{given}: {name} is none of {', '.join(LOGGERS)}{hint}"
        elif names.count(name) > 1:
            yield f"{given}: {name} is named twice"


def _port(value: int) -> Iterator[str]:
    if not 0 <= value < 65536:
        yield f"={value}: must be between 0 and 65535"


def _dir(value: str) -> Iterator[str]:
    if not value.strip():
        yield " is empty: give a folder for checkpoints and metrics"


def _stop_after(value: str) -> Iterator[str]:
    try:
        if not parse_seconds(value) > 0:
            yield f"={value}: must be more than 0"
    except InputError as error:
        yield f"={error}"


@dataclass
class MonitorConfig:
    loggers: list[str] = key(["wandb"], "what gets the metrics, besides metrics.jsonl: "
                             f"{', '.join(LOGGERS)}; []: nothing", check=_loggers)
    wandb: str = key("auto", choices={
        "auto": "online if WANDB_MODE or WANDB_API_KEY says so, else offline", "offline": "", "online": "",
        "disabled": ""})
    project: str = key("threed", "project in wandb")
    name: str | None = key(None, "name of the run in wandb; null: the last part of run.dir, and the mesh")
    group: str | None = key(None, "group of the run in wandb")
    tags: list[str] = key([], "of the run in wandb, besides those of its mesh, schedule and precision")
    peak_tflops: float | None = key(
        None, "of one device, for perf/mfu; null: looked up, null where not known", above=0)
    console_every: int = key(1, "steps between console lines", least=1)
    trace_every: int = key(10, "steps between traced steps, in run.dir/trace; 0: none (otherwise the last "
                           "step too)", least=0)
    timeline_every: int = key(0, "steps between pictures of the measured timeline in wandb and mlflow; 0: "
                              "never", least=0)
    quiet: bool = key(False, "on the console only warnings, errors and the summary; run.dir/log.txt has "
                      "all lines")
    prometheus_port: int | None = key(None, "where prometheus reads the metrics; 0: a free one, which the "
                                      "console names", check=_port)
    prometheus_file: str | None = key(
        None, "the same as a file, NAME.prom, for the textfile collector of node_exporter", path=expanded)
    report: bool = key(True, "whether wandb gets the page of `threed report` at the end of the run")

    @property
    def draws(self) -> bool:
        """Whether a logger may take pictures."""
        return any(LOGGERS[name].draws for name in self.loggers
                   if name != "wandb" or self.wandb != "disabled")


@dataclass
class RunConfig:
    dir: str = key("runs/default", "folder of checkpoints, metrics and traces", check=_dir, path=expanded)
    timeout_s: float = key(600.0, "a rank that waits this long for another ends the run and says for whom",
                           least=1)
    connect_timeout_s: float = key(
        300.0, "how long machines, and then ranks, wait for each other to come", least=1)
    device: str = key("auto", choices=devices.CHOICES)
    deterministic: bool = key(False, "on a GPU: the same bits in each run, from slower kernels; what has "
                              "none is an error")
    attention_backend: str = key("auto", choices={
        "auto": "torch chooses, and the log says which", "flash": "", "efficient": "", "cudnn": ""})
    cuda_graphs: bool = key(False, "replay a unit's kernels as one CUDA graph, where they are so short "
                            "that the host cannot issue them in time")
    verify_every: int = key(0, "every so many steps, one is computed twice and compared, to find a machine "
                            "that computes wrongly; 0: never", least=0)
    restarts: int = key(3, "most starts after failures from one checkpoint; the count begins anew at a "
                        "newer one. Under torchrun itself its --max-restarts is the outer bound, and srun "
                        "starts no task again", least=0)
    restart_wait_s: float = key(5.0, "before the first of them; doubled each time, up to 300", least=0)
    stop_after: str | None = key(None, "such as 3h50m, 90m, 2d or seconds: the run saves and ends before so "
                                 "much time has passed since its start, restarts included; null: it does "
                                 "not", check=_stop_after)

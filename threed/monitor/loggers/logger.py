"""Logger: the base of what tells another program of a run (`monitor.loggers`), and what each is told of it:
name, tags, facts that a config does not have. All loggers get the names and numbers of metrics.jsonl.

`threaded` calls a logger on a thread of its own. Whatever a method raises turns the logger off, and does not
end the run. A new logger is a class, in a file of its own, and a row of `schema.LOGGERS`:
docs/extending/logger.md.
"""

from __future__ import annotations

import math
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from threed.base.axes import shown
from threed.base.errors import InputError
from threed.models.model import num_parameters
from threed.schema import LOGGERS, Config

PROBE_S = 5.0  # how long a server may take to answer at all
_OF_POSITION = re.compile(r"(.+)/(\d+)")

Metrics = Mapping[str, float | None]


@dataclass(frozen=True)
class About:
    """What a logger is told when a run starts."""

    config: Config
    step: int  # steps done before
    goes_on: bool  # whether this is a run that a logger may know: resumed, or started again after a failure
    warn: Callable[[str], None]  # says a line on the run's console

    def folder(self, name: str) -> Path:
        """One in run.dir."""
        return Path(self.config.run.dir) / name


class Logger:
    """Base of loggers: each method does nothing by itself. They are called one after the other, on one
    thread."""

    place = ""  # where its files are, or its address, for the end of the run
    kept = ""  # what was logged before a failure, and how to view it

    def required(self, about: About) -> bool:
        """Whether the run must not start without this logger."""
        return False

    def start(self, about: About, run_id: str | None) -> str | None:
        """Begin, or go on with the run `run_id`. Returns the id by which it can go on later. InputError where
        the logger is `required`, and does not start."""

    def metrics(self, rows: Sequence[tuple[int, Metrics]]) -> None:
        """Steps with their numbers, in order; None: not known. Numbers may be infinite or NaN."""

    def texts(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        """Prompts, each with what the model has added to it."""

    def picture(self, step: int, svg: str) -> None:
        """The measured timeline of a step."""

    def report(self, file: Path) -> None:
        """The page of the run, after its last step."""

    def finish(self, state: str) -> None:
        """End: `state` is one of `monitor.state`."""


def check_installed(config: Config) -> None:
    """InputError where the library of a logger is not here."""
    for name in config.monitor.loggers:
        row, disabled = LOGGERS[name], name == "wandb" and config.monitor.wandb == "disabled"
        if row.module and not disabled and find_spec(row.module) is None:
            raise InputError(f"monitor.loggers has {name}, whose library is not installed here: pip install "
                             f"{row.package}, or leave {name} out")


def make(name: str) -> Logger:
    """The logger of this name in `LOGGERS`."""
    kind = LOGGERS[name].kind
    if isinstance(kind, str):
        module, _, name = kind.partition(":")
        kind = getattr(import_module(module), name)
    return kind()


def name_of(config: Config) -> str:
    """`monitor.name`; else the folder of the run, and its mesh: "toy pp2 dp2 tp2"."""
    return config.monitor.name or " ".join([Path(config.run.dir).name, *_sizes(config)])


def tags_of(config: Config) -> list[str]:
    return [*config.monitor.tags, *_sizes(config), config.parallel.schedule, f"zero{config.zero.stage}",
            config.precision.dtype]


def _sizes(config: Config) -> list[str]:
    return [f"{axis}{config.axis_sizes[axis]}" for axis in shown(config.axis_sizes)]


def facts_of(config: Config) -> dict[str, int]:
    """Numbers that follow from a config. Parameters are those of the whole model, without the padding of its
    vocabulary."""
    return {"parameters": model_size(config), "world_size": config.world_size,
            f"{config.model.counted}_per_step": config.tokens_per_step,
            "micro_batches": config.num_microbatches}


def model_size(config: Config) -> int:
    """Parameters of the model, without the padding of its vocabulary."""
    return num_parameters(config.model)


def flat(config: Config) -> dict[str, Any]:
    """The config and its facts by dotted key."""
    values = {**config.to_dict(), "facts": facts_of(config)}
    return {f"{section}.{key}": value for section, keys in values.items() for key, value in keys.items()}


def known(metrics: Metrics) -> Iterator[tuple[str, float]]:
    """The metrics that have a number."""
    return ((name, float(value)) for name, value in metrics.items() if value is not None)


def finite(metrics: Metrics) -> Iterator[tuple[str, float]]:
    return ((name, value) for name, value in known(metrics) if math.isfinite(value))


def by_position(name: str) -> tuple[str, str | None]:
    """("time/compute", "3") of "time/compute/3"; ("train/loss", None) of "train/loss"."""
    match = _OF_POSITION.fullmatch(name)
    return (match[1], match[2]) if match else (name, None)


def unreachable(url: str) -> str | None:
    """Why a server does not answer, found within `PROBE_S`; None where it does. Libraries try again for
    minutes before they say so. What is no failure of the network (a certificate, a page that is not there) is
    theirs to judge."""
    if not url.startswith(("http://", "https://")):
        return None
    try:
        with urllib.request.urlopen(url, timeout=PROBE_S):
            return None
    except urllib.error.HTTPError as error:
        return f"{url} answers with status {error.code}" if error.code >= 500 else None
    except OSError as error:  # URLError is one
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return f"{url} does not answer within {PROBE_S:g} s"
        certificate = type(reason).__module__ == "ssl"
        return None if certificate else f"{url} cannot be reached: {getattr(reason, 'strerror', 0) or reason}"
    except Exception as error:  # an address or an answer that is not HTTP
        return f"{url}: {type(error).__name__}: {error}"


def first_line(error: BaseException) -> str:
    """What an error says, in a line: libraries spread a short reason over several."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3]) or 'no reason is given'}"[:300].rstrip(".")

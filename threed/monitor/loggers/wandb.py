"""wandb: the usual logger. Besides numbers it is told of name, group and tags, facts that a config does not
have, which metrics it draws by itself, texts, pictures, and the page of the run.

No server ends a run or holds it up: where wandb fails while it starts, the run goes on offline, after one try
and one line, unless monitor.wandb=online asks for a server. Then the run does not start; but a run that has
started once goes on, whatever becomes of the server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from threed.base.errors import InputError
from threed.comm.environment import restarted
from threed.monitor.loggers.logger import (
    About,
    Logger,
    Metrics,
    facts_of,
    first_line,
    known,
    name_of,
    tags_of,
    unreachable,
)
from threed.monitor.metrics import METRICS
from threed.monitor.state import FAILED
from threed.schema import Config

MODES = {"online": "online", "offline": "offline", "disabled": "disabled",
         "run": "online", "dryrun": "offline", "shared": "online"}  # that WANDB_MODE may name
INIT_S = 15.0  # for a server that answers, but not as it should
SERVER = "https://api.wandb.ai"


def wandb_mode(setting: str) -> tuple[str, str | None]:
    """online, offline or disabled, and what is wrong with the environment. `auto`: what WANDB_MODE says, else
    online where there is a key. No account is needed for offline."""
    said = os.environ.get("WANDB_MODE", "").strip()
    if setting != "auto":
        return setting, None
    if not said:
        return ("online" if os.environ.get("WANDB_API_KEY") else "offline"), None
    if (mode := MODES.get(said.lower())) is not None:
        return mode, None
    return "offline", f"WANDB_MODE={said} is none of online, offline, disabled"


def is_off(config: Config) -> bool:
    return wandb_mode(config.monitor.wandb)[0] == "disabled"


class Wandb(Logger):
    def __init__(self) -> None:
        self._run: Any = None
        self._scratch: Path | None = None

    def required(self, about: About) -> bool:
        return about.config.monitor.wandb == "online" and not restarted()

    def start(self, about: About, run_id: str | None) -> str | None:
        mode, problem = wandb_mode(about.config.monitor.wandb)
        server = os.environ.get("WANDB_BASE_URL") or SERVER
        if not server.startswith(("http://", "https://")):  # wandb would fail offline, too
            problem = f"WANDB_BASE_URL={os.environ.pop('WANDB_BASE_URL')} is no address such as {SERVER}"
        # it reads the variable for itself, refuses to import with one that it does not know, and would
        # prefer it to a mode that the config names
        os.environ["WANDB_MODE"] = mode
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_CACHE_DIR", str(about.folder("wandb").absolute() / "cache"))
        self._scratch = about.folder("wandb").absolute() / "tmp"
        _import(self._scratch)
        if mode == "online":
            problem = problem or self._start_online(about, run_id, server)
            if problem is not None and self.required(about):
                raise InputError(f"monitor.wandb=online, but {problem}. Mend that, or train with "
                                 "monitor.wandb=auto, which goes on offline where wandb is not reached")
        if problem is not None:
            about.warn(f"warning: {problem}; wandb goes on offline, and `wandb sync` sends it later")
        if self._run is None:
            os.environ["WANDB_MODE"] = "offline"
            self._run = _init(about.config, run_id, "offline")
        define(self._run)
        self.place = os.path.dirname(self._run.dir)
        self.kept = f"; {self.place} has what came before, for `wandb sync`"
        return self._run.id

    def _start_online(self, about: About, run_id: str | None, server: str) -> str | None:
        """Returns what is wrong with the server, the key or the environment."""
        if (problem := unreachable(server)) is not None:
            return f"wandb's server {problem}"
        try:
            self._run = _init(about.config, run_id, "online")
        except Exception as error:
            return f"wandb does not start with {server}: {first_line(error)}"
        return None

    def metrics(self, rows: Sequence[tuple[int, Metrics]]) -> None:
        for step, numbers in rows:
            self._run.log(dict(known(numbers)), step=step)

    def texts(self, step: int, rows: Sequence[tuple[str, str]]) -> None:
        import wandb

        table = wandb.Table(columns=["step", "prompt", "text"], data=[[step, *row] for row in rows])
        self._run.log({"texts": table}, step=step)

    def picture(self, step: int, svg: str) -> None:
        import wandb

        self._run.log({"timeline": wandb.Html(svg)}, step=step)

    def report(self, file: Path) -> None:
        """The page of a run, as an artifact, and among the run's charts."""
        import wandb

        artifact = wandb.Artifact(f"report-{self._run.id}", type="report",
                                  description="what ran, predicted and measured: threed report")
        # the file stays where it is: no copy in the home folder
        artifact.add_file(str(file), policy="immutable", skip_cache=True)
        self._run.log_artifact(artifact)
        self._run.log({"report": wandb.Html(str(file), inject=False)})

    def finish(self, state: str) -> None:
        self._run.finish(exit_code=int(state == FAILED))
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _import(scratch: Path) -> None:
    """Import wandb. It makes two folders at once, and a rank, which ends without the interpreter's own
    shutdown, would leave them in the folder for temporary files of the whole machine."""
    if "wandb" in sys.modules:
        return
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    usual, mine = tempfile.mkdtemp, threading.get_ident()

    def mkdtemp(suffix: Any = None, prefix: Any = None, dir: Any = None) -> Any:
        return usual(suffix, prefix, scratch if dir is None and threading.get_ident() == mine else dir)

    with contextlib.suppress(OSError):  # a full disk: wandb says so
        scratch.mkdir(parents=True, exist_ok=True)
    tempfile.mkdtemp = mkdtemp  # pyright: ignore
    try:
        import wandb  # noqa: F401
    finally:
        tempfile.mkdtemp = usual


def _init(config: Config, run_id: str | None, mode: str) -> Any:
    import wandb

    settings: dict[str, Any] = {"console": "off", "x_disable_stats": True, "silent": True}
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        settings["init_timeout"] = INIT_S
    return wandb.init(
        project=config.monitor.project, name=name_of(config), group=config.monitor.group,
        tags=tags_of(config), id=run_id, mode=mode,  # pyright: ignore
        resume="allow" if run_id and mode == "online" else None, dir=config.run.dir,
        config={**config.to_dict(), "facts": facts_of(config)}, settings=wandb.Settings(**settings))


def define(run: Any) -> None:
    """Say which metrics get a chart, and how a run's summary sums up. A chart for each position would be 128
    charts at pp=16: the values are logged, and the page and charts that somebody makes can show them."""
    run.define_metric("run/*", hidden=True)  # to be chosen as horizontal axes
    for row in METRICS:
        for name in row.names:
            if row.by_position:
                run.define_metric(f"{name}/*", hidden=True)
            if row.summary:
                run.define_metric(name, summary=row.summary)

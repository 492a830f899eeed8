"""Charts: what wandb is told of a run, besides its numbers: name, group and tags, facts that a config does
not have, which metrics it draws by itself, pictures, and the page of the run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from threed.mesh import AXES
from threed.models.model import num_parameters
from threed.monitor.attribute import CAUSES
from threed.schema import Config

# A chart for each position of each of these would be 128 charts at pp=16: the values are logged, and the page
# and charts that somebody makes can show them. Their means over positions have charts.
BY_POSITION = (*(f"time/{cause}" for cause in CAUSES), "pipeline/bubble_measured",
               "pipeline/bubble_predicted")
SUMMARIES = {"train/loss": "min", "val/loss": "min", "perf/step_s": "mean", "perf/tokens_per_s": "mean",
             "perf/samples_per_s": "mean", "perf/mfu": "mean", "memory/peak_bytes": "max"}


def wandb_mode(setting: str) -> str:
    """`auto`: what the environment says, else offline. No account is needed for offline."""
    if setting != "auto":
        return setting
    return os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")


def start(config: Config, run_id: str | None) -> Any:
    """A wandb run, or None where wandb is disabled. `run_id`: of a run that goes on."""
    mode = wandb_mode(config.monitor.wandb)
    if mode == "disabled":
        return None
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    run = wandb.init(
        project=config.monitor.project, name=config.monitor.name or name_of(config),
        group=config.monitor.group, tags=[*config.monitor.tags, *tags_of(config)], id=run_id,
        mode=mode,  # pyright: ignore
        resume="allow" if run_id and mode == "online" else None, dir=config.run.dir,
        config={**config.to_dict(), "facts": facts_of(config)},
        settings=wandb.Settings(console="off", x_disable_stats=True))
    define(run)
    return run


def name_of(config: Config) -> str:
    """The folder of the run, and its mesh: "toy pp2 dp2 tp2"."""
    return " ".join([Path(config.run.dir).name, *_sizes(config)])


def tags_of(config: Config) -> list[str]:
    return [*_sizes(config), config.parallel.schedule, f"zero{config.zero.stage}", config.precision.dtype]


def _sizes(config: Config) -> list[str]:
    return [f"{axis}{config.dp if axis == 'dp' else getattr(config.parallel, axis)}" for axis in AXES]


def facts_of(config: Config) -> dict[str, int]:
    """Numbers that follow from a config. Parameters are those of the whole model, without the padding of its
    vocabulary."""
    return {"parameters": model_size(config), "world_size": config.world_size,
            f"{config.model.counted}_per_step": config.tokens_per_step,
            "micro_batches": config.num_microbatches}


def model_size(config: Config) -> int:
    """Parameters of the model, without the padding of its vocabulary."""
    return num_parameters(config.model)


def define(run: Any) -> None:
    """Say which metrics get a chart, and how a run's summary sums up."""
    for name in BY_POSITION:
        run.define_metric(f"{name}/*", hidden=True)
    run.define_metric("run/*", hidden=True)  # to be chosen as horizontal axes
    for name, how in SUMMARIES.items():
        run.define_metric(name, summary=how)


def picture(run: Any, step: int, svg: str) -> None:
    import wandb

    run.log({"timeline": wandb.Html(svg)}, step=step)


def texts(run: Any, step: int, rows: Sequence[tuple[str, str]]) -> None:
    """`rows`: a prompt, and what the model has added to it."""
    import wandb

    table = wandb.Table(columns=["step", "prompt", "text"], data=[[step, *row] for row in rows])
    run.log({"texts": table}, step=step)


def report(run: Any, file: Path) -> None:
    """The page of a run, as an artifact, and among the run's charts."""
    import wandb

    artifact = wandb.Artifact(f"report-{run.id}", type="report",
                              description="what ran, predicted and measured: threed report")
    artifact.add_file(str(file))
    run.log_artifact(artifact)
    run.log({"report": wandb.Html(str(file), inject=False)})


def finish(run: Any) -> None:
    run.finish(quiet=True) if "quiet" in inspect.signature(run.finish).parameters else run.finish()

"""Assemble: one rank's connections, plan, data, engine, log and trainer, which then runs. Everything that all
ranks must agree on is agreed before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from threed import __version__, native, validate
from threed.callback import Callback
from threed.callbacks import in_order
from threed.checkpoint.choose import begin_lineage
from threed.checkpoint.load import resume
from threed.checkpoint.save import tidy
from threed.checkpoints import check_room
from threed.comm import Comm, ProcessComm
from threed.data.samples import splits
from threed.data.tokens import Prepared, prepare
from threed.engine import shared
from threed.engine.connect import warm
from threed.engine.engine import Engine
from threed.engine.loopback import channel_pairs
from threed.engine.watch import Watch
from threed.errors import InputError, Stopped
from threed.monitor.compare import save_config
from threed.monitor.log import CLOSE_S, FAILED_S, Log
from threed.optimizers.registry import OPTIMIZERS
from threed.planner import make_mesh, make_pipeline, make_plan
from threed.requests import Requests
from threed.schema import Config
from threed.trainer import Trainer


def pick_device(config: Config, local_rank: int) -> torch.device:
    wanted = config.run.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("run.device=cuda, but torch sees no GPU here; use run.device=auto or cpu")
    if local_rank >= torch.cuda.device_count():
        raise InputError(f"local rank {local_rank} has no GPU: there are {torch.cuda.device_count()} on this "
                         "machine; start fewer processes a node, or use run.device=cpu")
    return torch.device("cuda", local_rank)


@dataclass(frozen=True)
class Job:
    """What a run's ranks have from whoever starts them."""

    config: Config
    callbacks: Sequence[Callback] = ()  # of a script
    prepared: Prepared | None = None  # data already made; None: rank 0 makes it
    on_step: Callable[[int], None] | None = None  # is told of each step that begins


def train(job: Job, local_rank: int, requests: Requests, watch: Watch, store: Any,
          closing: ExitStack) -> None:
    """Train on the watch's rank, from wherever `train.resume` says, to the end.

    `store`: where ranks meet. `closing`: gets what may take long to close.
    """
    config, prepared = job.config, job.prepared
    rank, mesh, device = watch.rank, make_mesh(config), pick_device(config, local_rank)
    with watch.phase("connect"):
        comm = ProcessComm(mesh, rank, device, config.run.timeout_s, store)
    watch.comm = comm
    with watch.phase("agree on a plan", waits=False):
        # Rank 0 plans: a search may round otherwise on another machine, and a file may be on one machine
        # only.
        pipeline = comm.exchange(make_pipeline(config) if rank == 0 else None)[0]
        plan = make_plan(config, pipeline)
        _agree(comm, config, plan.digest)
    with watch.phase("connect pipeline positions"):
        comm.open_channels(channel_pairs(plan))
        if device.type == "cuda":
            warm(comm)
    log = None
    try:
        watch.hosts = names = shared.hosts(comm)
        made = prepare(config.data, config.model,
                       partial(_progress, requests)) if rank == 0 and prepared is None else prepared
        with watch.phase("prepare data"):
            prepared = comm.broadcast(made)
        assert prepared is not None
        with watch.phase("compare the prepared data", waits=False):
            shared.same_data(comm, prepared, names)
        data = splits(prepared.prefix, config.model.seq_len, config.train.seed,
                      config.data.validation_fraction,
                      config.model.vocab)
        check_room(plan, comm)
        engine = Engine(config, plan, comm)
        watch.engine = engine
        if rank == 0:
            log = Log(config)  # takes the folder for this run
            closing.callback(lambda log=log: log.close(FAILED_S if watch.failed else CLOSE_S))
            tidy(config)
            for line in [*validate.warnings(config), *_without_compiler(config, device),
                         *save_config(config)]:
                log.say(f"warning: {line}")
            log.say(f"{mesh.draw()}\n{len(plan)} instructions, plan {plan.digest}, {device.type}")
        with watch.phase("see that run.dir is shared", waits=False):
            shared.same_folder(comm, Path(config.run.dir), names, config.run.timeout_s)
        with watch.phase("load a checkpoint", waits=False):
            resumed = resume(config, engine.zero, log.say if log else lambda line: None)
        if log:
            begin_lineage(config, resumed.path, resumed.lineage)
            log.start(engine.zero.step_number, resumed.manifest.get("wandb_id"))
            for line in resumed.notes:
                log.say(f"note: {line}")
            if resumed.path:
                log.say(f"resumed from {resumed.path} after step {engine.zero.step_number}")
        Trainer(engine, data, watch, log, requests, resumed).run(in_order(job.callbacks))
    finally:
        if watch.engine is not None:
            watch.engine.close()
        watch.engine = None
    watch.close()
    comm.close()


def _progress(requests: Requests, line: str) -> None:
    """What rank 0 says while it prepares data, which takes long: it need not go on for a run that was asked
    to stop."""
    print(line, flush=True)
    if requests.stop:
        raise Stopped("stopped on request before the first step, while the data were being prepared")


def _agree(comm: Comm, config: Config, digest: str) -> None:
    """All ranks run one plan of one config, and round alike, or none runs."""
    compiled = native.ADAMW is not None or not _steps_on_host(config, comm.device)
    everywhere = comm.exchange((config.to_dict(), (digest, __version__), compiled))
    first = everywhere[0]
    for rank, other in enumerate(everywhere):
        if other == first:
            continue
        what = [f"{section}.{key}" for section, values in other[0].items() for key, value in values.items()
                if first[0].get(section, {}).get(key) != value]
        if not what and other[1] != first[1]:
            what = [f"plan or version ({', '.join(other[1])}; rank 0 has {', '.join(first[1])})"]
        if not what:
            without = 0 if other[2] else rank
            what = [f"the AdamW of the host, which rank {without} has not compiled (install gcc and threed "
                    "again there)"]
        raise InputError(f"rank {rank} and rank 0 differ in {', '.join(what)}: every rank must be given the "
                         "same config, overrides and version of threed")


def _steps_on_host(config: Config, device: torch.device) -> bool:
    """AdamW over fp32 weights in host memory: what native.c does."""
    there = device.type == "cpu" or config.offload.optimizer != "none"
    return there and OPTIMIZERS[config.optimizer.name].compiled and config.precision.master == "fp32"


def _without_compiler(config: Config, device: torch.device) -> list[str]:
    if native.ADAMW is not None or not _steps_on_host(config, device):
        return []
    return [f"AdamW on the host is torch's, and slower with 16 bits: {native.MISSING}. Install gcc, then "
            "threed again (make -B install, or pip install)"]

"""Setup: make one rank's connections, plan, data, engine, log and trainer, and run the trainer. Everything
that all ranks must agree on is compared before the first step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from threed.base import marks
from threed.base.console import show
from threed.base.errors import InputError, Stopped
from threed.base.quantity import many
from threed.base.requests import Requests
from threed.base.restart import Pace
from threed.base.version import __version__
from threed.checkpoint.choose import begin_lineage
from threed.checkpoint.load import Resumed, resume
from threed.checkpoint.older import tidy
from threed.comm.group import Comm
from threed.comm.process import ProcessComm
from threed.data.identity import identity
from threed.data.mix import open_splits, report
from threed.data.prompts import keep_tokenizer
from threed.data.tokens import Prepared, prepare
from threed.devices import device_of, pick
from threed.engine import shared
from threed.engine.connect import warm
from threed.engine.device import attention, compiles, set_up, shortcomings
from threed.engine.engine import Engine
from threed.engine.gpu import hosts, stay_beside, step_threads
from threed.engine.loopback import channel_pairs
from threed.engine.watch import Watch
from threed.monitor.banner import LONG_S, predicted_s, size_line, step_line
from threed.monitor.log import CLOSE_S, FAILED_S, Log
from threed.monitor.state import FAILED
from threed.optim import native
from threed.optim.registry import elementwise, optimizer_called
from threed.planner import Pipeline, analyse, make_mesh, make_pipeline
from threed.planner.auto import choices, chosen_for, with_choices
from threed.planner.from_config import config_of, save_config
from threed.planner.warnings import warnings_of
from threed.prediction.hardware import Hardware
from threed.prediction.peak import plan_room
from threed.program.analysis import Analysis
from threed.schema import Config
from threed.training.callbacks import in_order
from threed.training.hooks import Callback
from threed.training.host_room import check_hosts
from threed.training.trainer import Trainer

PREPARED = "threed/prepared"  # key of the store: rank 0 has prepared the data

# (job, local rank, requests, watch, store, what to close), as of `train`
Task = Callable[["Job", int, Requests, Watch, Any, ExitStack], None]


@dataclass(frozen=True)
class Job:
    """What a launcher gives to the ranks that it starts."""

    config: Config
    callbacks: Sequence[Callback] = ()  # of a script
    prepared: Prepared | None = None  # data; None: rank 0 prepares them
    pace: Pace | None = None  # where the rank says at which step it is, for a launcher that answers signals
    task: Task | None = None  # what ranks do instead of training


def train(job: Job, local_rank: int, requests: Requests, watch: Watch, store: Any,
          closing: ExitStack) -> None:
    """Train on the watch's rank, from the checkpoint that `train.resume` names, to the end.

    `store`: where ranks meet. `closing`: gets a callback that closes the log, which may take long.
    """
    config = job.config
    set_up(config)
    comm, analysis = connect(config, watch, pick(config.run.device, local_rank), store)
    given, config = config, config_of(analysis.plan)  # with what was chosen for this device
    looks = local_rank == 0  # at shared files, for its host
    prepared = _share_data(job, watch, comm, requests, store, looks)
    data = open_splits(config, prepared)
    few = check_hosts(job.config, analysis, comm, watch.hosts)
    threads = step_threads(comm, watch.hosts)
    with running(analysis, comm, watch) as engine:
        engine.zero.host_threads = threads
        log = _open_log(config, analysis, comm, watch, closing) if watch.rank == 0 else None
        with watch.phase("see that run.dir is shared", waits=False):
            shared.same_folder(comm, Path(config.run.dir), watch.hosts, config.run.timeout_s, looks)
        marks.mark("load")
        with watch.phase("load a checkpoint", waits=False):
            mine = identity(config, prepared) if log else None
            resumed = resume(config, engine.zero, log.say if log else lambda line: None, mine)
        marks.mark("start")
        if log:
            for line in few:
                log.say(f"warning: {line}")
            if threads and _steps_on_host(config, comm.device):
                log.say(f"the optimizer steps on the host with {many(threads, 'thread')} a rank")
            for line in (*chosen_for(given, config), *report(config, *data)):
                log.say(line)
            due = engine.zero.step_number < config.train.steps
            for line in resumed.notes if due else ():
                log.say(f"note: {line}")
            if resumed.path:
                log.say(f"resumed from {resumed.path} after step {engine.zero.step_number}")
        trainer = Trainer(engine, data, watch, log, requests, resumed, prepared.tokenizer)
        trainer.run(in_order(job.callbacks), partial(_begin, prepared, resumed, log))


def _begin(prepared: Prepared, resumed: Resumed, log: Log | None) -> None:
    """Make the run's folder this start's, on rank 0. Whatever may refuse a start has been asked before: a
    finished run is not touched by a start that is refused, or that has nothing to do."""
    if log is None:
        return
    config = log.config
    log.start(resumed.manifest.step, resumed.manifest.wandb_id)  # a logger may refuse
    begin_lineage(config, resumed.path, resumed.lineage)
    for line in (*save_config(config),
                 *keep_tokenizer(prepared.tokenizer, config.data, Path(config.run.dir))):
        log.say(f"warning: {line}")


@contextmanager
def running(analysis: Analysis, comm: ProcessComm, watch: Watch) -> Iterator[Engine]:
    """An engine, which the watch follows. It is closed at the end; where nothing has failed, so are the watch
    and the connections."""
    watch.engine = engine = Engine(analysis, comm)
    try:
        yield engine
    finally:
        engine.close()
        watch.engine = None
    watch.close()
    comm.close()


def connect(config: Config, watch: Watch, device: torch.device, store: Any,
            planning: Callable[[Config, Pipeline], Analysis] = analyse) -> tuple[ProcessComm, Analysis]:
    """Connect this rank with the others, and agree with them on a plan, which `planning` makes."""
    stay_beside(device)
    with watch.phase("connect"):
        comm = ProcessComm(make_mesh(config), watch.rank, device, config.run.timeout_s, store)
    watch.comm = comm
    with watch.phase("see that each rank has a GPU of its own, or none has", waits=False):
        watch.hosts = hosts(comm)
    with watch.phase("agree on a plan", waits=False):
        # Rank 0 plans: on another machine a search may round differently, and a file may be missing.
        # What fits depends on its device, too.
        made = None
        if watch.rank == 0:
            chosen = choices(config, _room(config, device))
            made = chosen, make_pipeline(with_choices(config, chosen))
        chosen, pipeline = comm.broadcast(made)
        analysis = planning(with_choices(config, chosen), pipeline)
        _agree(comm, config, analysis.digest)
    with watch.phase("connect pipeline positions"):
        comm.open_channels(channel_pairs(analysis.plan))
        if device_of(device).backend != "gloo":
            warm(comm)
    return comm, analysis


def _room(config: Config, device: torch.device) -> float:
    """Bytes of a device that a plan may take."""
    if (own := device_of(device)).kind == "cpu":
        return math.inf
    return plan_room(Hardware(), config, own.memory_bytes())


def _share_data(job: Job, watch: Watch, comm: Comm, requests: Requests, store: Any, looks: bool) -> Prepared:
    """The data, which rank 0 prepares if no launcher has, and which all hosts then compare."""
    config, prepared = job.config, job.prepared
    if prepared is None and watch.rank == 0:
        prepared = prepare(config.data, config.model, partial(_progress, requests, config.monitor.quiet))
        store.set(PREPARED, "")
    elif prepared is None:
        with watch.phase("prepare data", waits=False):  # for hours; the watch sees that rank 0 fails
            while not store.check([PREPARED]):
                time.sleep(watch.poll_s)
    with watch.phase("share the prepared data"):
        prepared = comm.broadcast(prepared)
    assert prepared is not None
    with watch.phase("compare the prepared data", waits=False):
        shared.same_data(comm, prepared, watch.hosts, looks)
    return prepared


def _open_log(config: Config, analysis: Analysis, comm: Comm, watch: Watch, closing: ExitStack) -> Log:
    """Rank 0's log, which locks the folder for this run, with the run's first lines."""
    log = Log(config)
    closing.callback(_close_log, log, watch)
    tidy(config)
    plan, device = analysis.plan, comm.device
    lines = [*warnings_of(config, plan), *_without_compiler(config, device), *shortcomings(config, device)]
    for line in lines:
        log.say(f"warning: {line}")
    chosen = attention(config, comm.device)
    log.say(f"{comm.mesh.draw()}\n{len(plan)} instructions, plan {analysis.digest}, {comm.device.type}, "
            f"attention: {chosen}{', deterministic' if config.run.deterministic else ''}")
    log.say(size_line(config))
    if (found := predicted_s(config, analysis, comm.device)) is not None:
        watch.pace.expect(found[0])
        if found[0] > LONG_S:
            log.say(step_line(*found), always=True)
    return log


def _close_log(log: Log, watch: Watch) -> None:
    if watch.failed:
        log.over(FAILED, watch.step)
    log.close(FAILED_S if watch.failed else CLOSE_S)


def _progress(requests: Requests, quiet: bool, line: str) -> None:
    """Print a line while rank 0 prepares data, which takes long, and raise Stopped if the run was asked to
    stop."""
    show(line, console=not quiet)
    if requests.stop:
        raise Stopped("stopped on request before the first step, while the data were being prepared")


def _agree(comm: Comm, config: Config, digest: str) -> None:
    """InputError where two ranks differ in config, plan or version of threed, or step on the host by
    different code, which rounds differently."""
    compiled = native.ADAMW is not None or not _steps_on_host(config, comm.device)
    here = compiled, compiles(config, comm.device), attention(config, comm.device)
    mine = config.to_dict(), (digest, __version__), here
    # A rank compares with rank 0 alone: with the configs of all ranks, ten thousand would each get 40 MB.
    differs = comm.all_gather(_difference(comm.rank, mine, comm.broadcast(mine)))
    for rank, what in enumerate(differs):
        if what:
            raise InputError(f"rank {rank} and rank 0 differ in {what}: every rank must be given the same "
                             "config, overrides and version of threed")


def _difference(rank: int, mine: tuple[Any, ...], first: tuple[Any, ...]) -> str:
    """In what a rank differs from rank 0; "" where it does not."""
    keys = [f"{section}.{key}" for section, values in mine[0].items() for key, value in values.items()
            if first[0].get(section, {}).get(key) != value]
    if keys or mine == first:
        return ", ".join(keys)
    if mine[1] != first[1]:
        return f"plan or version ({', '.join(mine[1])}; rank 0 has {', '.join(first[1])})"
    (adamw, pieces, attends), (first_adamw, first_pieces, first_attends) = mine[2], first[2]
    if adamw != first_adamw:
        return (f"the AdamW of the host, which rank {0 if adamw else rank} has not compiled (install gcc and "
                "threed again there)")
    if pieces != first_pieces:
        return (f"model.fused=auto, which rank {0 if pieces else rank} cannot compile (install triton, "
                "gcc and Python's headers there, or use model.fused=off)")
    return (f"attention, which is {attends} on rank {rank} and {first_attends} on rank 0 (choose one by "
            "run.attention_backend)")


def _steps_on_host(config: Config, device: torch.device) -> bool:
    """Whether the run uses AdamW over fp32 weights in host memory, which native.c computes."""
    on_host = device.type == "cpu" or config.offload.optimizer != "none"
    optimizer = optimizer_called(elementwise(config.optimizer.name))
    return on_host and optimizer.compiled and config.precision.master == "fp32"


def _without_compiler(config: Config, device: torch.device) -> list[str]:
    if native.ADAMW is not None or not _steps_on_host(config, device):
        return []
    return [f"AdamW on the host is torch's, and slower with 16 bits: {native.MISSING}. Install gcc, then "
            "threed again (make -B install, or pip install .)"]

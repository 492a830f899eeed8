"""Local launcher: start the ranks of a run on this machine, and start them again after a failure.

Libraries are imported once, then the process forks: eight ranks start in seconds. No GPU is used before the
fork.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from threed import devices
from threed.base import marks
from threed.base.console import RECORD, leave, say
from threed.base.errors import InputError
from threed.base.requests import StopRequests
from threed.base.restart import FailureNote, RankSteps, Restarts
from threed.base.signals import ASKS, STOPS, handle
from threed.checkpoint.lineage import read_latest
from threed.comm.environment import RESTARTS, RankPlace
from threed.comm.process import file_store
from threed.comm.rendezvous import POLL_S
from threed.data.tokens import Prepared
from threed.engine.watch import tell
from threed.launcher.processes import (
    CONTEXT,
    GRACE_S,
    HANG_GRACE_S,
    Preparation,
    be_rank,
    end_all,
    ended_by,
    first_failure,
    pass_on,
    progress,
    signals_wait,
    start,
)
from threed.launcher.rank import run_rank
from threed.schema import Config
from threed.training.hooks import Callback
from threed.training.setup import Job, Task
from threed.training.stopped import stopped_now

ANSWER = "threed/answer"  # key of the store of ranks that do a task


class LocalLauncher:
    """The ranks of a run on this machine, and the signals that are passed on to them."""

    def __init__(self, config: Config, callbacks: Sequence[Callback] = (), task: Task | None = None):
        """`task`: what the ranks do instead of training."""
        self.config, self.callbacks, self.task = config, callbacks, task
        self.answer: bytes | None = None  # what a task has left in the store under ANSWER
        self.ranks: list[Any] = []
        self.preparing: Preparation | None = None
        self.asked, self.steps = StopRequests(), RankSteps(config.world_size)
        self.hurried = 0  # the signal of a second request to stop
        self.when = "before the first step"  # for the message of a stop while no rank runs
        handle(ASKS, self.forward)

    def forward(self, number: int, _: Any) -> None:
        if number in STOPS:
            if not self.ranks:
                if self.preparing is not None:
                    self.preparing.kill()
                say(f"stopped by {signal.Signals(number).name} {self.when}")
                leave(128 + number)
                return
            if not self.asked.again(number):
                return
            if self.asked.times == 1:
                say(self.steps.of(0).answer() if self.task is None else "stopping; once more to stop now")
            else:  # does not wait for a checkpoint
                self.hurried, number = number, signal.SIGKILL
        pass_on(self.ranks, number)

    def run(self) -> int:
        """Start the ranks, and again after a failure as long as `Restarts` allows it. Returns the exit status
        of the run."""
        RECORD.open(Path(self.config.run.dir))
        marks.mark("data")
        prepared = self.prepare()
        marks.mark("start")
        restarts = Restarts(self.config.run.restarts, self.config.run.restart_wait_s)
        os.environ["THREED_LAUNCH"] = uuid.uuid4().hex
        while True:
            os.environ[RESTARTS[0]] = str(restarts.total)
            self.steps = RankSteps(self.config.world_size)
            failure = self.start(prepared, self.steps)
            if self.hurried:
                say(stopped_now(self.config, self.steps.of(0)))
                return 128 + self.hurried
            if failure is None or self.asked.times:
                return failure.status if failure is not None else 0
            marks.begin("down")
            wait_s, text = restarts.after(failure, read_latest(self.config)[0])
            if text:
                say(text)
            if wait_s is None:
                return failure.status
            time.sleep(wait_s)
            marks.mark("start")

    def prepare(self, say: Callable[[str], None] | None = None) -> Prepared:
        """Prepare the data; `say` gets lines about the progress (None: the console). Errors as from
        `Preparation.result`, and InputError at once where a rank would miss its GPU."""
        check_gpus(self.config.run.device, self.config.world_size)
        self.preparing = Preparation(lambda: self.config, self.config, say or progress(self.config))
        self.preparing.start()
        prepared = self.preparing.result()
        self.preparing = None
        return prepared

    def start(self, prepared: Prepared | None, steps: RankSteps) -> FailureNote | None:
        """Start the ranks once and wait until all have ended. Returns why one has failed; None if none has.
        Errors as from `check_gpus`: what a script has called since `prepare` may have started a GPU."""
        check_gpus(self.config.run.device, self.config.world_size)
        size, parent = self.config.world_size, os.getpid()
        # the file where ranks meet: in memory, so it vanishes with the last rank, however the ranks end
        meeting = os.memfd_create("threed-store")
        path = f"/proc/self/fd/{meeting}"

        def body(rank: int) -> int:
            job = Job(self.config, self.callbacks, prepared, steps.of(rank), self.task)
            return run_rank(job, RankPlace(rank, rank, size, size), file_store(path, size))

        try:
            with signals_wait():
                self.ranks = [CONTEXT.Process(target=be_rank, args=(parent, partial(body, rank)),
                                              name=f"rank {rank}")
                              for rank in range(size)]
                # A rank's garbage collector need not scan what was imported, whose memory so remains shared.
                gc.freeze()
                start(self.ranks)
            store = file_store(path, size)
            failure = self._attend(store, steps)
            self.answer = store.get(ANSWER) if self.task and failure is None else None
            return failure
        finally:
            end_all(self.ranks)  # some may live if not all could be forked
            self.ranks, self.when = [], "before it started again"
            os.close(meeting)

    def _attend(self, store: Any, steps: RankSteps) -> FailureNote | None:
        """Wait for all ranks; once one has failed, only a little longer for the others. Returns why the first
        one failed; None if none has."""
        ranks, failure, deadline = self.ranks, None, math.inf
        while True:
            codes = [process.exitcode for process in ranks]
            if failure is None and any(codes):
                failure, grace_s = _why(codes, store, steps, bool(self.hurried))
                deadline = time.monotonic() + grace_s
            if all(code is not None for code in codes):
                return failure
            if time.monotonic() > deadline:
                end_all(ranks)
            wait([process.sentinel for process, code in zip(ranks, codes, strict=True) if code is None],
                 POLL_S)


def run_local(config: Config, callbacks: Sequence[Callback] = ()) -> int:
    """Start all ranks of a config here, pass signals on to them, and return the exit status of the run."""
    return LocalLauncher(config, callbacks).run()


def _why(codes: list[int | None], store: Any, steps: RankSteps, asked: bool) -> tuple[FailureNote, float]:
    """Why the first rank failed, and how long to wait for the others. Tells the others if the rank was killed
    and could not. `asked`: whether it was killed as asked."""
    failed = first_failure(codes)
    assert failed is not None
    rank, code = failed
    what, cause, status = ended_by(code)
    text = f"rank {rank} {what}"
    own = FailureNote(text, status, cause, steps.at(rank))
    note = tell(store, own)
    if (code < 0 or note.rank is None) and not asked:
        say(text)
    if code < 0:
        return own, GRACE_S
    return note, HANG_GRACE_S if note.hang else GRACE_S


def local_world_size(config_device: str) -> int | None:
    """Number of processes if `parallel.dp: auto` leaves it open: one a GPU; None on a machine without GPUs.
    Errors as from `Device.for_forks`."""
    return devices.for_forks(config_device)[1] or None


def check_gpus(device: str, ranks: int) -> None:
    """InputError if run.device asks for or allows GPUs, and `ranks` forked processes would not each get one.
    Errors also as from `Device.for_forks`."""
    _, gpus = devices.for_forks(device)
    if device in devices.ACCELERATORS and not gpus:
        raise InputError(devices.missing(device))
    if 0 < gpus < ranks:
        raise InputError(f"{ranks} ranks would start on this machine, and each takes a GPU, but it has "
                         f"{gpus}: lower parallel.dp, tp or pp, whose product is the number of ranks, or use "
                         "run.device=cpu")

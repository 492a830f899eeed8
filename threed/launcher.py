"""Launch: start the ranks of a run on this machine, or be one rank under torchrun or Slurm.

Libraries are imported once, then the process forks: eight ranks start in seconds. No GPU is touched before the fork.
"""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
import uuid
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import torch

from threed.checkpoint.lineage import read_latest
from threed.comm import file_store
from threed.data.tokens import Prepared, cache_root, prepare, remove_stale
from threed.engine.watch import Watch, lost_peer, say, tell
from threed.environment import RESTARTS, Place
from threed.errors import InputError, RunError, ThreedError
from threed.loop import Requests
from threed.rendezvous import meet
from threed.restart import Failure, Restarts, Steps
from threed.schema import Config
from threed.store import environment_store
from threed.train import train

GRACE_S = 5.0  # after the first rank has failed
ECHO_S = 3.0  # that a rank whose connections break waits for somebody to say why
LINGER_S = 2.0  # that rank 0 stays after a failure: twice as long as a rank takes to see it and end
POLL_S = 0.25
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def run_rank(config: Config, rank: int, local_rank: int, local_size: int, store: Any,
             prepared: Prepared | None = None, steps: Steps | None = None) -> int:
    """Be one rank, which notes its `steps`. Returns the exit status; the rank that failed first says why, the others end
    quietly."""
    requests = Requests()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    watches: list[Watch] = []

    def connected(watch: Watch) -> None:
        watches.append(watch)
        watch.on_step = partial(steps.note, rank) if steps is not None else None

    try:
        train(config, rank, local_rank, requests, connected, store, prepared)
        return 0
    except BaseException as error:  # SystemExit too: whoever leaves says so
        return _explain(error, rank, watches[0] if watches else None)


def run_place(config: Config, place: Place, parent: int) -> int:
    """Be the rank that torchrun or srun has started as a process of its own. `parent`: that process's at its start."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(parent)
    store = environment_store(config.run.connect_timeout_s)
    meet(store, place.rank, place.world_size, (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    status = run_rank(config, place.rank, place.local_rank, place.local_size, store)
    if status and place.rank == 0:  # it may hold the store, where the others read why
        time.sleep(LINGER_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no destructor may wait for a peer that is gone; and an interpreter's own end takes seconds


def _explain(error: BaseException, rank: int, watch: Watch | None) -> int:
    """Say what went wrong, if no other rank has; the exit status."""
    ours, lost = isinstance(error, ThreedError), lost_peer(error)
    status = error.status if isinstance(error, ThreedError) else 1
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    # What would be the same another time: not how long a rank has waited, nor what was alive.
    cause = f"{type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ is not None else text.splitlines()[0]
    if lost:  # gloo's own words name an address and a line of its source
        at = text.splitlines()[0] if ours else watch.where().splitlines()[0] if watch is not None else f"rank {rank}"
        text, cause = f"{at}: the connection to another rank is gone", "a lost connection"
    elif not ours and watch is not None:
        text = f"{watch.where()}: {text}"
    # A broken connection is an echo of a failure elsewhere: give the culprit a moment to say what it was.
    wait_s = ECHO_S if lost else 1.0 if not ours or isinstance(error, RunError) else 0.0
    try:
        reason = watch.reason(wait_s) if watch else None
        first = watch is None or (reason is None and watch.fail(text, status, cause=cause))
    except Exception:  # the store has gone with its rank
        reason, first = None, True
    if first or (reason is not None and reason["rank"] == rank):
        say(watch.with_hosts(text) if watch is not None else text)
        if not ours and not lost and not (watch is not None and watch.comm is not None and watch.comm.waiting_since is not None):
            traceback.print_exception(error)  # neither a person's mistake nor a peer that has gone: a bug
    elif reason is not None and reason["hang"] and watch is not None:
        watch.end(f"rank {reason['rank']} got no answer; {text}")
    return reason["status"] if reason is not None else status


class _Launcher:
    """The ranks of a run on this machine, and the signals that are passed on to them."""

    def __init__(self, config: Config):
        self.config = config
        self.ranks: list[Any] = []
        self.preparing: Any = None
        self.asked = 0
        self.when = "before the first step"  # it is when there are no ranks
        self.context = multiprocessing.get_context("fork")
        for number in SIGNALS:
            signal.signal(number, self.forward)

    def forward(self, number: int, _: Any) -> None:
        self.asked += number != signal.SIGUSR1
        if not self.ranks and number != signal.SIGUSR1:
            if self.preparing is not None:
                self.preparing.kill()  # it may be in a long call that hears no signal
                self.preparing.join()
                remove_stale(cache_root(self.config.data))
            say(f"stopped by {signal.Signals(number).name} {self.when}")
            os._exit(128 + number)
        for process in self.ranks:
            if process.pid is not None and process.exitcode is None:
                # The second request does not wait for a checkpoint.
                os.kill(process.pid, signal.SIGKILL if self.asked > 1 else number)

    def run(self) -> int:
        """Start the ranks, and again after a failure, as long as that promises something. The exit status of the run."""
        prepared = self.prepare()
        restarts = Restarts(self.config.run.restarts, self.config.run.restart_wait_s)
        os.environ["THREED_LAUNCH"] = uuid.uuid4().hex
        while True:
            os.environ[RESTARTS[0]] = str(restarts.total)
            steps = Steps(self.config.world_size)
            failure = self.start(prepared, steps)
            if failure is None or self.asked:
                return failure.status if failure is not None else 0
            wait_s, text = restarts.after(failure, read_latest(self.config)[0])
            if text:
                say(text)
            if wait_s is None:
                return failure.status
            time.sleep(wait_s)

    def start(self, prepared: Prepared, steps: Steps) -> Failure | None:
        """Start the ranks once and wait until all have ended; why, if one has failed."""
        size, parent = self.config.world_size, os.getpid()
        meeting = os.memfd_create("threed-store")  # where ranks meet: it is gone with the last of them, however they end
        path = f"/proc/self/fd/{meeting}"
        sys.stdout.flush()
        # A rank must not run the launcher's handlers: signals wait until it has its own.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.ranks = [self.context.Process(target=_be, args=(self.config, rank, path, prepared, parent, steps),
                                           name=f"rank {rank}") for rank in range(size)]
        gc.freeze()  # what was imported stays: a rank's collector need not look at it, and its memory stays shared
        for process in self.ranks:
            process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            return _attend(self.ranks, file_store(path, size), steps)
        finally:
            self.ranks, self.when = [], "before it started again"
            os.close(meeting)

    def prepare(self) -> Prepared:
        """Prepare the data in a process of its own: the one that forks ranks must not have started threads."""
        receive, send = self.context.Pipe(duplex=False)
        parent = os.getpid()

        def body() -> None:
            os.setpgid(0, 0)  # a terminal's Ctrl-C goes to the launcher
            die_with_parent(parent)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            try:
                send.send(prepare(self.config.data, self.config.model, lambda line: print(line, flush=True)))
            except InputError as error:
                send.send(error)

        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        process = self.preparing = self.context.Process(target=body)
        process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        send.close()
        try:
            result = receive.recv()
        except EOFError:
            process.join()
            raise RunError(f"preparing the data ended with exit status {process.exitcode}") from None
        process.join()
        self.preparing = None
        if isinstance(result, InputError):
            raise result
        return result


def run_local(config: Config) -> int:
    """Start all ranks of a config here, pass signals on to them, and return the exit status of the run."""
    return _Launcher(config).run()


def _be(config: Config, rank: int, path: str, prepared: Prepared, parent: int, steps: Steps) -> None:
    os.setpgid(0, 0)  # a terminal's Ctrl-C goes to the launcher, which passes it on once
    die_with_parent(parent)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    status = run_rank(config, rank, rank, config.world_size, file_store(path, config.world_size), prepared, steps)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no destructor may wait for a peer that is gone


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its launcher ends, however that ends: no rank trains on unseen."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _attend(ranks: list[Any], store: Any, steps: Steps) -> Failure | None:
    """Wait for all ranks; once one has failed, for the others only a little longer. Why the first failed, if one has."""
    failure, deadline = None, math.inf
    while True:
        codes = [process.exitcode for process in ranks]
        if failure is None and any(codes):
            failure, grace_s = _why(codes, store, steps)
            deadline = time.monotonic() + grace_s
        if all(code is not None for code in codes):
            return failure
        if time.monotonic() > deadline:
            for process in ranks:
                process.kill()
        wait([process.sentinel for process, code in zip(ranks, codes, strict=True) if code is None], POLL_S)


def _why(codes: list[int | None], store: Any, steps: Steps) -> tuple[Failure, float]:
    """Why the first rank has failed, and how long to wait for the others. Of a rank that could not say so itself, the others are
    told here."""
    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    rank = killed[0] if killed else next(rank for rank, code in enumerate(codes) if code)
    code = codes[rank] or 0
    text, cause = f"rank {rank} ended with exit status {code} and did not say why", f"exit status {code}"
    if code < 0:
        name = signal.Signals(-code).name
        # Whoever sends SIGKILL (a person, a node that runs out of memory) is outside; SIGSEGV and its like are the run's own.
        text, cause = f"rank {rank} was killed by {name}", name if -code != signal.SIGKILL else None
    status = code if code > 0 else 128 - code
    note = tell(store, {"rank": None, "message": text, "status": status, "hang": False, "step": steps.at(rank), "cause": cause})
    if code < 0 or note["rank"] is None:
        say(text)
    if code < 0:
        return Failure(text, cause, steps.at(rank), status), GRACE_S
    first = note["message"].splitlines()[0]
    return (Failure(first, note["cause"], note["step"], note["status"]),
            1.0 if note["hang"] else GRACE_S)  # one that hangs will not end by itself


def local_world_size(config_device: str) -> int | None:
    """Processes to start where `parallel.dp: auto` leaves it open: one a GPU, or None on a machine without."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # ask the driver, do not start CUDA before the fork
    if config_device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.device_count()

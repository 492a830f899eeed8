"""Launch: start the ranks of a run on this machine, or be one rank under torchrun or Slurm.

Libraries are imported once, then the process forks: eight ranks start in seconds. No GPU is touched before the fork.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from threed.comm import file_store
from threed.data.tokens import Prepared, prepare
from threed.engine.watch import KEY, Watch, say
from threed.errors import InputError, RunError, ThreedError
from threed.loop import Requests
from threed.schema import Config
from threed.train import train

GRACE_S = 5.0  # after the first rank has failed
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def run_rank(config: Config, rank: int, local_rank: int, local_size: int, store: Any = None,
             prepared: Prepared | None = None) -> int:
    """Be one rank. Returns the exit status; the rank that failed first says why, the others end quietly."""
    requests = Requests()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    watches: list[Watch] = []
    try:
        train(config, rank, local_rank, requests, watches.append, store, prepared)
        return 0
    except BaseException as error:  # SystemExit too: whoever leaves says so
        return _explain(error, rank, watches[0] if watches else None)


def _explain(error: BaseException, rank: int, watch: Watch | None) -> int:
    """Say what went wrong, if no other rank has; the exit status."""
    ours = isinstance(error, ThreedError)
    status = error.status if isinstance(error, ThreedError) else 1
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    if not ours and watch is not None:
        text = f"{watch.where()}: {text}"
    # A broken connection is an echo of a failure elsewhere: give the culprit a moment to say what it was.
    echo = not ours or isinstance(error, RunError)
    try:
        reason = watch.reason(1.0 if echo else 0.0) if watch else None
        first = watch is None or (reason is None and watch.fail(text, status))
    except Exception:  # the store has gone with its rank
        reason, first = None, True
    if first or (reason is not None and reason["rank"] == rank):
        say(text)
        if not ours and not (watch is not None and watch.comm is not None and watch.comm.waiting_since is not None):
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
        self.context = multiprocessing.get_context("fork")
        for number in SIGNALS:
            signal.signal(number, self.forward)

    def forward(self, number: int, _: Any) -> None:
        self.asked += number != signal.SIGUSR1
        if not self.ranks and number != signal.SIGUSR1:
            if self.preparing is not None:
                self.preparing.kill()
            say(f"stopped by {signal.Signals(number).name} before the first step")
            os._exit(128 + number)
        for process in self.ranks:
            if process.pid is not None and process.exitcode is None:
                # The second request does not wait for a checkpoint.
                os.kill(process.pid, signal.SIGKILL if self.asked > 1 else number)

    def run(self) -> int:
        prepared = self.prepare()
        with tempfile.TemporaryDirectory(prefix="threed-") as scratch:
            path, size = str(Path(scratch) / "store"), self.config.world_size
            parent = os.getpid()
            sys.stdout.flush()
            # A rank must not run the launcher's handlers: signals wait until it has its own.
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            self.ranks = [self.context.Process(target=_be, args=(self.config, rank, path, prepared, parent), name=f"rank {rank}")
                          for rank in range(size)]
            gc.freeze()  # what was imported stays: a rank's collector need not look at it, and its memory stays shared
            for process in self.ranks:
                process.start()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            return _attend(self.ranks, file_store(path, size))

    def prepare(self) -> Prepared:
        """Prepare the data in a process of its own: the one that forks ranks must not have started threads."""
        receive, send = self.context.Pipe(duplex=False)

        def body() -> None:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            try:
                send.send(prepare(self.config.data, self.config.model, lambda line: print(line, flush=True)))
            except InputError as error:
                send.send(error)

        process = self.preparing = self.context.Process(target=body)
        process.start()
        send.close()
        try:
            result = receive.recv()
        except EOFError:
            process.join()
            raise RunError(f"preparing the data ended with exit status {process.exitcode}") from None
        process.join()
        if isinstance(result, InputError):
            raise result
        return result


def run_local(config: Config) -> int:
    """Start all ranks of a config here, pass signals on to them, and return the exit status of the run."""
    return _Launcher(config).run()


def _be(config: Config, rank: int, path: str, prepared: Prepared, parent: int) -> None:
    os.setpgid(0, 0)  # a terminal's Ctrl-C goes to the launcher, which passes it on once
    die_with_parent(parent)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    status = run_rank(config, rank, rank, config.world_size, file_store(path, config.world_size), prepared)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no destructor may wait for a peer that is gone


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its launcher ends, however that ends: no rank trains on unseen."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _attend(ranks: list[Any], store: Any) -> int:
    """Wait for all ranks; once one has failed, for the others only a little longer."""
    status, deadline = 0, None
    while True:
        codes = [process.exitcode for process in ranks]
        failed = next(((rank, code) for rank, code in enumerate(codes) if code), None)
        if failed is not None and deadline is None:
            rank, code = failed
            reason = json.loads(store.get(KEY)) if store.check([KEY]) else {"rank": None, "hang": False}
            deadline = time.monotonic() + (1.0 if reason["hang"] else GRACE_S)  # one that hangs will not end by itself
            status = code if code > 0 else 128 - code
            if code < 0:
                say(f"rank {rank} was killed by {signal.Signals(-code).name}")
            elif reason["rank"] is None:
                say(f"rank {rank} ended with exit status {code} and did not say why")
        if all(code is not None for code in codes):
            return status
        if deadline is not None and time.monotonic() > deadline:
            for process in ranks:
                process.kill()
        time.sleep(0.05)


def local_world_size(config_device: str) -> int | None:
    """Processes to start where `parallel.dp: auto` leaves it open: one a GPU, or None on a machine without."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # ask the driver, do not start CUDA before the fork
    if config_device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.device_count()

"""Launch: start the ranks of a run on this machine, or be one rank under torchrun or Slurm.

Libraries are imported once, then the process forks: eight ranks start in seconds. No GPU is touched before the fork.
"""

from __future__ import annotations

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
from threed.engine.watch import Watch
from threed.errors import InputError, RunError, ThreedError
from threed.schema import Config
from threed.train import Requests, train

GRACE_S = 5.0  # after the first rank has failed


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
    except Exception as error:
        known = isinstance(error, ThreedError) and not isinstance(error, RunError)
        status = error.status if isinstance(error, ThreedError) else 1
        watch = watches[0] if watches else None
        # A broken connection is an echo of a failure elsewhere: give the culprit a moment to say what it was.
        reason = watch.reason(0.0 if known else 1.0) if watch else None
        if reason is None and watch is not None and watch.fail(str(error), status):
            reason = {"rank": rank}
        if watch is None or (reason is not None and reason["rank"] == rank):
            print(f"threed: {error}", file=sys.stderr, flush=True)
            if not isinstance(error, ThreedError):
                traceback.print_exc()
        elif reason is not None and reason.get("hang"):
            watch.end(f"rank {reason['rank']} got no answer; {error}")
        return reason.get("status", status) if reason else status


def run_local(config: Config) -> int:
    """Start all ranks of a config here, pass signals on to them, and return the exit status of the run."""
    prepared = _prepare(config)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="threed-") as scratch:
        path = str(Path(scratch) / "store")
        ranks = [context.Process(target=_be, args=(config, rank, path, prepared), name=f"rank {rank}")
                 for rank in range(config.world_size)]
        stopping = {"asked": 0}

        def forward(number: int, _: Any) -> None:
            stopping["asked"] += number != signal.SIGUSR1
            for process in ranks:
                if process.pid is not None and process.exitcode is None:
                    # The second request does not wait for a checkpoint.
                    os.kill(process.pid, signal.SIGKILL if stopping["asked"] > 1 else number)

        sys.stdout.flush()
        for process in ranks:
            process.start()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, forward)
        return _attend(ranks)


def _be(config: Config, rank: int, path: str, prepared: Prepared) -> None:
    os.setpgid(0, 0)  # a terminal's Ctrl-C goes to the launcher, which passes it on once
    status = run_rank(config, rank, rank, config.world_size, file_store(path, config.world_size), prepared)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no destructor may wait for a peer that is gone


def _attend(ranks: list[Any]) -> int:
    """Wait for all ranks; once one has failed, for the others only a little longer."""
    status, deadline = 0, None
    while True:
        codes = [process.exitcode for process in ranks]
        failed = next(((rank, code) for rank, code in enumerate(codes) if code), None)
        if failed is not None and deadline is None:
            rank, code = failed
            deadline = time.monotonic() + GRACE_S
            status = code if code > 0 else 128 - code
            if code < 0:
                print(f"threed: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
        if all(code is not None for code in codes):
            return status
        if deadline is not None and time.monotonic() > deadline:
            for process in ranks:
                process.kill()
        time.sleep(0.05)


def _prepare(config: Config) -> Prepared:
    """Prepare the data in a process of its own: the one that forks ranks must not have started threads."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def body() -> None:
        try:
            send.send(prepare(config.data, config.model, lambda line: print(line, flush=True)))
        except InputError as error:
            send.send(error)

    process = context.Process(target=body)
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


def local_world_size(config_device: str) -> int | None:
    """Processes to start where `parallel.dp: auto` leaves it open: one a GPU, or None on a machine without."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # ask the driver, do not start CUDA before the fork
    if config_device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.device_count()

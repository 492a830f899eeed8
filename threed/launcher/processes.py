"""Processes: those that a launcher forks on its machine; start them, signal them, end them."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from threed.base import console
from threed.base.console import flush, say, show
from threed.base.errors import InputError, RunError
from threed.base.signals import ASKS, STOPS, handle
from threed.data.cache import cache_root, remove_stale
from threed.data.tokens import Prepared, prepare
from threed.schema import Config

CONTEXT = multiprocessing.get_context("fork")
GRACE_S = 5.0  # after the first rank has failed
HANG_GRACE_S = 1.0  # a rank that hangs will not end by itself
KILL_S = 20.0  # a process that SIGKILL has not ended within this time will not end


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Block signals while processes are forked: a child must not run its launcher's handlers, and a handler
    must not run before all children are listed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ASKS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS)


def start(processes: Sequence[Any]) -> None:
    """Fork processes. Call it within `signals_wait`; signals stay blocked in each child."""
    flush()
    for process in processes:
        process.start()


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its launcher ends for any reason: no rank trains on unseen."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the launcher ended before the call
        os._exit(1)


def be_child(parent: int) -> None:
    """Make this process end with its launcher, and leave a terminal's Ctrl-C to the launcher, which passes it
    on once. Every child calls it first."""
    os.setpgid(0, 0)
    die_with_parent(parent)


def be_rank(parent: int, body: Callable[[], int]) -> None:
    """Be a rank's process, and exit with the status that `body` returns. Signals stay blocked until the
    rank's `Requests` handle them."""
    be_child(parent)
    status = body()
    flush()
    os._exit(status)  # no destructor may wait for a peer that is gone


def pass_on(ranks: Sequence[Any], number: int) -> None:
    """Send a signal to the ranks that are alive."""
    for process in ranks:
        if process.pid is not None and process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def first_failure(codes: Sequence[int | None]) -> tuple[int, int] | None:
    """(index, exit code) of the process to blame: one that was killed, or else one that ended by itself; None
    if no process has failed."""
    failed = [(index, code) for index, code in enumerate(codes) if code]
    return next(((index, code) for index, code in failed if code < 0), failed[0] if failed else None)


def ended_by(code: int) -> tuple[str, str | None, int]:
    """An exit code in words, as the cause of a `FailureNote`, and as the exit status of the run."""
    if code > 0:
        return f"ended with exit status {code} and did not say why", f"exit status {code}", code
    name = signal.Signals(-code).name
    # SIGKILL comes from outside (a person, a machine without memory); SIGSEGV and its like are the run's own.
    return f"was killed by {name}", name if -code != signal.SIGKILL else None, 128 - code


def end_all(ranks: Sequence[Any], limit_s: float = KILL_S) -> None:
    """Kill processes and return when all have ended. If one does not end, it is stuck in the kernel: then
    this process says so, and exits at once with status 1."""
    # where forking failed, some were never started
    ranks = [process for process in ranks if process.pid is not None]
    for process in ranks:
        if process.exitcode is None:
            process.kill()
    until = time.monotonic() + limit_s
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
    if stuck := [process for process in ranks if process.exitcode is None]:
        named = ", ".join(f"{process.name} (process {process.pid})" for process in stuck)
        say(f"{named} cannot be killed: stuck in the kernel, as on a file system "
            "or a driver that does not answer. Exiting. Check this machine (dmesg, file system, driver)")
        os._exit(1)


def progress(config: Config) -> Callable[[str], None]:
    """The function that reports progress of preparations: to the console, unless the run is to be quiet."""
    return partial(show, console=not config.monitor.quiet)


class Preparation:
    """Prepares data in a process of its own: the process that forks ranks must not have started threads."""

    def __init__(self, load: Callable[[], Config], cache: Config,
                 say: Callable[[str], None] = show):
        """`load` gives the config in that process. `cache`: a config with the same data.cache. `say` gets
        lines about the progress."""
        self._say, self._root = say, cache_root(cache.data)
        self._receive, self._send = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=self._body, args=(load, os.getpid()),
                                        name="the preparation of the data")

    def start(self) -> None:
        """Begin. From here on a signal handler may call `kill`."""
        with signals_wait():
            start([self._process])
        self._send.close()

    def _body(self, load: Callable[[], Config], parent: int) -> None:
        be_child(parent)
        handle(ASKS, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS)
        try:
            config = load()
            self._send.send(prepare(config.data, config.model, self._say))
        except InputError as error:
            self._send.send(error)

    def result(self) -> Prepared:
        """Wait for the prepared data. InputError where the data or the config cannot be used, RunError where
        the process died."""
        try:
            result = self._receive.recv()
        except EOFError:
            self._process.join()
            raise RunError(f"preparing the data ended with exit status {self._process.exitcode}") from None
        self._process.join()
        if isinstance(result, InputError):
            raise result
        return result

    def kill(self) -> None:
        """Kill the process, which may be in a long call that answers no signal, and remove its unfinished
        files."""
        end_all([self._process])
        remove_stale(self._root)


def prepare_apart(config: Config, say: Callable[[str], None]) -> Prepared:
    """Prepare the data in a process of its own, which a request to stop ends at once. Errors as from
    `Preparation.result`."""
    preparing = Preparation(lambda: config, config, say)

    def leave(number: int, _: Any) -> None:
        preparing.kill()
        console.say(f"stopped by {signal.Signals(number).name}; the data are not prepared")
        console.leave(128 + number)

    handle(STOPS, leave)
    preparing.start()
    return preparing.result()

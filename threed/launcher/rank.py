"""Rank: one rank's process, from its first line to its exit status, and its message when it fails."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from threed.base import marks
from threed.base.console import RECORD, flush, put_error, say, steady
from threed.base.errors import NotSaved, RunError, Stopped, ThreedError
from threed.base.requests import Requests
from threed.base.restart import FailureNote, RankSteps
from threed.base.signals import STOPS, handle
from threed.comm.environment import RankPlace
from threed.comm.rendezvous import POLLS, meet
from threed.comm.store import Guard, environment_store
from threed.engine.watch import KEY, STORE_S, Watch, lost_peer, read_note, silent, tell
from threed.launcher import elastic
from threed.launcher.processes import die_with_parent
from threed.schema import Config
from threed.training.setup import Job, train
from threed.training.stopped import AT_ONCE, stopped_now

# errors of code, which a new start would meet again
OWN = (TypeError, AttributeError, NameError, LookupError, ValueError, ArithmeticError, AssertionError,
       ImportError, NotImplementedError, RecursionError)
ECHO_S = 3.0  # how long a rank whose connections break waits for another rank to say why
TOLD_S = 0.5  # the same before a rank ends at once, as asked
NEWS_S = 2.0  # until a neighbour has seen that a rank was killed, where the agent does not say so


def run_rank(job: Job, place: RankPlace, store: Any, alone: Unattended | None = None) -> int:
    """Run one rank and return its exit status. The rank that failed first says why, the others end quietly.
    `alone`: of a rank without a launcher of threed's."""
    steady(keeps=place.rank == 0)
    requests = Requests(alone.answer if alone else None)
    # Set in any case: a fork of a process that has set it makes its pool of threads anew at the next call,
    # and dies where two threads call at once, as those do that autograd starts for devices.
    given = "OMP_NUM_THREADS" in os.environ
    torch.set_num_threads(torch.get_num_threads() if given
                          else max(1, (os.cpu_count() or 1) // place.local_size))
    watch = None
    # What takes long to close is closed after the other ranks know of a failure.
    with contextlib.ExitStack() as closing:
        try:
            watch = Watch(place.rank, store, job.config.run.timeout_s, place.world_size,
                          place if alone else None)
            watch.pace = job.pace or RankSteps(1).of(0)
            if alone is not None:
                alone.watch = watch
                watch.on_failure = partial(elastic.note_failure, Path(job.config.run.dir))
                watch.on_news, watch.on_end = alone.hear, alone.end
            (job.task or train)(job, place.local_rank, requests, watch, store, closing)
            watch.close()
            return 0
        except BaseException as error:  # SystemExit too: a rank that exits says so
            if watch is not None:
                watch.failed = True
            return _explain(error, place.rank, watch)


def run_place(job: Job, place: RankPlace, parent: int) -> int:
    """Run the rank that torch's agent or srun has started, and return its exit status. `parent`: the id of
    its parent process at its start."""
    RECORD.open(Path(job.config.run.dir))
    alone = Unattended(job.config, place)
    if elastic.agent():
        die_with_parent(parent)
        signal.signal(signal.SIGQUIT, _quit)
    marks.mark("waiting")
    handle(STOPS, _stop_early)
    store, guard = None, Guard(STORE_S, partial(_store_gone, place, alone))  # until a watch looks at it
    try:
        store, prefix = environment_store(job.config.run.connect_timeout_s, guard.begin)
        elastic.begin(job.config, place, store, prefix)
        meet(store, place.rank, place.world_size, (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        marks.mark("start")
        guard.close()
        status = run_rank(replace(job, pace=alone.pace), place, store, alone)
    except (ThreedError, RuntimeError) as error:  # no watch exists yet that would tell the others
        _deaf()  # an agent ends the neighbours of a rank that has failed
        status = RunError.status
        text = "the store in which all ranks meet has gone: rank 0, or its host, has ended"
        if isinstance(error, ThreedError):
            status, text = error.status, str(error)
        note = FailureNote(text, status, text, 0, place.rank, final=True)
        with contextlib.suppress(RuntimeError):  # the store has gone with its rank
            note = tell(store, note) if store is not None else note
        status = note.status
        if note.rank == place.rank:
            say(text)
            elastic.error_file(text)
    if status:
        note = _note(store)
        alone.hear(note)
        if place.rank == 0:  # it may hold the store, where the others read why
            time.sleep(elastic.LINGER_S + 2 * place.world_size / POLLS)
        alone.end(note)
    return status


def _store_gone(place: RankPlace, alone: Unattended) -> None:
    say(silent(place.rank))
    alone.end(None)
    leave(RunError.status)


def _quit(number: int, _: Any) -> None:
    """End the agent, as it was told, without a core dump."""
    os._exit(128 + number)


def _deaf() -> None:
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def _stop_early(number: int, _: Any) -> None:
    """A request to stop before the rank can save."""
    _deaf()
    error = Stopped(f"stopped by {signal.Signals(number).name} on {socket.gethostname()} before the first "
                    "step")
    error.status = 128 + number
    raise error


def _note(store: Any) -> FailureNote | None:
    """The note of the first failure; None if the store does not answer."""
    if store is None:
        return FailureNote("the ranks have not met", RunError.status, final=True)
    try:
        return read_note(store.get(KEY))
    except RuntimeError:
        return None


def leave(status: int) -> NoReturn:
    """End this process at once: no destructor may wait for a lost peer, and the interpreter's own shutdown
    takes seconds."""
    flush()
    os._exit(status)


class Unattended:
    """Signals and failure reports of a rank started by torchrun or srun, without a launcher of threed's: it
    answers requests to stop (rank 0 for all), says why another rank failed, and ends an agent that would
    restart ranks."""

    def __init__(self, config: Config, place: RankPlace):
        self.config, self.place, self.pace = config, place, RankSteps(1).of(0)
        self.watch: Watch | None = None
        self._lock, self._heard = threading.Lock(), False

    def hear(self, note: FailureNote | None) -> None:
        """The first rank of each machine prints, once, why the ranks end."""
        if note is None or not note.host or self._stopped(note):
            return
        with self._lock:
            if self._heard:
                return
            self._heard = True
        if elastic.agent() and self.place.local_rank == 0:
            if (note.host, note.launcher) != (socket.gethostname(), os.getppid()):
                say(note.message)

    def end(self, note: FailureNote | None) -> None:
        """Called before a rank ends because another one failed: end the agent if a restart would not help."""
        if note is not None and self._stopped(note):
            say(stopped_now(self.config, self.pace))  # last: it writes state.json
        flush()
        if elastic.is_final(note):
            elastic.end_agent(note.status if note is not None else RunError.status)

    def answer(self, number: int, times: int) -> None:
        if times == 1:
            # An agent of torch sends the same signal to the neighbours of a rank that has failed.
            if self.place.rank == 0 and not self._failed():
                say(self.pace.answer())
            return
        status = 128 + number
        if self.place.rank == 0:
            say(stopped_now(self.config, self.pace))
        if self.watch is not None:
            # The others end with it, and say nothing. The store may not answer.
            threading.Thread(target=self.watch.fail, args=(AT_ONCE, status),
                             daemon=True).start()
            time.sleep(TOLD_S)
        leave(status)

    def _stopped(self, note: FailureNote) -> bool:
        """Whether all end because a person asked for it twice, and this rank is to say so."""
        return self.place.rank == 0 and note.message == AT_ONCE

    def _failed(self) -> bool:
        try:
            plain = elastic.agent() and elastic.LAUNCHER not in os.environ
            wait_s = NEWS_S if plain else TOLD_S
            return self.watch is not None and self.watch.reason(wait_s) is not None
        except RuntimeError:  # the store has gone
            return True


def _explain(error: BaseException, rank: int, watch: Watch | None) -> int:
    """Print what went wrong, unless another rank has. Returns the exit status."""
    ours, lost = isinstance(error, ThreedError), lost_peer(error)
    status = error.status if isinstance(error, ThreedError) else 1
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    # The part of the text that a repetition repeats: not how long a rank has waited, nor what was alive.
    if error.__cause__ is not None:
        cause = f"{type(error.__cause__).__name__}: {error.__cause__}"
    else:
        cause = text.splitlines()[0]
    if lost:  # gloo's own words name an address and a line of its source
        where = text if ours else watch.where() if watch is not None else f"rank {rank}"
        text, cause = f"{where.splitlines()[0]}: the connection to another rank is gone", None
        status = RunError.status  # in a callback too: the script is not at fault
    elif not ours and watch is not None:
        text = f"{watch.where()}: {text}"
    # A broken connection is an echo of a failure elsewhere: give the culprit a moment to say what it was.
    wait_s = ECHO_S if lost else 1.0 if not ours or isinstance(error, RunError) else 0.0
    try:
        reason = watch.reason(wait_s) if watch else None
        final = isinstance(error, NotSaved) or (isinstance(error, OWN) and not (watch and watch.step))
        first = watch is None or (reason is None and watch.fail(text, status, cause=cause, final=final))
    except Exception:  # the store has gone with its rank
        reason, first = None, True
    if first or (reason is not None and reason.rank == rank):
        say(watch.with_hosts(text) if watch is not None else text)
        elastic.error_file(text.splitlines()[0])
        if not ours and not lost and not (watch is not None and watch.comm is not None
                                          and watch.comm.waiting_since is not None):
            # neither a person's mistake nor a peer that has gone: a bug
            put_error("".join(traceback.format_exception(error)).rstrip())
    elif reason is not None and reason.hang and watch is not None:
        watch.end(f"rank {reason.rank} got no answer; {text}")
    return reason.status if reason is not None else status

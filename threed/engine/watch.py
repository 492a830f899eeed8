"""Watch: no rank waits for ever, and when a rank dies or fails, the others know why and end.

The ranks share a key in the rendezvous store. The first rank that fails writes the reason to this key (for a
rank that was killed, its launcher does). The others see it within a second (of ten thousand ranks, within
five) and end, even while they connect: the watch has its own client of the store, since a client that waits
for an answer is locked. A thread beside the engine checks how long the current instruction has waited. Past
the limit it prints what the rank waits for and ends the run, even while the main thread hangs in a
collective.

Who notices first that a rank's process was killed, by what has started it (every other kind of failure is
written by the rank itself):

    threed train       launcher/local, whose child it is
    threed.torchrun    launcher/attend, on the machine of the rank, before torch's agent does
    torchrun           engine/heartbeat: the next rank on the machine; one that is alone there, its peers
    srun               as torchrun, and Slurm, which ends the job (--kill-on-bad-exit)

A machine that is gone is noticed by rank 0 under the last three (engine/heartbeat), and node 0 by all ranks,
since the store is there.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

from threed.base.console import flush, say
from threed.base.quantity import show_seconds
from threed.base.restart import FailureNote, RankSteps
from threed.comm.environment import RankPlace
from threed.comm.group import Comm
from threed.comm.rendezvous import FAILURE as KEY
from threed.comm.rendezvous import POLL_S, POLLS
from threed.comm.store import own_client
from threed.engine.engine import Engine
from threed.engine.heartbeat import Machines, Neighbour

LIMIT = 0.8  # share of run.timeout_s; the rest is for telling the others, so that all end within it
SIGN_S = 60.0  # a first step that takes longer gives signs of life: at twice the time, or after LONG_S
LONG_S = 600.0
LEAVE_S = 2.0  # the store may not answer a rank that leaves
STORE_S = 20.0  # the run ends if the store does not answer for so long: it carries the news of failures


LOST = ("closed by peer", "reset by peer", "broken pipe", "connection refused", "connection was",
        "failed to connect", "remote process exited", "failed to recv")


def lost_peer(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, is a broken connection: most often another rank has ended."""
    while error is not None:
        if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in LOST):
            return True
        error = error.__cause__
    return False


def tell(store: Any, note: FailureNote) -> FailureNote:
    """Write the note of a failure, unless the store has one already. Returns the note that the store has
    then, with the host of its writer, and the launcher there (`note.launcher`, else this process's parent).
    """
    note = replace(note, host=socket.gethostname(), launcher=note.launcher or os.getppid())
    return read_note(store.compare_set(KEY, "", json.dumps(asdict(note))))


def read_note(text: str | bytes) -> FailureNote:
    """A note, as the store has it under KEY."""
    return FailureNote.of(json.loads(text))


def silent(rank: int) -> str:
    """What a rank says where the store does not answer."""
    return (f"rank {rank}: rank 0's host, or the launcher there, has gone: the store of the run has not "
            f"answered for {STORE_S:g} s")


def _leave(status: int) -> None:
    """End this process at once: the main thread hangs."""
    flush()
    os._exit(status)


class Watch:
    def __init__(self, rank: int, store: Any, timeout_s: float, ranks: int = 1,
                 place: RankPlace | None = None):
        """`store`: where the `ranks` ranks of the run meet. `place`: of a rank that watches other processes
        and machines, since no launcher of threed's does."""
        self.rank, self._store, self._timeout_s = rank, own_client(store), timeout_s
        self._least_s = ranks / POLLS
        self.poll_s = max(POLL_S, self._least_s)
        self.step = 0  # the step under way; 0: none yet
        self.pace = RankSteps(1).of(0)
        self.first: int | None = None  # the first step, on the rank that gives signs of life while it runs
        self._sign_s = SIGN_S
        self.engine: Engine | None = None
        self.comm: Comm | None = None
        self.hosts: list[str] = []  # of each rank, once that is known
        # With the store and the note: this rank was the first that failed
        self.on_failure: Callable[[Any, FailureNote], None] = lambda store, note: None
        # With the note: another rank was the first, as is known from now on
        self.on_news: Callable[[FailureNote], None] = lambda note: None
        # With the note, if there is one: this rank ends now
        self.on_end: Callable[[FailureNote | None], None] = lambda note: None
        self.failed = False  # whether this rank has failed; it will soon be killed with the others
        self._others: list[Machines | Neighbour] = []
        if place is not None and place.local_rank == 0 and place.local_size < place.world_size:
            self._others.append(Machines(place, self.poll_s))
        if place is not None and place.local_size > 1:
            self._others.append(Neighbour(place))
        self._silent = 0  # looks of `_watch_clock` since the store has answered
        self._phase: tuple[str, float | None] | None = None
        self._seen: FailureNote | None = None  # the first failure
        self._told = False
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=body, daemon=True, name=body.__name__)
                         for body in (self._watch_clock, self._watch_store)]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def phase(self, text: str, waits: bool = True) -> Iterator[None]:
        """Name what the rank does outside of a program. `waits`: whether the whole phase counts as waiting
        for other ranks; if not, only its exchanges do, and the work between them may take any time."""
        self._phase = (text, time.monotonic() if waits else None)
        try:
            yield
        finally:
            self._phase = None

    def close(self) -> None:
        """Say that this rank has done its work, and watch no more."""
        self._closed.set()
        if self._others:
            self._threads[1].join(LEAVE_S)

    def at(self, step: int) -> None:
        """Called when a step begins."""
        self.step = step
        self.pace.begin(step)

    def fail(self, message: str, status: int = 1, hang: bool = False, cause: str | None = None,
             final: bool = False) -> bool:
        """Tell all ranks that this one failed. False if another rank failed first: then the reason is that
        rank's. The other arguments are those of `FailureNote`."""
        there = tell(self._store, FailureNote(message, status, cause, self.step, self.rank, hang, final))
        if there.rank == self.rank:
            self.on_failure(self._store, there)
        return there.rank == self.rank

    def reason(self, wait_s: float = 0.0) -> FailureNote | None:
        """The first failure of any rank, or None if there is none within `wait_s` seconds."""
        until = time.monotonic() + wait_s
        while True:
            if self._seen is None and self._store.check([KEY]):
                self._seen = read_note(self._store.get(KEY))
            if self._seen is not None:  # also after the store has ended
                return self._seen
            if time.monotonic() >= until:
                return None
            time.sleep(max(0.05, self._least_s))

    def where(self) -> str:
        if self.engine is not None and self.engine.current is not None:
            return self.engine.where()
        since = self._since()
        text = self._phase[0] if self._phase is not None else "between steps"
        waited = f" for {time.monotonic() - since:.1f} s" if since is not None else ""
        return f"rank {self.rank}{waited} at '{text}', with all ranks"

    def _since(self) -> float | None:
        """The time since which the rank waits; None if it does not."""
        current = self.engine.current if self.engine is not None else None
        if current is not None:
            return current[2]
        if self.comm is not None and self.comm.waiting_since is not None:
            return self.comm.waiting_since
        return self._phase[1] if self._phase is not None else None

    def _watch_clock(self) -> None:
        while not self._closed.wait(POLL_S):
            self._give_sign()
            # A client of the store waits without a limit for an answer of a machine that is off. Looks are
            # counted, and not seconds: a job that was suspended goes on.
            self._silent += 1
            if self._silent * POLL_S > STORE_S:
                self.end(silent(self.rank))
                self.on_end(None)
                _leave(1)
            since = self._since()
            if since is not None and time.monotonic() - since > LIMIT * self._timeout_s:
                message = f"no answer within run.timeout_s={self._timeout_s:g}: {self.where()}"
                self.end(message)
                # The store may hang with the rank that hosts it: tell the others if it answers; end anyway.
                threading.Thread(target=self.fail, args=(message, 1, True, "a hang"), daemon=True).start()
                time.sleep(3 * POLL_S)
                _leave(1)

    def _give_sign(self) -> None:
        step, since_s, current = self.pace.step, self.pace.since_s, self.engine and self.engine.current
        if step != self.first or since_s is None or since_s < self._sign_s:
            return
        self._sign_s = since_s + min(since_s, LONG_S)
        takes = f" of about {show_seconds(self.pace.step_s)}" if self.pace.step_s else ""
        at = ""
        if current and self.engine is not None:
            length = len(self.engine.orders[current[0]].effects)
            at = f": instruction {current[1] + 1} of {length} on this rank"
        say(f"step {step} has run for {show_seconds(since_s)}{takes}{at}")

    def _watch_store(self) -> None:
        while not self._closed.wait(self.poll_s):
            try:
                reason = self.reason()
                self._silent = 0
                if reason is None:
                    self._look_around()
            except Exception:  # the store is gone or slow: the clock still watches
                continue
            if reason is None or reason.rank == self.rank:
                continue
            self.on_news(reason)
            if reason.hang:
                self.end(f"rank {reason.rank} got no answer; {self.where()}")
            # rank 0 may host the store: it ends last
            if self._closed.wait(4 * POLL_S if self.rank else 8 * POLL_S + 2 * self._least_s):
                return  # the main thread has seen the failure too, and ends by itself
            self.on_end(reason)
            _leave(reason.status)
        with suppress(Exception):  # the store may have gone with rank 0, which has left
            for other in self._others:
                other.leave(self._store)

    def _look_around(self) -> None:
        """Fail the run where another machine has gone, or a neighbour was killed."""
        for other in self._others:
            if (lost := other.look(self._store)) is None:
                continue
            message = f"{lost}; {self.where()}" if isinstance(other, Machines) else lost
            if (there := tell(self._store, FailureNote(message, 1, step=self.step))).message == message:
                self.end(message)
                self.on_failure(self._store, there)

    def end(self, message: str) -> None:
        """Print why this rank ends. Only the first call prints, from whichever thread."""
        with self._lock:
            if not self._told:
                self._told = True
                say(self.with_hosts(message))

    def with_hosts(self, message: str) -> str:
        """The message with the host of each rank that it names, where there are several."""
        if len(set(self.hosts)) < 2:
            return message
        return re.sub(r"\brank (\d+)\b(?! on |')", self._with_host, message)

    def _with_host(self, match: re.Match[str]) -> str:
        rank = int(match[1])  # or something else in another library's message: "a tensor of rank 4"
        return f"{match[0]} on {self.hosts[rank]}" if rank < len(self.hosts) else match[0]

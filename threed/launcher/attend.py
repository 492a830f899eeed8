"""Attend: a thread next to torch's agent, which is on the main thread and may be in a long call.

It passes requests to stop and to save on to the ranks; it sees at once how a rank has ended (the agent first
ends the other ranks, which may take 30 s); and it says what this machine is waiting for.

These rows of bench/results/cluster.md need it. Under plain torchrun the request is lost, or an agent hangs:

* SIGTERM to host 1's agent, SIGTERM to host 2's agent: the agent ends with a traceback and status 1, and
  those of other machines wait 300 s for it.
* host 1 off, host 1 cut off for ever: the other agents wait without a limit for the store, which has gone;
  after a failure (`_await_agent`), and where their own ranks have done their work (`_see_all`).
* a node never comes: under c10d torch waits beyond its limit (`await_nodes`).

In the rows about SIGKILL it saves seconds, and names the rank on the other machines, too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from threed.base import console
from threed.base.requests import StopRequests
from threed.base.restart import FailureNote
from threed.base.signals import ASKS, SAVES
from threed.comm.rendezvous import POLL_S, REPORT_S
from threed.launcher.elastic import LAUNCHER, LINGER_S, note_failure
from threed.launcher.processes import ended_by
from threed.training.stopped import AT_ONCE

ANSWER_S = 20.0  # how long the store may take for a note
OTHERS_S = 30.0  # how long ranks of other machines may work when those of this one have ended, at least
AGENT_S = 35.0  # how long the agent may take to end after a failure, or to start ranks again; it kills those
# that do not end after 30 s
END_S = 3.0  # how long a rank may take to end after a second request to stop
KILLED = (os.CLD_KILLED, os.CLD_DUMPED)
ENDED = (os.CLD_EXITED, *KILLED)


@dataclass
class Child:
    """A rank's process, as the rank announced it."""

    rank: int | None = None
    store: list[Any] = field(default_factory=list)  # address, port and prefix of its start's store
    run: str = ""  # the run's folder
    told: bool = False  # whether it was told of the request to stop
    ends: int | None = None  # with which status this machine's part of the run should end


class Attendant:
    """Answers signals from the moment that it is made: before libraries are imported, and before any other
    thread."""

    def __init__(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [*ASKS, signal.SIGCHLD])  # other threads inherit it
        reads, writes = os.pipe()
        os.set_blocking(reads, False)
        os.set_inheritable(writes, True)
        os.environ[LAUNCHER] = str(writes)
        self._pipe, self._text = reads, b""
        self.children: dict[int, Child] = {}  # by process, those that live
        self._over: dict[int, int | None] = {}  # those that have ended: status or signal
        self._failed_s = 0.0  # when a rank, or the last of all, has failed; 0: none
        self._done_s = math.inf  # when all have ended well, as torch's agent says
        self.status = 0  # of the rank that failed first in the last start
        self.asked, self._number, self._kill_at = StopRequests(), 0, math.inf
        self.awaits = ""  # at which address other machines are awaited; "": they are not
        self._where = ""  # the address; "": there are no other machines
        self.limit_s, self._later_s, self._since, self._reports = 0.0, 0.0, 0.0, 0
        self._why: Callable[[], str] | None = None
        self.restarts = False  # whether torch may start ranks again
        self.folder = ""  # that torch makes for logs and leaves, where there are none
        self._telling: threading.Thread | None = None
        self._ended = False  # whether the agent was told to end
        threading.Thread(target=self._body, name="attend", daemon=True).start()

    def await_nodes(self, where: str, limit_s: float, later_s: float, why: Callable[[], str]) -> None:
        """Say that other machines are awaited, until ranks start, and again after each failure. `why`: what
        to say `later_s` after the limit if torch still waits."""
        self.limit_s, self._later_s, self._where, self._why = limit_s, later_s, where, why
        self._await(where)

    def _await(self, where: str) -> None:
        self._since, self._reports, self.awaits = time.monotonic(), 0, where

    def _await_agent(self) -> None:
        """Ranks have failed: time how long the agent takes to end or to restart them. Before that, torch may
        wait without a limit for a store that is gone."""
        if not self.children or not self._failed_s:
            self._failed_s = time.monotonic()
        if not self.children:
            self._await(self._where if self.restarts else "")

    def linger(self) -> None:
        """Wait before the agent's store ends: other machines read in it why a rank here was killed."""
        until = time.monotonic() + 4 * POLL_S
        while self._where and self._telling is None and time.monotonic() < until:
            time.sleep(POLL_S / 5)  # the agent may have seen the end first
        if self._telling is not None and self._where:
            self._telling.join(LINGER_S)
            time.sleep(LINGER_S)

    def close(self) -> None:
        """Remove files that torch would leave behind."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _leave(self, status: int) -> NoReturn:
        """End this process at once, since its main thread may be in a long call."""
        self.close()
        console.flush()
        os._exit(status)

    def _body(self) -> None:
        while True:
            info = signal.sigtimedwait([*ASKS, signal.SIGCHLD], POLL_S)
            self._see_ends()  # all of the last start, before the first of the next
            self._hear()
            if info is not None and info.si_signo != signal.SIGCHLD:
                self._answer(info.si_signo)
            elif info is not None and info.si_code in ENDED:
                self._see_end(info)
            self._see_ends()
            if time.monotonic() > self._kill_at:
                for pid in self.children:
                    _send(pid, signal.SIGKILL)
            self._see_all()
            self._report()

    def _hear(self) -> None:
        """Read the announcements of ranks."""
        with contextlib.suppress(BlockingIOError):
            self._text += os.read(self._pipe, 1 << 16)
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            values = json.loads(line)
            if not self.children and not self._ended:
                self.status, self._failed_s, self._telling = 0, 0.0, None
                self._over.clear()
            child = self.children.setdefault(values.pop("pid"), Child())
            for name, value in values.items():
                setattr(child, name, value)
            if child.ends is not None:
                self.status = self.status or child.ends
                self._end()
        if self.asked.times:
            self._pass_on(self._number)

    def _answer(self, number: int) -> None:
        if number in SAVES:
            for pid in self.children:
                _send(pid, number)
            return
        if not self.children:
            name = signal.Signals(number).name
            when = "before it started again" if self._over else "before the first step"
            early = f"stopped by {name} on {socket.gethostname()} {when}"
            console.say(AT_ONCE if self._number else early)
            self._leave(128 + number)
        if self.asked.again(number):
            self._number = number
            self._pass_on(number, again=True)
            if self.asked.times > 1:
                self._kill_at = time.monotonic() + END_S
            elif all(child.rank for child in self.children.values()):  # rank 0 answers elsewhere
                console.say("the ranks were asked to stop after their step, and to save; once more to stop "
                            "now, without a checkpoint")

    def _pass_on(self, number: int, again: bool = False) -> None:
        """Pass each request on to each rank once. A rank ends at once after the second request to stop."""
        for pid, child in self.children.items():
            if again or not child.told:
                child.told = True
                _send(pid, number)

    def _see_ends(self) -> None:
        for pid in list(self.children):
            try:
                info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # the agent was faster
                del self.children[pid]
                self._over[pid] = None
                if self.status:
                    self._await_agent()
                continue
            if info is not None:
                self._see_end(info)

    def _see_end(self, info: Any) -> None:
        """Note how a rank has ended. `info`: of a signal, of a wait, or of both."""
        code, by_itself = info.si_status, info.si_code == os.CLD_EXITED
        if info.si_pid in self._over or (by_itself and info.si_pid not in self.children):
            return
        self._over[info.si_pid] = code
        child = self.children.pop(info.si_pid, Child())  # it may be killed before it has announced itself
        first = not self.status
        if code and first:
            self.status = code if by_itself else 128 + code
        if code:
            self._await_agent()
        if code and self.asked.times:
            if not by_itself and self._kill_at < math.inf:
                self.status = 128 + self._number
                console.say(AT_ONCE)
                _tell(child, FailureNote(AT_ONCE, self.status, final=True))
            self._end()
        elif code and first and not by_itself:
            who = "a rank" if child.rank is None else f"rank {child.rank}"
            text = f"{who} on {socket.gethostname()} was killed by {signal.Signals(code).name}"
            console.say(text)
            _, cause, status = ended_by(-code)
            note = FailureNote(text, status, cause)
            telling = threading.Thread(target=_tell, args=(child, note), daemon=True)
            telling.start()
            self._telling = telling  # now `linger`, on another thread, may join it

    def _see_all(self) -> None:
        """After all ranks here have ended successfully, end this process if those of other machines stay
        silent: torch's agent would wait 300 s for them, and without a limit if the store's machine is off."""
        self._done_s = min(self._done_s, time.monotonic()) if _in_exit_barrier() else math.inf
        limit_s = OTHERS_S + self._later_s
        if time.monotonic() - self._done_s > limit_s:
            console.say(f"the ranks on {socket.gethostname()} have done their work; those of other machines "
                        f"have not said so for {limit_s:g} s")
            self._leave(0)

    def _end(self) -> None:
        """Make the agent end its ranks and not restart them: torch's agents do so on SIGQUIT."""
        if not self._ended:
            self._ended = True
            os.kill(os.getpid(), signal.SIGQUIT)

    def _report(self) -> None:
        waited = time.monotonic() - self._since
        if self.children:
            self.awaits = ""
        elif self.awaits and waited > REPORT_S * (self._reports + 1):
            self._reports += 1
            console.say(f"{socket.gethostname()} waits for other nodes at {self.awaits} for {waited:.0f} of "
                        f"{self.limit_s:g} s")
        if self.awaits and self._why is not None and waited > self.limit_s + self._later_s:
            console.say(self._why())
            self._leave(self.status or 1)
        limit_s = AGENT_S + (self.limit_s + self._later_s if self.awaits else 0)
        if self._failed_s and time.monotonic() - self._failed_s > limit_s:
            console.say(f"torch's agent on {socket.gethostname()} has not ended {limit_s:g} s after "
                        "ranks failed: it is made to end")
            self._leave(self.status or 1)


def _in_exit_barrier() -> bool:
    """Whether torch's agent, on the main thread, waits in its exit barrier. (Exit statuses do not tell: the
    agent may have read a rank's before this thread.)"""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_name != "_exit_barrier":
        frame = frame.f_back
    return frame is not None


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _tell(child: Child, note: FailureNote) -> None:
    """Tell the other ranks why a rank ended that could not tell them itself."""
    if not child.store:
        return
    from threed.comm.store import store_at
    from threed.engine.watch import tell

    address, port, prefix = child.store
    with contextlib.suppress(RuntimeError):  # the store has gone
        here = store_at(address, port, prefix, ANSWER_S)
        there = tell(here, replace(note, launcher=os.getpid()))
        if there.message == note.message:
            note_failure(Path(child.run), here, there)

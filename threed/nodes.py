"""Nodes: the launcher of one of several machines, which starts this node's ranks when the head of the run
says so.

Libraries are imported once, then the process forks, as on one machine. A rank dies with its launcher; a
launcher that loses the head ends its ranks. Messages that matter are printed on every node's console, with
the names of hosts.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from threed import __version__, marks
from threed.assemble import Job
from threed.callback import Callback
from threed.checkpoint.lineage import read_latest
from threed.children import (
    CONTEXT,
    GRACE_S,
    HANG_GRACE_S,
    SIGNALS,
    Preparation,
    be_rank,
    die_with_parent,
    end_all,
    ended_by,
    first_failure,
    pass_on,
    progress,
    signals_wait,
    start,
)
from threed.console import RECORD, say
from threed.data.tokens import Prepared
from threed.early import handle
from threed.engine.watch import KEY, tell
from threed.environment import RESTARTS, Nodes, Place
from threed.errors import RunError, ThreedError
from threed.head import Head
from threed.launcher import check_gpus
from threed.rank import run_rank
from threed.rendezvous import Line, connect, interface, interface_variables, is_here, listen, plain, readable
from threed.requests import Asked
from threed.restart import Restarts, Steps
from threed.schema import Config
from threed.stopped import stopped_now
from threed.store import serve_store, tcp_store

UNREACHED = 75  # exit status of a rank that cannot reach the store, and so cannot say why it fails


class _Ended(Exception):
    """The head has ended the run. Arguments: text, exit status."""


class _Stopped(Exception):
    """A signal came while no head was connected that could be told."""


class _Lost(Exception):
    """The head does not answer any more."""


class RankStore:
    """The store where the ranks of one attempt meet and report failures (see `engine.watch`)."""

    def __init__(self) -> None:
        self._store = serve_store()
        self.port: int = self._store.port

    def reason(self) -> dict[str, Any] | None:
        return json.loads(self._store.get(KEY)) if self._store.check([KEY]) else None

    def fail(self, text: str, status: int) -> None:
        """Report a failure; ranks that see it end without a message of their own."""
        tell(self._store, {"rank": None, "message": text, "status": status, "hang": False, "step": 0,
                           "cause": None})


class NodeLauncher:
    """One node's part of a run."""

    def __init__(self, nodes: Nodes, size: int, load: Callable[[int], Config],
                 callbacks: Sequence[Callback] = ()):
        """`size`: ranks of this node. `load`: world size -> config."""
        self.nodes, self.size, self.load, self.callbacks = nodes, size, load, callbacks
        self.config = load(nodes.most * size)
        self.host = socket.gethostname()
        self.number = nodes.node  # this node's; None: the head will choose one
        self.ranks: list[Any] = []
        self.steps = Steps(size)
        self.first = 0
        self.preparing: Preparation | None = None
        self.prepared: Prepared | None = None
        self.head: Any = None
        self.asked, self.answered = Asked(), 0  # requests to stop, and how many of them the head knows
        self.signal = 0  # the last signal to stop that came while no rank could answer it
        self.last = 0  # the last signal to stop
        self.id = uuid.uuid4().hex
        self.started = False  # whether this launcher has started ranks of the run
        self.attempt = 0
        self.launch = uuid.uuid4().hex
        # what the head was told of this attempt's ranks: failed, done or cleared
        self.reported: str | None = None
        self.deadline: float | None = None  # when ranks that were told to end are killed
        handle(SIGNALS, self.forward)

    def forward(self, number: int, _: Any) -> None:
        if number != signal.SIGUSR1:
            if not self.asked.again():
                return
            self.last = number
            if not self.ranks or self.deadline is not None or self.reported is not None:
                self.signal = number
        # The second request does not wait for a checkpoint.
        pass_on(self.ranks, signal.SIGKILL if self.asked.times > 1 and number != signal.SIGUSR1 else number)

    def run(self) -> int:
        """Take part in the run until it ends. Returns the exit status."""
        here = self.nodes.node == 0 or (self.nodes.node is None and is_here(self.nodes.address))
        if here:
            RECORD.open(Path(self.config.run.dir))
            self._start_head()
        losses = 0
        try:
            while True:
                line = self._connect(here)
                try:
                    self._attend(line)
                except _Lost as lost:
                    text = f"node 0 at {self.nodes.address} has gone: {lost}"
                    self._end_ranks(text)
                    losses += 1
                    if here or losses > self.config.run.restarts:
                        raise RunError(f"{text}. The run ends here; started again on all nodes, it goes on "
                                       "from its newest checkpoint") from None
                    if self.asked.times:
                        self.signal = self.last
                        raise _Stopped from None
                    say(f"{text}. Waiting for it to be started again")
                    self.attempt += self.started
        except _Stopped:
            when = "before it started again" if losses else "before the first step"
            say(f"stopped by {signal.Signals(self.signal).name} {when}")
            return 128 + self.signal
        except _Ended as end:
            text, status = end.args
            if text:
                say(text)
            return status
        finally:
            self._end_ranks()
            if self.head is not None:
                self.head.join(5.0)
                end_all([self.head])

    # -------- the head

    def _start_head(self) -> None:
        listener = listen(self.nodes.port)
        self.head = CONTEXT.Process(target=self._be_head, args=(listener, os.getpid()), name="head")
        with signals_wait():
            start([self.head])
        listener.close()

    def _be_head(self, listener: socket.socket, parent: int) -> None:
        die_with_parent(parent)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        with contextlib.suppress(ValueError, OSError):  # this process serves the store: two files a rank
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        run = self.config.run
        Head(listener, self.nodes, run.connect_timeout_s, Restarts(run.restarts, run.restart_wait_s),
             lambda: read_latest(self.config)[0], __version__, RankStore).run()
        os._exit(0)

    def _connect(self, here: bool) -> Line:
        number = 0 if here else self.number
        hello = {"version": __version__, "job": self.nodes.job, "nodes": [self.nodes.least, self.nodes.most],
                 "node": number, "host": self.host, "size": self.size, "attempt": self.attempt,
                 "launch": self.launch, "id": self.id, "fixed": here or self.nodes.node is not None}

        def tick() -> None:
            if self.signal:
                raise _Stopped
            if self.head is not None and self.head.exitcode is not None:
                raise RunError("the process that brings the nodes together has ended; its message is above")

        if self.nodes.local_address is not None:
            interface(self.nodes.local_address)  # raises InputError for a wrong address
        line, self.number = connect(self.nodes, here, self.config.run.connect_timeout_s, hello, tick, say)
        return line

    # -------- one attempt after the other

    def _attend(self, line: Line) -> None:
        """Do what the head says, until it ends the run."""
        while True:
            readable(line, wait_s=0.1)
            for message in line.receive():
                {"wait": self._wait, "prepare": self._prepare, "start": self._start, "clear": self._clear,
                 "end": self._end}[message["op"]](line, message)
            if line.lost is not None:
                raise _Lost(line.lost)
            if self.signal:
                line.send("stopped", signal=signal.Signals(self.signal).name, status=128 + self.signal)
                self.signal = 0
            if self.preparing is not None and self.preparing.is_over():
                self._see_prepared(line, self.preparing)
            self._see_ranks(line)
            if self.asked.times and not self.answered and self.ranks:
                self.answered = 1
                line.send("asked", text=self.steps.of(0).answer())

    def _wait(self, _: Line, message: dict[str, Any]) -> None:
        marks.mark("waiting")
        say(message["text"])

    def _end(self, _: Line, message: dict[str, Any]) -> None:
        raise _Ended(message["text"], message["status"])

    def _prepare(self, line: Line, message: dict[str, Any]) -> None:
        """Prepare the data for all nodes. The config may not fit the number of nodes that came."""
        marks.mark("data")
        self.preparing = Preparation(lambda: self.load(message["world"]), self.config,
                                     progress(self.config))
        self.preparing.start()

    def _see_prepared(self, line: Line, preparing: Preparation) -> None:
        self.preparing = None
        try:
            self.prepared = preparing.result()
            line.send("prepared")
        except ThreedError as error:
            say(str(error))
            self._report_mistake(line, str(error), error.status)

    def _report_mistake(self, line: Line, text: str, status: int) -> None:
        """Tell the head of a failure of this launcher's own, which is on its console already."""
        line.send("failed", rank=None, text=text, cause=text, step=None, status=status, certain=True)

    def _start(self, line: Line, message: dict[str, Any]) -> None:
        marks.mark("start")
        self.reported, self.deadline = None, None
        self.attempt, self.first = message["attempt"], message["first"]
        self.launch, self.started = message["launch"], True
        try:
            config = self.load(message["world"])
            variables = interface_variables(message["address"])
            check_gpus(config.run.device, self.size)
        except ThreedError as error:
            say(str(error))
            self._report_mistake(line, f"{self.host}: {error}", error.status)
            self.reported = "failed"
            return
        if message["note"] and self.first == 0:
            say(message["note"])
        variables |= {RESTARTS[0]: str(self.attempt), "THREED_LAUNCH": self.launch}
        store = plain(line.socket.getpeername()[0]), message["port"]
        body = partial(self._be_rank, config, variables, store)
        self.steps, parent = Steps(self.size), os.getpid()
        with signals_wait():
            self.ranks = [CONTEXT.Process(target=be_rank, args=(parent, partial(body, local)),
                                          name=f"rank {self.first + local}")
                          for local in range(self.size)]
            # A rank's garbage collector need not scan what was imported, whose memory so remains shared.
            gc.freeze()
            start(self.ranks)

    def _be_rank(self, config: Config, variables: dict[str, str], address: tuple[str, int],
                 local: int) -> int:
        os.environ.update(variables)
        try:
            store = tcp_store(*address, config.run.timeout_s)
        except RuntimeError:
            return UNREACHED
        place = Place(self.first + local, local, self.size, config.world_size)
        prepared = self.prepared if place.rank == 0 else None
        return run_rank(Job(config, self.callbacks, prepared, self.steps.of(local)), place, store)

    def _see_ranks(self, line: Line) -> None:
        """Tell the head when ranks have ended."""
        codes = [process.exitcode for process in self.ranks]
        over = all(code is not None for code in codes)
        if self.deadline is not None:
            if over:
                line.send("cleared", asked=self.asked.times > 0)
                self.ranks, self.deadline, self.reported = [], None, "cleared"
            elif time.monotonic() > self.deadline:
                for process in self.ranks:
                    process.kill()
        elif self.reported is None and self.ranks:
            if self.asked.times > 1 and any(codes):
                text = stopped_now(self.config, self.steps.of(0))
                say(text)
                self._report_mistake(line, f"{text} (on {self.host})", 128 + self.last)
                self.reported = "failed"
            elif (failed := first_failure(codes)) is not None:
                self._report_failure(line, *failed)
                self.reported = "failed"
            elif over:
                line.send("done")
                self.reported = "done"

    def _report_failure(self, line: Line, local: int, code: int) -> None:
        """Tell the head that a rank has failed. `certain`: the rank left no better reason in the store."""
        text, cause, status = ended_by(code)
        if code == UNREACHED:
            address = plain(line.socket.getpeername()[0])
            text, cause, status = (f"does not reach the store of node 0 at {address}: do firewalls let the "
                                   "nodes reach each other at any port?"), None, 1
        line.send("failed", rank=self.first + local, text=text, cause=cause, step=self.steps.at(local),
                  status=status, certain=code < 0 or code == UNREACHED)

    def _clear(self, _: Line, message: dict[str, Any]) -> None:
        """End this node's ranks after a failure: those that do not end by themselves are killed."""
        marks.begin("down")
        if message["text"]:
            say(message["text"])
        if self.preparing is not None:
            self.preparing.kill()
            self.preparing = None
        self.deadline = time.monotonic() + (HANG_GRACE_S if message["hang"] else GRACE_S)

    def _end_ranks(self, why: str = "") -> None:
        if self.preparing is not None:
            self.preparing.kill()
        end_all(self.ranks, why=why)
        self.ranks, self.preparing = [], None


def run_node(nodes: Nodes, size: int, load: Callable[[int], Config],
             callbacks: Sequence[Callback] = ()) -> int:
    """Be one node's launcher: start its ranks with those of the other nodes, and return the exit status of
    the run."""
    return NodeLauncher(nodes, size, load, callbacks).run()

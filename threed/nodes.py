"""Nodes: the launcher of one of several machines. It starts this node's ranks when the head of the run says so.

Libraries are imported once, then the process forks, as on one machine. A rank dies with its launcher; a launcher that loses the
head ends its ranks. A message that matters reaches every node's console, with the names of hosts.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from threed import __version__
from threed.checkpoint.lineage import read_latest
from threed.data.tokens import Prepared, prepare
from threed.engine.watch import KEY, say
from threed.environment import RESTARTS, Nodes
from threed.errors import InputError, RunError, ThreedError
from threed.head import Head
from threed.launcher import GRACE_S, SIGNALS, die_with_parent, run_rank
from threed.rendezvous import Line, choose_interface, connect, interface, is_here, listen, plain, readable
from threed.restart import Restarts
from threed.schema import Config
from threed.store import serve_store, tcp_store


class _Ended(Exception):
    """The head has said so."""


class _Stopped(Exception):
    """A signal came while nobody was there to be told."""


class RankStore:
    """Where the ranks of one attempt meet, and tell of failures (see `engine.watch`)."""

    def __init__(self) -> None:
        self._store = serve_store()
        self.port: int = self._store.port

    def reason(self) -> dict[str, Any] | None:
        return json.loads(self._store.get(KEY)) if self._store.check([KEY]) else None

    def fail(self, text: str, status: int) -> None:
        """Ranks that see it end without a word of their own."""
        self._store.compare_set(KEY, "", json.dumps({"rank": None, "message": text, "status": status, "hang": False,
                                                        "step": 0, "cause": None}))


class Launcher:
    """One node's part of a run."""

    def __init__(self, nodes: Nodes, size: int, load: Callable[[int], Config]):
        """`size`: ranks of this node. `load`: world size -> config."""
        self.nodes, self.size, self.load = nodes, size, load
        self.config = load(nodes.most * size)
        self.host = socket.gethostname()
        self.context = multiprocessing.get_context("fork")
        self.ranks: list[Any] = []
        self.first = 0
        self.preparing: tuple[Any, Any] | None = None
        self.prepared: Prepared | None = None
        self.head: Any = None
        self.asked = 0
        self.signal = 0  # the last one that came while no rank ran
        self.attempt = 0
        self.told: str | None = None  # what this attempt has said to the head at its end: failed, done or cleared
        self.deadline: float | None = None  # when ranks that are to end are killed
        os.environ["THREED_LAUNCH"] = uuid.uuid4().hex
        for number in SIGNALS:
            signal.signal(number, self.forward)

    def forward(self, number: int, _: Any) -> None:
        self.asked += number != signal.SIGUSR1
        if not self.ranks and number != signal.SIGUSR1:
            self.signal = number
        for process in self.ranks:
            if process.pid is not None and process.exitcode is None:
                # The second request does not wait for a checkpoint.
                os.kill(process.pid, signal.SIGKILL if self.asked > 1 else number)

    def run(self) -> int:
        """The exit status."""
        here = self.nodes.node == 0 or (self.nodes.node is None and is_here(self.nodes.address))
        if here:
            listener = listen(self.nodes.port)
            self.head = self.context.Process(target=self._be_head, args=(listener, os.getpid()), name="head")
            self._fork([self.head])
            listener.close()
        try:
            while True:
                line = self._connect(here)
                try:
                    self._attend(line)
                except _Lost as lost:
                    self._end_ranks()
                    text = f"node 0 at {self.nodes.address} has gone: {lost}"
                    if here or self.attempt >= self.restarts:
                        raise RunError(f"{text}. The run ends here; started again on all nodes, it goes on from its newest "
                                       "checkpoint") from None
                    say(f"{text}. Waiting for it to be started again")
                    self.attempt += 1
        except _Stopped:
            say(f"stopped by {signal.Signals(self.signal).name} before the first step")
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
                self.head.kill()

    @property
    def restarts(self) -> int:
        return self.config.run.restarts

    # -------- the head

    def _be_head(self, listener: socket.socket, parent: int) -> None:
        die_with_parent(parent)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        restarts = Restarts(self.restarts, self.config.run.restart_wait_s)
        Head(listener, self.nodes, self.config.run.connect_timeout_s, restarts, lambda: read_latest(self.config)[0], __version__,
             RankStore).run()
        os._exit(0)

    def _connect(self, here: bool) -> Line:
        number = 0 if here else self.nodes.node
        hello = {"version": __version__, "job": self.nodes.job, "nodes": [self.nodes.least, self.nodes.most], "node": number,
                 "host": self.host, "size": self.size, "attempt": self.attempt}

        def tick() -> None:
            if self.signal:
                raise _Stopped
            if self.head is not None and self.head.exitcode is not None:
                raise RunError("the process that brings the nodes together has ended; its message is above")

        if self.nodes.local_address is not None:
            interface(self.nodes.local_address)  # refuses a wrong one
        return connect(self.nodes, here, self.config.run.connect_timeout_s, hello, tick, say)

    # -------- one attempt after the other

    def _attend(self, line: Line) -> None:
        """Do what the head says, until it says end."""
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
            if self.preparing is not None and self.preparing[1].poll():
                self._see_prepared(line, *self.preparing)
            self._see_ranks(line)

    def _wait(self, _: Line, message: dict[str, Any]) -> None:
        say(message["text"])

    def _end(self, _: Line, message: dict[str, Any]) -> None:
        raise _Ended(message["text"], message["status"])

    def _prepare(self, line: Line, message: dict[str, Any]) -> None:
        """Prepare the data for all, in a process of its own: the one that forks ranks must not have started threads."""
        receive, send = self.context.Pipe(duplex=False)

        def body(parent: int) -> None:
            die_with_parent(parent)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            try:
                config = self.load(message["world"])  # another number of nodes may not fit it
                send.send(prepare(config.data, config.model, lambda text: print(text, flush=True)))
            except InputError as error:
                send.send(error)

        process = self.context.Process(target=body, args=(os.getpid(),))
        self._fork([process])
        send.close()
        self.preparing = process, receive

    def _see_prepared(self, line: Line, process: Any, receive: Any) -> None:
        self.preparing = None
        try:
            result = receive.recv()
        except EOFError:
            process.join()
            result = RunError(f"preparing the data ended with exit status {process.exitcode}")
        process.join()
        if isinstance(result, ThreedError):
            line.send("failed", rank=None, signal=None, asked=False, text=str(result), status=result.status)
            say(str(result))
        else:
            self.prepared = result
            line.send("prepared")

    def _start(self, line: Line, message: dict[str, Any]) -> None:
        self.told, self.deadline, self.attempt, self.first = None, None, message["attempt"], message["first"]
        try:
            config = self.load(message["world"])
            choose_interface(message["address"])
        except InputError as error:
            say(str(error))
            line.send("failed", rank=None, signal=None, asked=False, text=f"{self.host}: {error}", status=error.status)
            self.told = "failed"
            return
        if message["note"] and self.first == 0:
            say(message["note"])
        os.environ[RESTARTS[0]] = str(self.attempt)
        store = plain(line.socket.getpeername()[0]), message["port"]
        self.ranks = [self.context.Process(target=self._be_rank, args=(config, local, store, os.getpid()))
                      for local in range(self.size)]
        gc.freeze()  # what was imported stays: a rank's collector need not look at it, and its memory stays shared
        self._fork(self.ranks)

    def _fork(self, processes: list[Any]) -> None:
        sys.stdout.flush()
        # A child must not run the launcher's handlers: signals wait until it has its own.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        for process in processes:
            process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _be_rank(self, config: Config, local: int, store: tuple[str, int], parent: int) -> None:
        os.setpgid(0, 0)  # a terminal's Ctrl-C goes to the launcher, which passes it on once
        die_with_parent(parent)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        rank = self.first + local
        try:
            status = run_rank(config, rank, local, self.size, tcp_store(*store, config.run.timeout_s),
                              self.prepared if rank == 0 else None)
        except Exception as error:
            say(f"rank {rank} on {self.host} does not reach the store of node 0 at {store[0]}:{store[1]}: "
                f"{str(error).splitlines()[0]}")
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # no destructor may wait for a peer that is gone

    def _see_ranks(self, line: Line) -> None:
        """Tell the head when ranks have ended."""
        codes = [process.exitcode for process in self.ranks]
        over = all(code is not None for code in codes)
        if self.deadline is not None:
            if over:
                line.send("cleared")
                self.ranks, self.deadline, self.told = [], None, "cleared"
            elif time.monotonic() > self.deadline:
                for process in self.ranks:
                    process.kill()
        elif self.told is None and self.ranks:
            failed = next(((local, code) for local, code in enumerate(codes) if code), None)
            if failed is not None:
                local, code = failed
                line.send("failed", rank=self.first + local, signal=signal.Signals(-code).name if code < 0 else None,
                          status=code if code > 0 else 128 - code, asked=self.asked > 0)
                self.told = "failed"
            elif over:
                line.send("done")
                self.told = "done"

    def _clear(self, _: Line, message: dict[str, Any]) -> None:
        """Somebody has failed: ranks that do not end by themselves are killed."""
        if message["text"]:
            say(message["text"])
        if self.preparing is not None:
            self.preparing[0].kill()
            self.preparing = None
        self.deadline = time.monotonic() + (1.0 if message["hang"] else GRACE_S)  # one that hangs will not end by itself

    def _end_ranks(self) -> None:
        if self.preparing is not None:
            self.preparing[0].kill()
        for process in self.ranks:
            if process.exitcode is None:
                process.kill()
        for process in self.ranks:
            process.join()
        self.ranks, self.preparing = [], None


class _Lost(Exception):
    """The head does not answer any more."""


def run_node(nodes: Nodes, size: int, load: Callable[[int], Config]) -> int:
    """Be one node's launcher: start its ranks with those of the other nodes, and return the exit status of the run."""
    return Launcher(nodes, size, load).run()

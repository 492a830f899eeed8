"""The head of a run on several nodes: a process beside node 0's launcher that decides for all launchers. No
torch.

The head waits for the nodes (GATHER), has node 0 prepare the data (PREPARE), and tells each node which ranks
to start (RUN). When a rank or a node fails, it has all launchers end their ranks (CLEAR), and then begins
again or ends the run. It waits for nodes no longer than `run.connect_timeout_s`. `rendezvous` lists the
messages.
"""

from __future__ import annotations

import enum
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from threed.environment import Nodes
from threed.rendezvous import REPORT_S, Line, is_address, is_loopback, plain, readable
from threed.restart import Failure, Restarts

LOOKS = 10_000  # at lines in a second: of a thousand nodes one has something to say at any time
CLEAR_S = 20.0  # a launcher that cannot end its ranks within this is given up
# a node that is silent for longer may have been replaced: every launcher sends a message each two seconds
SILENT_S = 5.0
HELLO = {"version": str, "job": str, "nodes": list, "node": (int, type(None)), "host": str, "size": int,
         "attempt": int, "launch": str, "id": str, "fixed": bool, "from": str}


class State(enum.Enum):
    GATHER = enum.auto()
    PREPARE = enum.auto()
    RUN = enum.auto()
    CLEAR = enum.auto()
    OVER = enum.auto()


class Store(Protocol):
    """Where the ranks of one attempt meet."""

    port: int

    def reason(self) -> dict[str, Any] | None: ...
    def fail(self, text: str, status: int) -> None: ...


@dataclass
class Member:
    """A node whose launcher is connected."""

    line: Line
    node: int
    host: str
    size: int
    address: str  # from which it reached the head, or LOCAL_ADDR
    id: str  # of the launcher
    done: bool = False
    cleared: bool = False
    asked: bool = False  # whether its ranks were asked to stop
    ranks: range = field(default_factory=lambda: range(0))

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"


class Head:
    """Decides for all launchers. `newest` names the newest checkpoint: restarts are counted from it.
    `open_store` opens a store for the ranks of one attempt."""

    def __init__(self, listener: socket.socket, nodes: Nodes, limit_s: float, restarts: Restarts,
                 newest: Callable[[], str], version: str, open_store: Callable[[], Store]):
        self.version, self.wanted = version, _span(nodes.least, nodes.most)
        self.listener, self.nodes, self.limit_s, self.open_store = listener, nodes, limit_s, open_store
        self.restarts, self.newest = restarts, newest
        self.not_before = 0.0  # earliest time of the next start
        self.settle_s = limit_s / 10  # how long nodes that are fewer than `nodes.most` wait for more
        self.members: dict[int, Member] = {}
        self.running: list[Member] = []
        self.unidentified: list[tuple[Line, float]] = []  # connections without a hello, and when each began
        self.seen: dict[int, str] = {}  # node -> host, of all nodes that ever connected
        self.attempt, self.launch = 0, ""
        self.store: Store | None = None
        self.answered = False  # whether a request to stop has been answered
        self.failure: Failure | None = None  # the last failure
        self.looked: list[str] = []  # [the newest checkpoint after it], once it is known
        self.begin(State.GATHER)

    def begin(self, state: State) -> None:
        self.state, self.report = state, REPORT_S
        self.since = self.changed = time.monotonic()

    def run(self) -> None:
        """Run until all launchers have been told to end."""
        while self.state != State.OVER:
            lines = [*(member.line for member in self.members.values()),
                     *(line for line, _ in self.unidentified)]
            readable(self.listener, *(line for line in lines if line.lost is None), wait_s=0.25)
            time.sleep(len(lines) / LOOKS)  # what comes meanwhile is heard together
            self._admit()
            for member in list(self.members.values()):
                for message in member.line.receive():
                    self._hear(member, message)
                if member.line.lost is not None and self.members.get(member.node) is member:
                    self._lose(member, member.line.lost)
            {State.GATHER: self._gather, State.CLEAR: self._clear}.get(self.state, lambda: None)()
        for member in self.members.values():  # each launcher closes its end after the last message
            member.line.wait(2.0)

    def tell(self, op: str, **values: Any) -> None:
        for member in self.members.values():
            member.line.send(op, **values)

    # -------- which nodes are connected

    def _admit(self) -> None:
        while readable(self.listener, wait_s=0):
            try:
                self.unidentified.append((Line(self.listener.accept()[0]), time.monotonic()))
            except OSError:  # the peer has gone already, or too many files are open: other nodes go on
                time.sleep(0.25)
                break
        for line, since in list(self.unidentified):
            hello = next(iter(line.receive()), None)
            if hello is not None and hello["op"] == "hello" and hello.get("version") != self.version:
                line.send("refused", text=f"{hello.get('host')} has threed {hello.get('version')}, node 0 "
                                          f"({self.seen.get(0)}) {self.version}: install one everywhere")
                line.close()
            elif hello is not None and hello["op"] == "hello" and _is_whole(hello):
                self._greet(line, hello)
            elif line.lost is None and hello is None and time.monotonic() - since < REPORT_S:
                continue
            else:
                line.close()
            self.unidentified.remove((line, since))

    def _greet(self, line: Line, hello: dict[str, Any]) -> None:
        free = [number for number in range(self.nodes.most) if number not in self.members and number > 0]
        node = hello["node"]
        holder = self.members.get(-1 if node is None else node)
        if node is None or (not hello["fixed"] and holder is not None and holder.id != hello["id"]):
            node = next(iter(free), None)  # its number, if it had one, now belongs to another node
        problem, other = self._problem(hello, node), self.members.get(-1 if node is None else node)
        if problem:
            line.send("refused", text=problem)
            line.close()
            return
        assert node is not None
        if other is not None:
            other.line.send("end", text=f"another launcher has come as node {node}, on {hello['host']}: this "
                                        "one ends", status=1)
            self._lose(other, "its launcher was started again")
        self.members[node] = Member(line, node, hello["host"], hello["size"], plain(hello["from"]),
                                    hello["id"])
        self.seen[node] = hello["host"]
        # Node 0's launcher may be a new one in a run that goes on.
        if not self.launch or (hello["attempt"] > self.attempt and not self.running):
            self.attempt, self.launch = hello["attempt"], hello["launch"]
        self.changed = time.monotonic()
        line.send("welcome", node=node)
        if self.state != State.GATHER:
            line.send("wait", text=f"the run is under way with {len(self.running)} nodes; this one joins it "
                                   "at its next start")

    def _problem(self, hello: dict[str, Any], node: int | None) -> str | None:
        host = hello["host"]
        if hello["job"] != self.nodes.job:
            return (f"node 0 at {self.nodes.address}:{self.nodes.port} is of job "
                    f"{self.nodes.job or '(none)'}, not of {hello['job'] or '(none)'}: two runs need "
                    "different values of MASTER_PORT")
        if hello["nodes"] != [self.nodes.least, self.nodes.most]:
            return f"NNODES is {_span(*hello['nodes'])} on {host} and {self.wanted} on node 0"
        if node is None:
            return f"{host} is one node too many: NNODES={self.wanted}, and all are there"
        other = self.members.get(node)
        if other is not None and (other.host != host or node == 0) and other.line.silent_s < SILENT_S:
            return f"NODE_RANK={node} on both {other.host} and {host}: each node has a number of its own"
        return None

    def _lose(self, member: Member, why: str) -> None:
        member.line.close()
        del self.members[member.node]
        self.changed = time.monotonic()
        if member in self.running and self.state in (State.PREPARE, State.RUN) and not member.done:
            self._fail(Failure(f"{member} has gone: {why}", None, None, 1), None)

    # -------- what launchers say

    def _hear(self, member: Member, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "stopped" and self.state != State.GATHER and member not in self.running:
            member.line.send("end", text=f"stopped by {message['signal']}; the run goes on without it",
                             status=message["status"])
            self._lose(member, "it was stopped")
        elif op == "stopped":
            first = self.attempt == 0 and self.state != State.CLEAR
            when = "before the first step" if first else "before it started again"
            self._end(f"stopped by {message['signal']} on {member.host} {when}", message["status"])
        elif op == "asked":
            self._answer(member, message["text"])
        elif op == "cleared":
            member.cleared, member.asked = True, message["asked"]
        elif op == "failed" and self.state in (State.PREPARE, State.RUN):
            self._judge(member, message)
        elif op == "prepared" and self.state == State.PREPARE:
            self._start()
        elif op == "done" and self.state == State.RUN:
            member.done = True
            if all(other.done for other in self.running):
                self._end("", 0)

    def _answer(self, member: Member, text: str) -> None:
        """Have node 0, and the first node that was asked to stop, say it: a scheduler asks all of them."""
        if self.answered:
            return
        self.answered = True
        member.line.send("wait", text=text)
        if member.node and 0 in self.members:
            self.members[0].line.send("wait", text=f"{text} (asked on {member.host})")

    def _judge(self, member: Member, message: dict[str, Any]) -> None:
        """Find which rank failed first and why, after a message that a rank, or a launcher before it started
        its ranks, has failed."""
        rank = message["rank"]
        reason = self.store.reason() if self.store is not None and not message["certain"] else None
        if reason is not None and reason["rank"] is not None:
            first = next((other for other in self.running if reason["rank"] in other.ranks), member)
            text = f"rank {reason['rank']} on {first.host}: {reason['message']}"
            failure = Failure(text.splitlines()[0], reason.get("cause"), reason.get("step"), reason["status"],
                              reason.get("own", False))
            self._fail(failure, first, reason["hang"], text)
        else:
            text = message["text"] if rank is None else f"rank {rank} on {member.host} {message['text']}"
            self._fail(Failure(text, message["cause"], message["step"], message["status"]),
                       member if rank is None else None)

    def _fail(self, failure: Failure, said: Member | None, hang: bool = False, text: str = "") -> None:
        """Have all launchers end their ranks and print `text` (empty: the failure's). `said`: the node whose
        console has it already."""
        text = text or failure.text
        if self.store is not None:
            self.store.fail(text, failure.status)
        for member in self.members.values():
            member.cleared = member.asked = False
            member.line.send("clear", text="" if member is said else text, hang=hang)
        self.failure, self.looked = failure, []
        # The disk of checkpoints may be what has failed, and not answer.
        threading.Thread(target=lambda newest: newest.append(self.newest()), args=(self.looked,),
                         daemon=True).start()
        self.begin(State.CLEAR)

    def _clear(self) -> None:
        """Wait until no rank of this attempt is left; then start again, or end."""
        assert self.failure is not None
        late = time.monotonic() - self.since > CLEAR_S
        for member in [member for member in self.running if self.members.get(member.node) is member
                       and not member.cleared]:
            if not late:
                return
            self._lose(member, "it does not end its ranks")
        if any(member.asked for member in self.running):  # to stop
            self._end("", self.failure.status)
            return
        if not self.looked and not late:
            return
        wait_s, text = self.restarts.after(self.failure,
                                           self.looked[0] if self.looked else self.restarts.newest)
        if wait_s is None:
            self._end(text, self.failure.status)
            return
        self.attempt += 1
        self.tell("wait", text=text)
        self.begin(State.GATHER)
        self.not_before = self.since = time.monotonic() + wait_s

    # -------- the next start

    def _gather(self) -> None:
        count, waited, now = len(self.members), time.monotonic() - self.since, time.monotonic()
        if now < self.not_before:
            return
        enough = count >= self.nodes.least and 0 in self.members
        settled = now - self.changed > self.settle_s or waited > self.limit_s
        if count == self.nodes.most or (enough and settled and self.nodes.least < self.nodes.most):
            self._ready()
            return
        missing = [f"node {node}" + (f" ({self.seen[node]})" if node in self.seen else "")
                   for node in range(self.nodes.most)
                   if node not in self.members]
        few = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        if waited > self.limit_s:
            self._end(f"{count} of {self.wanted} nodes came within run.connect_timeout_s={self.limit_s:g}; "
                      f"missing: {few}. Are they started, with MASTER_ADDR={self.nodes.address} and "
                      f"MASTER_PORT={self.nodes.port}, and do firewalls let them reach node 0?", 1)
        elif waited > self.report:
            self.report += REPORT_S
            self.tell("wait", text=f"{count} of {self.wanted} nodes after {waited:.0f} s, waiting for {few}")

    def _ready(self) -> None:
        self.running = [self.members[node] for node in sorted(self.members)]
        first = 0
        for member in self.running:
            member.done = member.cleared = member.asked = False
            member.ranks = range(first, first + member.size)
            first += member.size
        self.store = None
        self.begin(State.PREPARE)
        self.members[0].line.send("prepare", world=first)

    def _start(self) -> None:
        self.store = self.open_store()
        # Whoever came over loopback is on node 0's machine: the others reach it as they reach node 0.
        far = [member for member in self.running if not is_loopback(member.address)]
        near = plain(far[0].line.socket.getsockname()[0]) if far else "127.0.0.1"
        world, note = self.running[-1].ranks.stop, ""
        if len(self.running) < self.nodes.most:
            note = f"going on with {len(self.running)} of {self.nodes.most} nodes: " + ", ".join(
                str(m) for m in self.running
            )
        self.begin(State.RUN)
        for member in self.running:
            address = near if is_loopback(member.address) else member.address
            member.line.send("start", first=member.ranks.start, world=world, port=self.store.port,
                             address=address,
                             attempt=self.attempt, launch=self.launch, note=note)

    def _end(self, text: str, status: int) -> None:
        self.tell("end", text=text, status=status)
        self.state = State.OVER


def _is_whole(hello: dict[str, Any]) -> bool:
    return all(isinstance(hello.get(name), kind) for name,
               kind in HELLO.items()) and is_address(hello["from"]) and (
        len(hello["nodes"]) == 2 and all(isinstance(number, int) for number in hello["nodes"]))


def _span(least: int, most: int) -> str:
    return str(most) if least == most else f"{least}:{most}"

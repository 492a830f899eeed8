"""The head of a run on several nodes, with launchers that are only connections: who is let in, and what follows a failure."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time

import pytest

from threed.environment import Nodes
from threed.errors import InputError, RunError
from threed.head import Head
from threed.rendezvous import Line, connect, interface, is_here, is_loopback, listen, plain, route
from threed.restart import Restarts


class FakeStore:
    port = 1

    def __init__(self) -> None:
        self.note: dict | None = None

    def reason(self):
        return self.note

    def fail(self, text, status):
        self.note = self.note or {"rank": None, "message": text, "status": status, "hang": False}


class Meeting:
    """A head in a thread."""

    def __init__(self, least: int, most: int, restarts: int = 0, limit_s: float = 20.0):
        listener = listen(0)
        self.nodes = Nodes(least, most, 0, 2, "127.0.0.1", listener.getsockname()[1])
        self.stores: list[FakeStore] = []
        self.head = Head(listener, self.nodes, limit_s, Restarts(restarts, 0.1), lambda: "", "1", self.store)
        self.head.settle_s = 0.2
        self.lines: list[Line] = []
        threading.Thread(target=self.head.run, daemon=True).start()

    def store(self) -> FakeStore:
        self.stores.append(FakeStore())
        return self.stores[-1]

    def join(self, node: int | None, host: str = "", **other) -> Line:
        hello = {"version": "1", "job": "", "nodes": [self.nodes.least, self.nodes.most], "node": node,
                 "host": host or f"host{node}", "size": 2, "attempt": 0}
        self.lines.append(connect(self.nodes, True, 5.0, hello | other, lambda: None, lambda line: None))
        return self.lines[-1]


def hear(line: Line, op: str) -> dict:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        message = line.wait(0.5)
        if message is not None and message["op"] == op:
            return message
    raise AssertionError(f"no '{op}' came; {line.lost}")


def start(first: Line, *others: Line) -> list[dict]:
    hear(first, "prepare")
    first.send("prepared")
    return [hear(line, "start") for line in (first, *others)]


def test_a_run():
    """All come, prepare, start, are done."""
    meeting = Meeting(2, 2)
    second, first = meeting.join(1), meeting.join(0)
    starts = start(first, second)
    assert [(each["first"], each["world"], each["address"]) for each in starts] == [(0, 4, "127.0.0.1"), (2, 4, "127.0.0.1")]
    assert starts[0]["hosts"] == ["host0", "host0", "host1", "host1"]
    for line in (first, second):
        line.send("done")
    assert hear(first, "end")["status"] == hear(second, "end")["status"] == 0


@pytest.mark.parametrize(("hello", "words"), [
    ({"version": "2"}, "has threed 2, node 0 .* 1"), ({"job": "77"}, "two runs need different values of MASTER_PORT"),
    ({"nodes": [3, 3]}, "NNODES is 3 on host1 and 2 on node 0"), ({"host": "other"}, "NODE_RANK=1 on both host1 and other"),
    ({"node": None, "host": "more"}, "more is one node too many")])
def test_who_is_refused(hello, words):
    meeting = Meeting(2, 2)
    meeting.join(0)
    meeting.join(1)
    with pytest.raises(InputError, match=words):
        meeting.join(**{"node": 1, "host": "host1"} | hello)


@pytest.mark.parametrize("failure", ["killed", "mistake", "gone"])
@pytest.mark.parametrize("restarts", [0, 1])
def test_failures(failure, restarts):
    """Everybody hears of it; it starts again if it may, and not after a mistake."""
    meeting = Meeting(2, 2, restarts)
    first, second = meeting.join(0), meeting.join(1)
    start(first, second)
    if failure == "gone":
        second.close()
    else:
        second.send("failed", rank=3, signal="SIGKILL" if failure == "killed" else None, asked=False,
                    status=137 if failure == "killed" else 2)
    words = {"killed": "rank 3 on host1 was killed by SIGKILL", "gone": "node 1 (host1) has gone: the connection was closed",
             "mistake": "rank 3 on host1 ended with exit status 2 and did not say why"}[failure]
    assert hear(first, "clear")["text"] == words and meeting.stores[0].note is not None
    first.send("cleared")
    if failure != "gone":
        assert hear(second, "clear")["text"] == words
        second.send("cleared")
    if restarts and failure != "mistake":
        if failure == "gone":
            second = meeting.join(1)
        assert [each["attempt"] for each in start(first, second)] == [1, 1] and len(meeting.stores) == 2
    else:
        assert hear(first, "end")["status"] == {"killed": 137, "gone": 1, "mistake": 2}[failure]


def test_what_a_rank_has_said_is_not_said_twice():
    meeting = Meeting(2, 2)
    first, second = meeting.join(0), meeting.join(1)
    start(first, second)
    meeting.stores[0].note = {"rank": 2, "message": "the seventh seal", "status": 1, "hang": False}
    second.send("failed", rank=2, signal=None, status=1, asked=False)
    assert hear(first, "clear")["text"] == "rank 2 on host1: the seventh seal" and hear(second, "clear")["text"] == ""


def test_fewer_nodes_and_more():
    """2:3 nodes: two wait a moment for the third, which joins the next start."""
    meeting = Meeting(2, 3, restarts=1)
    first, second = meeting.join(0), meeting.join(2)
    starts = start(first, second)
    assert [each["world"] for each in starts] == [4, 4] and "2 of 3 nodes: node 0 (host0), node 2 (host2)" in starts[0]["note"]
    third = meeting.join(1)
    assert "joins it at its next start" in hear(third, "wait")["text"]
    second.close()
    hear(first, "clear")
    first.send("cleared")
    assert [each["first"] for each in start(first, third)] == [0, 2]


def test_nobody_waits_for_ever():
    meeting = Meeting(2, 2, limit_s=0.5)
    assert "1 of 2 nodes came within run.connect_timeout_s=0.5; missing: node 1" in hear(meeting.join(0), "end")["text"]
    nodes = dataclasses.replace(meeting.nodes, port=1)
    with pytest.raises(RunError, match=r"node 0 did not answer within run\.connect_timeout_s=0\.2: .* connection refused"):
        connect(nodes, False, 0.2, {}, lambda: None, lambda line: None)


def test_another_program():
    with socket.create_server(("", 0)) as listener:
        def answer() -> None:
            listener.accept()[0].sendall(b"SSH-2.0\r\n")

        threading.Thread(target=answer, daemon=True).start()
        nodes = Nodes(2, 2, 1, 1, "127.0.0.1", listener.getsockname()[1])
        with pytest.raises(InputError, match="another program has this port"):
            connect(nodes, False, 5.0, {}, lambda: None, lambda line: None)
        with pytest.raises(InputError, match="is taken by another program"):
            listen(nodes.port)


def test_addresses():
    assert plain("::ffff:10.0.0.1") == "10.0.0.1" and plain("fe80::1%eth0") == "fe80::1"
    assert is_loopback("127.0.1.1") and is_loopback("::ffff:127.0.0.1") and not is_loopback("10.0.0.1")
    assert interface("127.0.1.1") == interface("127.0.0.1") == "lo"
    assert route("127.0.0.1", 1) == "127.0.0.1" and is_here("127.0.0.1") and not is_here("192.0.2.1")
    with pytest.raises(InputError, match=r"LOCAL_ADDR=192\.0\.2\.1 is no address of"):
        interface("192.0.2.1")

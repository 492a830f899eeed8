"""The head of a run on several nodes, with launchers that are only connections: who is let in, and what
follows a failure."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time

import pytest

from threed.children import ended_by
from threed.environment import Nodes
from threed.errors import InputError, RunError
from threed.head import Head, State
from threed.rendezvous import (
    Line,
    connect,
    interface,
    interface_variables,
    is_here,
    is_loopback,
    listen,
    plain,
    route,
)
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
                 "host": host or f"host{node}", "size": 2, "attempt": 0, "launch": f"launch of {node}",
                 "id": f"{host or node}", "fixed": node is not None}
        line, self.number = connect(self.nodes, True, 5.0, hello | other, lambda: None, lambda line: None)
        self.lines.append(line)
        return line


def hear(line: Line, op: str) -> dict:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        message = line.wait(0.5)
        if message is not None and message["op"] == op:
            return message
    raise AssertionError(f"no '{op}' came; {line.lost}")


def fail(line: Line, code: int, rank: int = 3) -> None:
    """A rank has ended with this exit code."""
    text, cause, status = ended_by(code)
    line.send("failed", rank=rank, text=text, cause=cause, step=5, status=status, certain=code < 0)


def start(first: Line, *others: Line) -> list[dict]:
    hear(first, "prepare")
    first.send("prepared")
    return [hear(line, "start") for line in (first, *others)]


def test_a_run():
    """All nodes come, prepare, start, and are done."""
    meeting = Meeting(2, 2)
    second, first = meeting.join(1), meeting.join(0)
    starts = start(first, second)
    assert [(each["first"], each["world"], each["address"])
            for each in starts] == [(0, 4, "127.0.0.1"), (2, 4, "127.0.0.1")]
    assert {each["launch"] for each in starts} == {"launch of 1"}, "of whoever came first"
    for line in (first, second):
        line.send("done")
    assert hear(first, "end")["status"] == hear(second, "end")["status"] == 0


@pytest.mark.parametrize(("hello", "words"), [
    ({"version": "2"}, "has threed 2, node 0 .* 1"),
    ({"job": "77"}, "two runs need different values of MASTER_PORT"),
    ({"nodes": [3, 3]}, "NNODES is 3 on host1 and 2 on node 0"),
    ({"host": "other"}, "NODE_RANK=1 on both host1 and other"),
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
    """All launchers hear of a failure; the run is restarted if it may be, and not after a mistake of the
    user."""
    meeting = Meeting(2, 2, restarts)
    first, second = meeting.join(0), meeting.join(1)
    start(first, second)
    if failure == "gone":
        second.close()
    else:
        fail(second, -9 if failure == "killed" else 2)
    words = {"killed": "rank 3 on host1 was killed by SIGKILL",
             "gone": "node 1 (host1) has gone: the connection was closed",
             "mistake": "rank 3 on host1 ended with exit status 2 and did not say why"}[failure]
    assert hear(first, "clear")["text"] == words and meeting.stores[0].note is not None
    first.send("cleared", asked=False)
    if failure != "gone":
        assert hear(second, "clear")["text"] == words
        second.send("cleared", asked=False)
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
    fail(second, 1)
    assert hear(first, "clear")["text"] == "rank 2 on host1: the seventh seal"
    assert hear(second, "clear")["text"] == ""


def test_fewer_nodes_and_more():
    """2:3 nodes: two wait a moment for the third, which joins the next start."""
    meeting = Meeting(2, 3, restarts=1)
    first, second = meeting.join(0), meeting.join(2)
    starts = start(first, second)
    assert [each["world"] for each in starts] == [
        4,
        4,
    ] and "2 of 3 nodes: node 0 (host0), node 2 (host2)" in starts[0]["note"]
    third = meeting.join(1)
    assert "joins it at its next start" in hear(third, "wait")["text"]
    second.close()
    hear(first, "clear")
    first.send("cleared", asked=False)
    assert [each["first"] for each in start(first, third)] == [0, 2]


def test_nobody_waits_for_ever():
    meeting = Meeting(2, 2, limit_s=0.5)
    text = hear(meeting.join(0), "end")["text"]
    assert "1 of 2 nodes came within run.connect_timeout_s=0.5; missing: node 1" in text
    nodes = dataclasses.replace(meeting.nodes, port=1)
    with pytest.raises(RunError, match=r"node 0 did not answer within run\.connect_timeout_s=0\.2: .* "
                                       r"connection refused"):
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


def test_a_number_that_another_has_been_given():
    """NODE_RANK is not set: a launcher that comes back takes the next free number."""
    meeting = Meeting(2, 4)
    meeting.join(0)
    meeting.join(None, "host7")
    assert meeting.number == 1
    meeting.join(1, "host1", fixed=False)
    assert meeting.number == 2


def test_a_spare_changes_nothing_of_a_run_under_way():
    """A spare node lost its connection once, and claims more attempts than the run has made."""
    meeting = Meeting(2, 3, restarts=1)
    first, second = meeting.join(0), meeting.join(1)
    launch = start(first, second)[0]["launch"]
    meeting.join(2, attempt=1, launch="a spare's")
    fail(second, -9)
    for line in (first, second):
        hear(line, "clear")
        line.send("cleared", asked=False)
    again = start(first, second)
    assert [(each["attempt"], each["launch"]) for each in again] == [(1, launch)] * 2


def test_a_spare_that_stops_while_data_are_prepared():
    meeting = Meeting(2, 3)
    first, second = meeting.join(0), meeting.join(1)
    hear(first, "prepare")
    spare = meeting.join(2)
    spare.send("stopped", signal="SIGTERM", status=143)
    assert hear(spare, "end")["status"] == 143
    first.send("prepared")
    hear(second, "start")


@pytest.mark.parametrize("when", ["it runs", "its ranks end"])
def test_a_stop_of_one_node(when):
    """A spare node leaves alone; somebody who stops while all ranks end after a failure stops the run."""
    meeting = Meeting(2, 3, restarts=3)
    first, second = meeting.join(0), meeting.join(1)
    start(first, second)
    spare = meeting.join(2)
    if when == "it runs":
        spare.send("stopped", signal="SIGTERM", status=143)
        assert hear(spare, "end")["status"] == 143
        first.send("done")
        second.send("done")
        assert hear(first, "end")["status"] == 0
    else:
        fail(second, -9)
        hear(first, "clear")
        first.send("stopped", signal="SIGTERM", status=143)
        end = hear(second, "end")
        assert end["status"] == 143 and end["text"] == "stopped by SIGTERM on host0 before it started again"


def test_who_was_asked_to_stop_does_not_start_again():
    """Whichever node's launcher was asked, and whichever node's rank failed on the way out."""
    meeting = Meeting(2, 2, restarts=3)
    first, second = meeting.join(0), meeting.join(1)
    start(first, second)
    fail(first, 1, rank=0)
    hear(second, "clear")
    first.send("cleared", asked=False)
    second.send("cleared", asked=True)
    assert hear(first, "end")["status"] == 1


def test_a_launcher_that_was_replaced(monkeypatch):
    """The old launcher is told, and ends; a launcher on another host replaces it once it is silent. A node
    keeps its number."""
    meeting = Meeting(2, 3)
    meeting.join(0)
    old = meeting.join(None, "host1")
    assert meeting.number == 1
    meeting.join(1, "host1", fixed=False)
    assert "another launcher has come as node 1, on host1" in hear(old, "end")["text"]
    monkeypatch.setattr("threed.head.SILENT_S", 0.0)
    meeting.join(1, "host7")
    assert meeting.head.members[1].host == "host7"


def test_a_new_head_goes_on_with_the_run():
    """Node 0's launcher was started again; the others belong to the run already."""
    meeting = Meeting(2, 2, restarts=3)
    first, second = meeting.join(0), meeting.join(1, attempt=2, launch="the first")
    assert [(each["attempt"], each["launch"]) for each in start(first, second)] == [(2, "the first")] * 2


@pytest.mark.parametrize("bytes_", [b'{"op": "hello", "version": "1"}\n', b"[" * 60_000 + b"\n",
                                    b'{"op": "hello", "version": "1", "node": "one"}\n', b'{"op": "done"}\n',
                                    b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_no_launcher(bytes_):
    """A connection that is not a launcher's is closed, and the others go on."""
    meeting = Meeting(2, 2)
    first = meeting.join(0)
    with socket.create_connection(("127.0.0.1", meeting.nodes.port)) as other:
        other.sendall(bytes_)
        other.settimeout(5)
        assert other.recv(100) == b""
    start(first, meeting.join(1))


def test_enough_nodes_at_the_limit():
    """Enough nodes, but fewer than the maximum, which have not settled when the time is up: the run
    begins."""
    meeting = Meeting(2, 4, limit_s=1.0)
    meeting.head.settle_s = 60.0
    first = meeting.join(0)
    start(first, meeting.join(1))


def test_a_disk_that_does_not_answer(monkeypatch):
    """Nobody learns of the newest checkpoint: all are told to end at once, and start again."""
    monkeypatch.setattr("threed.head.CLEAR_S", 1.0)
    meeting = Meeting(2, 2, restarts=1)
    meeting.head.newest = lambda: time.sleep(60) or ""
    first, second = meeting.join(0), meeting.join(1)
    start(first, second)
    fail(second, -9)
    for line in (first, second):
        hear(line, "clear")
        line.send("cleared", asked=False)
    assert [each["attempt"] for each in start(first, second)] == [1, 1]


def test_the_interface_is_chosen_anew_at_each_start(monkeypatch):
    """By a rank: what the launcher's first start chose does not bind the next."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert interface_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "eth7"}
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    assert interface_variables("127.0.0.1")["NCCL_SOCKET_IFNAME"] == "=lo", "lo would be the beginning of a name"
    with pytest.raises(InputError, match="LOCAL_ADDR=myhost must be an IP address"):
        interface("myhost")
    assert route("a..b", 1) is None and not is_here("a..b")


def test_many_nodes_at_once():
    """One connection taken at each look at all connections: a thousand nodes took 9 s."""
    class Late(Head):
        looks = 0

        def _gather(self) -> None:
            Late.looks += 1
            super()._gather()

    listener, count = listen(0), 200
    nodes = Nodes(count, count, 0, 2, "127.0.0.1", listener.getsockname()[1])
    lines = [Line(socket.create_connection(("127.0.0.1", nodes.port))) for _ in range(count)]
    for node, line in enumerate(lines):
        line.send("hello", version="1", job="", nodes=[count, count], node=node, host=f"host{node}", size=8,
                  attempt=0, launch="", id=str(node), fixed=True, **{"from": "127.0.0.1"})
    head = Late(listener, nodes, 20.0, Restarts(0, 0.1), lambda: "", "1", FakeStore)
    threading.Thread(target=head.run, daemon=True).start()
    try:
        assert hear(lines[0], "prepare")["world"] == 8 * count and Late.looks < 20
    finally:
        for line in lines:
            line.close()
        head.state = State.OVER

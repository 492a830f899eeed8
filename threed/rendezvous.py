"""Rendezvous: how the launchers of several nodes reach the head of the run (`head`), and over which
addresses. No torch.

Every launcher, node 0's too, keeps one connection to the head, over which lines of JSON go both ways:

    to the head      hello   prepared   done   failed   cleared   stopped   alive
    to a launcher    welcome   refused   wait   prepare   start   clear   end   alive

All waits have a limit: `run.connect_timeout_s` for the head, SILENCE_S for a message from a peer.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

import psutil

from threed.environment import Nodes
from threed.errors import InputError, RunError

ALIVE_S = 2.0  # between two messages `alive` of a peer that has nothing else to say
# a peer that is silent for longer has gone; less may be a loose cable, or TCP that resends
SILENCE_S = 30.0
REPORT_S = 10.0  # between two lines on the console of a process that waits
CONNECT_S = 5.0  # one attempt to connect
POLL_S = 0.25  # between two looks into the store in which ranks meet
FAILURE = "threed/failure"  # key of that store: the note of the first rank that fails
_UNKNOWN = (OSError, UnicodeError)  # of a name that does not resolve, or cannot be one


def readable(*sockets: Any, wait_s: float) -> bool:
    """Whether a socket has something to read within `wait_s`. (poll, because select is limited to 1,024
    files.)"""
    poll = select.poll()
    for one in sockets:
        poll.register(one, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))


class Line:
    """A connection that carries messages."""

    def __init__(self, connection: socket.socket):
        self.socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(CONNECT_S)
        self.lost: str | None = None  # why the connection is of no more use
        self.foreign = False  # whether the other end is another program than threed
        self._text = b""
        self._unread: list[dict[str, Any]] = []
        self._heard = self._said = time.monotonic()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, op: str, **values: Any) -> None:
        try:
            self.socket.sendall(json.dumps({"op": op, **values}).encode() + b"\n")
            self._said = time.monotonic()
        except OSError as error:
            self.lost = self.lost or f"the connection broke ({error.strerror or error})"

    def receive(self) -> list[dict[str, Any]]:
        """Messages that have come. Also tells the peer that this end is alive, and notices a peer that is
        not."""
        messages, self._unread = self._unread, []
        try:
            while self.lost is None and readable(self, wait_s=0):
                data = self.socket.recv(65536)
                if not data:
                    self.lost = "the connection was closed"
                    break
                self._heard = time.monotonic()
                *lines, self._text = (self._text + data).split(b"\n")
                read = [json.loads(line) for line in lines]
                if len(self._text) > 2**24 or not all(isinstance(message, dict) and "op" in message
                                                      for message in read):
                    raise ValueError
                messages += read
        except OSError as error:
            self.lost = f"the connection broke ({error.strerror or error})"
        except (ValueError, RecursionError):
            self.lost, self.foreign = "it does not speak as threed", True
        now = time.monotonic()
        if self.lost is None and now - self._heard > SILENCE_S:
            self.lost = f"no sign of life for {SILENCE_S:g} s: it is off, frozen or cut off"
        if self.lost is None and now - self._said > ALIVE_S:
            self.send("alive")
        return [message for message in messages if message["op"] != "alive"]

    @property
    def silent_s(self) -> float:
        """Seconds since the peer's last message."""
        return time.monotonic() - self._heard

    def wait(self, limit_s: float) -> dict[str, Any] | None:
        """The next message; None if none came."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until and (self.lost is None or self._unread):
            if (self._unread or readable(self, wait_s=0.1)) and (messages := self.receive()):
                self._unread = messages[1:] + self._unread
                return messages[0]
        return None

    def close(self) -> None:
        self.socket.close()


# ---------------------------------------------------------------- addresses


def plain(address: str) -> str:
    """Drop an IPv6 scope, and turn ::ffff:a.b.c.d into a.b.c.d."""
    bare = address.partition("%")[0]
    try:
        mapped = getattr(ipaddress.ip_address(bare), "ipv4_mapped", None)
    except ValueError:
        return bare
    return str(mapped) if mapped else bare


def is_address(text: str) -> bool:
    """Whether it is an IP address, not a name."""
    try:
        ipaddress.ip_address(plain(text))
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(plain(address)).is_loopback


def own_addresses() -> dict[str, str]:
    """Address -> interface of this machine."""
    return {plain(entry.address): name for name, entries in psutil.net_if_addrs().items() for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)}


def interface(address: str) -> str:
    """The interface that has an address of this machine."""
    own = own_addresses()
    if not is_address(address):
        raise InputError(f"LOCAL_ADDR={address} must be an IP address of {socket.gethostname()}, not a name")
    if is_loopback(address):  # 127.0.1.1 is on lo as well, where no interface lists it
        return own.get("127.0.0.1", "lo")
    if plain(address) not in own:
        listed = ", ".join(f"{a} ({name})" for a, name in own.items() if not is_loopback(a))
        raise InputError(f"LOCAL_ADDR={address} is no address of {socket.gethostname()}, which has "
                         f"{listed or 'loopback alone'}")
    return own[plain(address)]


def route(address: str, port: int) -> str | None:
    """This machine's own address on the route to another; None where no route exists. Nothing is sent."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return plain(probe.getsockname()[0])
    except _UNKNOWN:
        return None


def interface_variables(address: str) -> dict[str, str]:
    """The environment variables that tell a rank's Gloo and NCCL which interface leads to the other nodes: by
    default they use the address of the host's own name, or any. `address`: this host's on that interface.

    Gloo takes a name as it is. NCCL takes it as a prefix (eth1 is eth10, too), unless "=" stands before it
    (NCCL's user guide, "Environment Variables").
    """
    name, chosen = interface(address), {}
    for variable, exactly in (("GLOO_SOCKET_IFNAME", name), ("NCCL_SOCKET_IFNAME", f"={name}")):
        chosen[variable] = os.environ.get(variable, exactly)
        if chosen[variable].lstrip("=") == "lo" and not is_loopback(address):
            raise InputError(f"{variable}={chosen[variable]} on {socket.gethostname()} is loopback, and "
                             "other nodes are on other hosts: unset it, or name the interface that leads to "
                             f"them ({name}, {address})")
    return chosen


def meet(store: Any, rank: int, world_size: int, master: tuple[str, int]) -> None:
    """Choose the interface of a rank that torchrun or srun has started: the one on the route to `master`, or,
    if that is this host, the one on the route to a rank of another host. Ranks tell each other their
    addresses in `store`. RunError where a rank does not, InputError where two have one number."""
    host = socket.gethostname()
    if store.add(f"threed/rank/{rank}", 1) > 1:
        raise InputError(f"RANK={rank} in the environment of two processes, the second on {host}: each has a "
                         f"number of its own, 0 to {world_size - 1}")
    own = os.environ.get("LOCAL_ADDR") or route(*master) or "127.0.0.1"
    store.set(f"threed/address/{rank}", json.dumps([host, own]))
    if is_loopback(own):
        others = [json.loads(text) for text in _addresses(store, world_size)]
        far = next((address for _, address in others if not is_loopback(address)), None)
        own = route(far, master[1]) or own if far is not None else own
        if is_loopback(own) and len({name for name, _ in others}) > 1:
            raise InputError(f"MASTER_ADDR={master[0]} is loopback on {host}, and there are ranks on other "
                             "hosts: set it to an address of node 0 that all others reach, or set LOCAL_ADDR "
                             "to this host's own")
    os.environ.update(interface_variables(own))


def _addresses(store: Any, world_size: int) -> list[bytes]:
    keys = [f"threed/address/{rank}" for rank in range(world_size)]
    until = time.monotonic() + store.timeout.total_seconds()
    try:
        while not store.check(keys) and time.monotonic() < until:
            if store.check([FAILURE]):
                raise RunError(json.loads(store.get(FAILURE))["message"])
            time.sleep(POLL_S)
        return [store.get(key) for key in keys]
    except RuntimeError as error:  # after the store's own limit
        why = str(error).splitlines()[0]
        try:
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:
            raise RunError("the store in which all ranks meet has gone: rank 0, or its host, has ended "
                           f"({why})") from None
        named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise RunError(f"of {world_size} ranks these did not come: {named or 'none is missing'} ({why}). Are "
                       "all nodes started?") from None


def is_here(address: str) -> bool:
    """Whether a name or address is this machine's."""
    try:
        resolved = {plain(str(info[4][0])) for info in socket.getaddrinfo(address, None)}
    except _UNKNOWN:
        return False
    return bool(resolved & set(own_addresses())) or all(is_loopback(a) for a in resolved)


def listen(port: int) -> socket.socket:
    """Listen on MASTER_PORT, on all interfaces of node 0."""
    try:
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            return socket.create_server(("", port), backlog=1024)  # a machine without IPv6
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"MASTER_PORT={port} is taken by another program on {socket.gethostname()}: end "
                             "it, or give all nodes another port") from None
        raise InputError(f"MASTER_PORT={port} cannot be used on {socket.gethostname()}: "
                         f"{error.strerror}") from None


# ---------------------------------------------------------------- a launcher's way to the head


def connect(nodes: Nodes, here: bool, limit_s: float, hello: dict[str, Any], tick: Callable[[], None],
            say: Callable[[str], None]) -> tuple[Line, int]:
    """Reach the head, which may start later, within `limit_s`. Returns the connection and this node's number.
    `here`: whether the head runs on this machine. `tick` is called before each attempt, and may raise."""
    begin = time.monotonic()
    report = begin + REPORT_S
    address = "127.0.0.1" if here else nodes.address
    while True:
        tick()
        line, node, why = _attempt(address, nodes.port, hello | {"from": nodes.local_address})
        if line is not None:
            return line, node
        now = time.monotonic()
        if now - begin > limit_s:
            raise RunError(f"node 0 did not answer within run.connect_timeout_s={limit_s:g}: {why}. "
                           f"{_hint(nodes)}")
        if now > report:
            say(f"waiting for node 0 at {address}:{nodes.port} for {now - begin:.0f} s: {why}")
            report += REPORT_S
        time.sleep(0.3)


def _hint(nodes: Nodes) -> str:
    own = route(nodes.address, nodes.port)
    if own is not None and is_loopback(own):
        return (f"MASTER_ADDR={nodes.address} leads back to {socket.gethostname()} itself: with several "
                "hosts it must be an address of node 0 that all others reach, and only node 0 has "
                "NODE_RANK=0")
    return (f"Is node 0 started, is MASTER_ADDR={nodes.address} its address, is MASTER_PORT={nodes.port} the "
            "same on all nodes, and do firewalls let nodes reach each other?")


def _attempt(address: str, port: int, hello: dict[str, Any]) -> tuple[Line | None, int, str]:
    """A connection that the head has welcomed, and the node's number; or None, 0, and why."""
    where = f"{address}:{port}"
    try:
        line = Line(socket.create_connection((address, port), CONNECT_S))
    except (socket.gaierror, UnicodeError):
        return None, 0, f"the name {address} does not resolve"
    except TimeoutError:
        return None, 0, f"nothing answers at {where}"
    except OSError as error:
        return None, 0, f"{where}: {(error.strerror or str(error)).lower()}"
    own = hello["from"] or plain(line.socket.getsockname()[0])
    line.send("hello", **hello | {"from": own})
    answer = line.wait(REPORT_S)
    if answer is not None and answer["op"] == "welcome":
        return line, answer["node"], ""
    line.close()
    if answer is not None and answer["op"] == "refused":
        raise InputError(answer["text"])
    if answer is None and not line.foreign:
        return None, 0, f"something takes connections at {where} and does not answer as threed"
    raise InputError(f"what answers at {where} is not threed: another program has this port. Give all nodes "
                     "another MASTER_PORT")

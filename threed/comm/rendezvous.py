"""Rendezvous: over which addresses and interfaces the ranks of several nodes reach each other. No torch."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil

from threed.base.console import say
from threed.base.errors import InputError, RunError

POLL_S = 0.25  # between two looks into the store in which ranks meet, or at processes
POLLS = 2000  # of the store in a second, by all ranks together
REPORT_S = 10.0  # between two lines about ranks or machines that have not come
MET = "threed/met"  # key of that store: all ranks are there
FAILURE = "threed/failure"  # key of that store: the note of the first rank that fails
_UNKNOWN = (OSError, UnicodeError)  # of a name that does not resolve, or cannot be one


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
    """Wait for all ranks, as long as the store's clients wait, and choose this rank's interface: the one on
    the route to `master`, or, if that is this host, the one on the route to a rank of another host. Ranks
    tell each other their addresses in `store`. RunError where a rank does not, InputError where two have one
    number."""
    host = socket.gethostname()
    if store.add(f"threed/rank/{rank}", 1) > 1:
        raise InputError(f"RANK={rank} in the environment of two processes, the second on {host}: each has a "
                         f"number of its own, 0 to {world_size - 1}")
    own = os.environ.get("LOCAL_ADDR") or route(*master) or "127.0.0.1"
    store.set(f"threed/address/{rank}", json.dumps([host, own]))
    keys = [f"threed/address/{rank}" for rank in range(world_size)]
    if rank == 0:
        _await(store, keys, partial(_missing, store, keys))
        store.set(MET, "")
    else:
        _await(store, [MET], None, max(POLL_S, world_size / POLLS))
    if is_loopback(own):
        others = [json.loads(text) for text in store.multi_get(keys)]
        far = next((address for _, address in others if not is_loopback(address)), None)
        own = route(far, master[1]) or own if far is not None else own
        if is_loopback(own) and len({name for name, _ in others}) > 1:
            raise InputError(f"MASTER_ADDR={master[0]} is loopback on {host}, and there are ranks on other "
                             "hosts: set it to an address of node 0 that all others reach, or set LOCAL_ADDR "
                             "to this host's own")
    os.environ.update(interface_variables(own))


def _await(store: Any, keys: list[str], missing: Callable[[], str] | None, poll_s: float = POLL_S) -> None:
    """Wait until keys are in the store. RunError where another rank has failed, or after the store's limit.
    `missing`: who has not come, which is said from time to time; None: rank 0 says it."""
    begin, limit_s, report_s = time.monotonic(), store.timeout.total_seconds(), REPORT_S
    while not store.check(keys):
        if store.check([FAILURE]):
            raise RunError(json.loads(store.get(FAILURE))["message"])
        waited_s = time.monotonic() - begin
        if waited_s > limit_s + (0.0 if missing else REPORT_S):
            what = missing() if missing else "rank 0 did not say that all ranks are there"
            raise RunError(f"{what} within run.connect_timeout_s={limit_s:g}. Are all nodes started?")
        if missing and waited_s > report_s:
            say(f"{missing()} after {waited_s:.0f} of {limit_s:g} s")
            report_s += REPORT_S
        time.sleep(poll_s)


def _missing(store: Any, keys: list[str]) -> str:
    """Which ranks have not come."""
    missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
    named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"of {len(keys)} ranks these did not come: {named or 'none is missing'}"


def is_here(address: str) -> bool:
    """Whether a name or address is this machine's."""
    try:
        resolved = {plain(str(info[4][0])) for info in socket.getaddrinfo(address, None)}
    except _UNKNOWN:
        return False
    return bool(resolved & set(own_addresses())) or all(is_loopback(a) for a in resolved)

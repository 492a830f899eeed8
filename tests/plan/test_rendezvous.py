"""Addresses and interfaces over which ranks reach each other."""

from __future__ import annotations

import os

import pytest

from threed.base.errors import InputError
from threed.comm.rendezvous import interface, interface_variables, is_here, is_loopback, plain, route


def test_addresses():
    assert plain("::ffff:10.0.0.1") == "10.0.0.1" and plain("fe80::1%eth0") == "fe80::1"
    assert is_loopback("127.0.1.1") and is_loopback("::ffff:127.0.0.1") and not is_loopback("10.0.0.1")
    assert interface("127.0.1.1") == interface("127.0.0.1") == "lo"
    assert route("127.0.0.1", 1) == "127.0.0.1" and is_here("127.0.0.1") and not is_here("192.0.2.1")
    with pytest.raises(InputError, match=r"LOCAL_ADDR=192\.0\.2\.1 is no address of"):
        interface("192.0.2.1")


def test_the_interface_is_chosen_anew_at_each_start(monkeypatch):
    """By a rank: what the launcher's first start chose does not bind the next."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    assert interface_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "eth7"}
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    assert interface_variables("127.0.0.1")["NCCL_SOCKET_IFNAME"] == "=lo"  # lo is the beginning of a name
    with pytest.raises(InputError, match="LOCAL_ADDR=myhost must be an IP address"):
        interface("myhost")
    assert route("a..b", 1) is None and not is_here("a..b")

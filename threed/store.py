"""Stores for ranks of several machines: where they meet before they can communicate, and report failures."""

from __future__ import annotations

import datetime
import os
import socket
from typing import Any

import torch.distributed as dist

from threed.errors import RunError

REACH_S = 30.0  # how long to try to reach a store that is being served already


def serve_store() -> Any:
    """A store for ranks of several machines, which this process serves on `.port`."""
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def tcp_store(address: str, port: int, timeout_s: float) -> Any:
    """A client of the store that a process of node 0 serves. RuntimeError where it cannot be reached;
    `timeout_s` is for answers."""
    store = dist.TCPStore(address, port, None, False, datetime.timedelta(seconds=min(REACH_S, timeout_s)))
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    return store


def environment_store(timeout_s: float) -> Any:
    """The store where ranks meet under torchrun and srun, at the address in the environment."""
    try:
        return next(iter(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s))))[0]
    except (RuntimeError, ValueError) as error:  # its text has pages of C++ frames after the first line
        where = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
        raise RunError(f"rank {os.environ.get('RANK')} on {socket.gethostname()} cannot meet the others at "
                       f"{where} within run.connect_timeout_s={timeout_s:g}: "
                       f"{str(error).splitlines()[0]}") from None

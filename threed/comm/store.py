"""The store of ranks of several machines: where they meet before they can communicate, and report
failures."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from threed.base.errors import RunError

STARTS = "threed/starts"  # the key of the number of starts so far
LOOK_S = 0.5  # between a guard's looks
HELLO_S, HELLOS = 0.1, 1000  # a rank says hello so often; all together, so many in a second


def store_at(address: str, port: int, prefix: str, timeout_s: float) -> Any:
    """Another client of a start's store. RuntimeError where it does not answer within `timeout_s`."""
    limit = datetime.timedelta(seconds=timeout_s)
    return dist.PrefixStore(prefix, dist.TCPStore(address, port, None, False, limit))


def of_this_start(store: Any, rank: int, size: int, timeout_s: float) -> str:
    """The prefix of the keys in the store that all ranks of this start share. torchrun's agents use one store
    for all starts, so after a restart it still has the keys of the start before, such as why it failed.

    Rank 0 counts the starts, and answers the other ranks. Every other rank writes a hello under the newest
    start until rank 0 answers it; if rank 0 begins another start, the rank writes its hello there. A start
    that has all its ranks, or that has ended, answers nobody. Raises RuntimeError if no answer arrives within
    `timeout_s`.
    """
    own, until = uuid.uuid4().hex, time.monotonic() + timeout_s
    if rank == 0:
        prefix = f"threed/start/{store.add(STARTS, 1)}"
        if size > 1:
            here = dist.PrefixStore(prefix, store)
            threading.Thread(target=_answer, args=(here, size, until), name="hello", daemon=True).start()
        return prefix
    while time.monotonic() < until:
        prefix = f"threed/start/{store.add(STARTS, 0)}"
        here = dist.PrefixStore(prefix, store)
        if here.check([f"answer/{rank}"]) and here.get(f"answer/{rank}") == own.encode():
            return prefix
        here.set(f"hello/{rank}", own)  # again and again: another process may say that it has this number
        time.sleep(max(HELLO_S, size / HELLOS))
    raise RuntimeError(f"rank 0 has not answered for {timeout_s:g} s")


def _answer(here: Any, size: int, until: float) -> None:
    """Answer each hello until all ranks have come: also a second one of a rank, for two processes that have
    one number are told so when ranks exchange their addresses. A rank that comes later replaces one that has
    ended, and waits for the next start."""
    here, answered = here.clone(), dict.fromkeys(range(1, size), b"")
    with contextlib.suppress(RuntimeError):  # the store has gone
        while time.monotonic() < until and not all(answered.values()):
            for rank, last in answered.items():
                if here.check([f"hello/{rank}"]) and (hello := here.get(f"hello/{rank}")) != last:
                    here.set(f"answer/{rank}", hello.decode())
                    answered[rank] = hello
            time.sleep(HELLO_S)


class Guard:
    """Calls `gone` where a store has not answered for `limit_s`: its clients wait without a limit for a
    machine that is off. Looks are counted, and not seconds: a job that was suspended goes on."""

    def __init__(self, limit_s: float, gone: Callable[[], None]):
        self._limit_s, self._gone = limit_s, gone
        self._silent, self._closed = 0, threading.Event()

    def begin(self, store: Any) -> None:
        if hasattr(store, "clone"):  # else its one client is locked while it waits (torch 2.7)
            for body in (self._look, self._count):
                threading.Thread(target=body, args=(store,), daemon=True, name="guard").start()

    def close(self) -> None:
        self._closed.set()

    def _look(self, store: Any) -> None:
        try:
            own = own_client(store)
            while not self._closed.wait(LOOK_S):
                own.check([STARTS])
                self._silent = 0
        except RuntimeError:  # the store has gone, which a client that waits sees too
            self.close()

    def _count(self, store: Any) -> None:
        while not self._closed.wait(LOOK_S):
            self._silent += 1
            if self._silent * LOOK_S > self._limit_s:
                self._gone()
                return


def own_client(store: Any) -> Any:
    """A second client of a store. (torch 2.7 cannot clone a client: then it is the same one.)"""
    return store.clone() if hasattr(store, "clone") else store


def environment_store(timeout_s: float, connected: Callable[[Any], None]) -> tuple[Any, str]:
    """The store where ranks meet under torchrun and srun, at the address in the environment, with the keys of
    this start alone; and their prefix. `connected` is called with the store, before others are awaited."""
    try:
        store = next(iter(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout_s))))[0]
        connected(store)
        prefix = of_this_start(store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout_s)
        return dist.PrefixStore(prefix, store), prefix
    except (RuntimeError, ValueError) as error:  # its text has pages of C++ frames after the first line
        where = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
        raise RunError(f"rank {os.environ.get('RANK')} on {socket.gethostname()} cannot meet the others at "
                       f"{where} within run.connect_timeout_s={timeout_s:g}: "
                       f"{str(error).splitlines()[0]}") from None

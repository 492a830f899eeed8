"""Heartbeat: ranks see that another machine is off, frozen or cut off, and that another process was killed,
where no launcher of threed's sees it.

The first rank of each machine gives signs of life in the store where ranks meet, and rank 0 looks for them.
Silence is counted in looks, not by the clock: a job that is suspended as a whole goes on afterwards.

On each machine, a rank watches the process of the next one, and the last one that of the first. A process
that ends says so in the store, or why it fails, unless it was killed.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from pathlib import Path
from typing import Any

from threed.comm.environment import RankPlace

SIGN_S = 2.0  # between two signs of life; as often, rank 0 looks for those of all machines
SILENCE_S = 30.0  # less may be a loose cable, or TCP that resends
WORD_S = 0.5  # grace for the launcher, which knows by which signal a rank was killed, to report first
MACHINES = "threed/machines"  # key: a line for each machine that has begun, its first rank and its name
NAMED = 4  # of several machines that have gone at once
LEFT = "left"  # the last sign of life


class Machines:
    """Signs of life of machines, for the first rank of one of them."""

    def __init__(self, place: RankPlace, poll_s: float):
        """`poll_s`: the time from one call of `look` to the next, at least."""
        self._rank, self._every_s = place.rank, max(SIGN_S, poll_s)
        self._signs = 0
        self._next_s = time.monotonic()
        self._names: dict[int, str] = {}  # first rank of each other machine -> name
        self._silent: dict[int, tuple[bytes, int]] = {}  # first rank -> (its last sign, looks since that)

    def look(self, store: Any) -> str | None:
        """Where it is time to, give a sign of life, or on rank 0 look for those of the others. Returns in
        words which machines have gone; None where none has."""
        now = time.monotonic()
        if now < self._next_s:
            return None
        self._next_s = now + self._every_s
        if self._rank == 0:
            return self._gone(store)
        store.set(_sign_of(self._rank), str(self._signs))
        if not self._signs:
            store.append(MACHINES, f"{self._rank} {socket.gethostname()}\n")
        self._signs += 1
        return None

    def leave(self, store: Any) -> None:
        """Give the last sign of life: this machine's ranks end."""
        store.set(_sign_of(self._rank), LEFT)

    def _gone(self, store: Any) -> str | None:
        if not store.check([MACHINES]):  # no other machine has begun
            return None
        lines = store.get(MACHINES).decode().splitlines()
        self._names = {int(rank): name for rank, name in (line.split(" ", 1) for line in lines)}
        limit, gone = SILENCE_S / self._every_s, []
        signs = store.multi_get([_sign_of(rank) for rank in self._names])
        for rank, sign in zip(self._names, signs, strict=True):
            last, looks = self._silent.get(rank, (b"", 0))
            looks = looks + 1 if sign == last and sign != LEFT.encode() else 0
            self._silent[rank] = sign, looks
            if looks >= limit:
                gone.append(self._names[rank])
        if not gone:
            return None
        who, what = f"{gone[0]} has", "it is"
        if len(gone) > 1:
            who, what = f"{', '.join(gone[:-1][:NAMED])} and {_others(gone)} have", "they are"
        return f"{who} gone: no sign of life for {SILENCE_S:g} s: {what} off, frozen or cut off"


def _others(names: list[str]) -> str:
    """The last name, or how many there are after those that are named."""
    return names[-1] if len(names) <= NAMED + 1 else f"{len(names) - NAMED} more"


def _sign_of(rank: int) -> str:
    return f"threed/sign/{rank}"


class Neighbour:
    """The next rank on this machine, as a process. Where its process cannot be seen from here, such as in
    another container, nothing is watched."""

    def __init__(self, place: RankPlace):
        step = 1 if place.local_rank + 1 < place.local_size else 1 - place.local_size
        self._mine, self._rank = place.rank, place.rank + step
        self._where = f" on {socket.gethostname()}" if place.local_size < place.world_size else ""
        self._told = self._known = False
        self._process: int | None = None  # a descriptor of the process
        self._ended_s: float | None = None  # since when it has ended

    def look(self, store: Any) -> str | None:
        """Say once, in words, that the neighbour was killed. None where it was not."""
        if not self._told:
            store.set(_process_of(self._mine), json.dumps(_identity(os.getpid())))
            self._told = True
        if not self._known:
            if not store.check([_process_of(self._rank)]):
                return None
            self._known = True
            self._open(json.loads(store.get(_process_of(self._rank))))
        if self._process is not None and _has_ended(self._process):
            os.close(self._process)
            self._process, self._ended_s = None, time.monotonic()
        if self._ended_s is None or time.monotonic() - self._ended_s < WORD_S:
            return None
        self._ended_s = None
        if store.check([_left(self._rank)]):
            return None
        return f"rank {self._rank}{self._where} was killed: its process has ended without a word"

    def leave(self, store: Any) -> None:
        """Say that this rank ends."""
        store.set(_left(self._mine), "")

    def _open(self, identity: list[Any] | None) -> None:
        mine = _identity(os.getpid())
        if identity is None or mine is None or identity[0] != mine[0]:  # on another machine, or unseen
            return
        try:
            self._process = os.pidfd_open(identity[1])
        except ProcessLookupError:
            self._ended_s = time.monotonic()
            return
        except OSError:  # a kernel or a sandbox without such descriptors
            return
        if _identity(identity[1]) != identity:  # a new process has the number
            os.close(self._process)
            self._process, self._ended_s = None, time.monotonic()


def _process_of(rank: int) -> str:
    return f"threed/process/{rank}"


def _left(rank: int) -> str:
    return f"threed/left/{rank}"


def _has_ended(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _identity(pid: int) -> list[Any] | None:
    """(machine and namespace of process numbers, number, start) of a process; None where /proc does not say.
    Equal for one process alone."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return [f"{boot} {os.readlink('/proc/self/ns/pid')}", pid, start]
    except (OSError, IndexError):
        return None

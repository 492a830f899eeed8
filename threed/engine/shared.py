"""What all hosts must share: before the first step every rank proves that it sees the prepared data and the
run's folder.

A folder that only looks the same, because each host has one of that name, would take a run to its end without
a checkpoint.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
import zlib
from pathlib import Path

from threed.comm import Comm
from threed.data.tokens import Prepared
from threed.errors import InputError, of_folder

PATIENCE_S = 60.0  # at most: a network file system shows a new file after a while
_ENDS = 2**16  # bytes at each end of a file that are compared


def hosts(comm: Comm) -> list[str]:
    """The name of each rank's host."""
    return comm.exchange(socket.gethostname())


def same_data(comm: Comm, prepared: Prepared, names: list[str]) -> None:
    """Every rank has the data that rank 0 has, where rank 0 has it."""
    seen = comm.exchange(_identity(prepared.prefix))
    if wrong := [rank for rank, value in enumerate(seen) if value != seen[0]]:
        reasons = {names[rank]: _difference(seen[rank], seen[0]) for rank in wrong}
        where = "; ".join(f"on {host} {reason}" for host, reason in reasons.items())
        raise InputError(f"the prepared data {prepared.prefix}.bin of rank 0 on {names[0]} is not the same "
                         f"everywhere: {where}. "
                         "data.cache (or data.source, for Megatron data) must be a folder that all hosts "
                         "share; or make the "
                         "data on each ahead of the run, by threed data CONFIG")


def _difference(mine: tuple[int, ...], first: tuple[int, ...]) -> str:
    if mine[0] < 0:
        return "it is missing"
    return f"it has {mine[0]} bytes, not {first[0]}" if mine[0] != first[0] else "its content is another"


def _identity(prefix: Path) -> tuple[int, ...]:
    """Sizes and checksums of both ends of the tokens and of their index; (-1,) where they are not there."""
    found: list[int] = []
    try:
        for suffix in (".bin", ".idx"):
            with open(f"{prefix}{suffix}", "rb") as file:
                size = file.seek(0, os.SEEK_END)
                for start in (0, max(0, size - _ENDS)):
                    file.seek(start)
                    found += [size, zlib.crc32(file.read(_ENDS))]
    except OSError:
        return (-1,)
    return tuple(found)


def same_folder(comm: Comm, folder: Path, names: list[str], timeout_s: float) -> None:
    """Every rank reads back what rank 0 has just written into `folder`, which rank 0 has made. `timeout_s`:
    after which a rank that waits for another ends the run."""
    patience_s = min(PATIENCE_S, timeout_s / 10)
    file, token = folder / f".seen-{uuid.uuid4().hex}", uuid.uuid4().hex
    if comm.rank == 0:
        try:
            for left in folder.glob(".seen-*"):  # by a start that was killed here: this one holds the folder
                left.unlink(missing_ok=True)
            file.write_text(token)
        except OSError as error:
            raise of_folder(f"run.dir={folder} cannot be written on {names[0]}: {error.strerror}",
                            error) from None
    file, token = comm.broadcast((file, token))
    try:
        everywhere = comm.exchange(_sees(file, token, patience_s))
    finally:
        if comm.rank == 0:
            file.unlink(missing_ok=True)
    if blind := sorted({host for host, sees in zip(names, everywhere, strict=True) if not sees}):
        raise InputError(f"run.dir={folder} is not the same folder on {', '.join(blind)} as on {names[0]} "
                         f"(rank 0): what rank 0 "
                         f"wrote there was not seen for {patience_s:g} s. Give a folder on a file system "
                         f"that all hosts share, "
                         "at the same path everywhere")


def _sees(file: Path, token: str, patience_s: float) -> bool:
    until = time.monotonic() + patience_s
    while True:
        try:
            os.listdir(file.parent)  # has a network file system look again
            if file.read_text() == token:
                return True
        except OSError:
            pass
        if time.monotonic() > until:
            return False
        time.sleep(0.25)

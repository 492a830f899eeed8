"""Shared files: before the first step, check that every host sees the same prepared data and run.dir. One
rank of each host looks: thousands that read one file at one time are hard on a file system.

If each host had a folder of its own under the same name, a run would reach its end without a checkpoint that
can be used.
"""

from __future__ import annotations

import os
import time
import uuid
import zlib
from pathlib import Path

from threed.base.errors import InputError, of_folder
from threed.comm.group import Comm
from threed.data.tokens import Prepared

PATIENCE_S = 60.0  # at most: a network file system may show a new file late
_ENDS = 2**16  # bytes at each end of a file that are compared


def same_data(comm: Comm, prepared: Prepared, names: list[str], looks: bool) -> None:
    """InputError unless every host has rank 0's data at the same path. `names`: the host of each rank.
    `looks`: whether this rank looks for its host."""
    for part in prepared.parts:
        _same(comm, part.prefix, names, looks)


def _same(comm: Comm, prefix: Path, names: list[str], looks: bool) -> None:
    seen = comm.all_gather(_identity(prefix) if looks else None)
    if wrong := [rank for rank, value in enumerate(seen) if value not in (seen[0], None)]:
        reasons = {names[rank]: _difference(seen[rank], seen[0]) for rank in wrong}
        where = "; ".join(f"on {host} {reason}" for host, reason in reasons.items())
        raise InputError(f"the prepared data {prefix}.bin of rank 0 on {names[0]} is not the same "
                         f"everywhere: {where}. data.cache (or data.source, for Megatron data) must be a "
                         "folder that all hosts share; or prepare the data on each host before the run, by "
                         "threed data CONFIG")


def _difference(mine: tuple[int, ...], first: tuple[int, ...]) -> str:
    if mine[0] < 0:
        return "it is missing"
    return f"it has {mine[0]} bytes, not {first[0]}" if mine[0] != first[0] else "its content differs"


def _identity(prefix: Path) -> tuple[int, ...]:
    """Sizes of the tokens' file, its index and, where there is one, its mask, and checksums of both ends of
    each; (-1,) if one is missing."""
    numbers: list[int] = []
    try:
        for suffix in (".bin", ".idx", *([".mask"] if os.path.exists(f"{prefix}.mask") else [])):
            with open(f"{prefix}{suffix}", "rb") as file:
                size = file.seek(0, os.SEEK_END)
                for start in (0, max(0, size - _ENDS)):
                    file.seek(start)
                    numbers += [size, zlib.crc32(file.read(_ENDS))]
    except OSError:
        return (-1,)
    return tuple(numbers)


def same_folder(comm: Comm, folder: Path, names: list[str], timeout_s: float, looks: bool) -> None:
    """InputError unless every host can read what rank 0 writes into `folder`, which exists on rank 0's host.
    `names`: the host of each rank. `timeout_s`: after it, a rank that waits for another ends the run.
    `looks`: whether this rank looks for its host."""
    patience_s = min(PATIENCE_S, timeout_s / 10)
    file, token = folder / f".seen-{uuid.uuid4().hex}", uuid.uuid4().hex
    if comm.rank == 0:
        try:
            for stale in folder.glob(".seen-*"):  # of killed starts: only this start uses the folder now
                stale.unlink(missing_ok=True)
            file.write_text(token)
        except OSError as error:
            raise of_folder(f"run.dir={folder} cannot be written on {names[0]}: {error.strerror}",
                            error) from None
    file, token = comm.broadcast((file, token))
    try:
        everywhere = comm.all_gather(not looks or _sees(file, token, patience_s))
    finally:
        if comm.rank == 0:
            file.unlink(missing_ok=True)
    if blind := sorted({host for host, sees in zip(names, everywhere, strict=True) if not sees}):
        raise InputError(f"run.dir={folder} is not the same folder on {', '.join(blind)} as on {names[0]} "
                         f"(rank 0): a file of rank 0 was not seen for {patience_s:g} s. Give a folder on a "
                         "file system that all hosts share, at the same path everywhere")


def _sees(file: Path, token: str, patience_s: float) -> bool:
    until = time.monotonic() + patience_s
    while True:
        try:
            os.listdir(file.parent)  # makes a network file system look again
            if file.read_text() == token:
                return True
        except OSError:
            pass
        if time.monotonic() > until:
            return False
        time.sleep(0.25)

"""Cache: the folders of prepared data on this machine: build one, list them, remove those not in use.

    cache/<key>/           complete; its meta.json tells what it is, and when it was last used (its time)
    cache/<key>.*.tmp/     a build, which holds the lock of its file `lock`

A process that reads tokens holds a shared lock of their meta.json, so that `clean` leaves them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from threed.base.errors import InputError
from threed.base.quantity import show_bytes, show_count
from threed.schema import DataConfig

META = "meta.json"
_OLD_S = 3600.0  # age at which a folder `*.tmp` without a lock is removed: a younger one may get a lock yet
_KEY = re.compile("[0-9a-f]{20}")
_UNITS_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def cache_root(data: DataConfig) -> Path:
    """Where prepared data are kept."""
    path = Path(data.cache or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "threed"))
    try:
        return path.expanduser()
    except RuntimeError:  # a container whose user has no entry
        raise InputError(f"{path}: this user has no home folder, and HOME is not set: set data.cache to a "
                         "folder that can be written") from None


def cannot_be_written(data: DataConfig, error: OSError) -> InputError:
    """A cache into which nothing can be written, and what to do."""
    default = "" if data.cache else " (data.cache is not set)"
    do = "make room there, or set data.cache to a folder on another disk" \
        if error.errno in (errno.ENOSPC, errno.EDQUOT) else "set data.cache to a folder that can be written"
    return InputError(f"prepared data cannot be written to {cache_root(data)}{default}: "
                      f"{error.strerror or error}; {do}")


def open_scratch(folder: Path) -> tuple[Path, TextIO]:
    """A folder to build in, and its lock."""
    while True:
        scratch = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:12]}.tmp")
        scratch.mkdir(parents=True)
        lock = (scratch / "lock").open("w")
        with contextlib.suppress(OSError):  # on a file system without locks `remove_stale` removes nothing
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (scratch / "lock").exists():  # another process may have removed it as stale before it was locked
            return scratch, lock
        lock.close()


def remove_stale(root: Path) -> None:
    """Remove the folders of killed builds: those whose lock no process holds."""
    for scratch in root.glob("*.tmp"):
        try:
            with (scratch / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(scratch, ignore_errors=True)
        except FileNotFoundError:  # no lock yet: the build was killed, or began a moment ago
            with contextlib.suppress(OSError):
                if time.time() - scratch.stat().st_mtime > _OLD_S:
                    shutil.rmtree(scratch, ignore_errors=True)
        except OSError:
            continue  # a process holds the lock, or the file system has no locks


def use(prefix: str | Path) -> TextIO | None:
    """Say that prepared tokens are in use, as long as the result is open; None where they are not of a
    cache, or the file system has no locks."""
    meta = Path(prefix).with_name(META)
    with contextlib.suppress(OSError):
        file = meta.open()
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):  # of another user
            os.utime(meta)
        return file
    return None


@dataclass(frozen=True)
class CacheEntry:
    """A set of prepared data."""

    folder: Path
    source: str
    tokenizer: str
    num_tokens: int
    size: int  # bytes
    age_s: float  # since it was last used
    in_use: bool


def entries(root: Path) -> list[CacheEntry]:
    """The prepared data in a cache, those used last first."""
    found = []
    try:
        folders = list(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{root} cannot be read as a cache of prepared data: {error.strerror or error}; set "
                         "data.cache to a folder that can be read") from None
    for folder in folders:
        if _KEY.fullmatch(folder.name) and folder.is_dir():
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                found.append(_entry(folder))
    return sorted(found, key=lambda entry: entry.age_s)


def _entry(folder: Path) -> CacheEntry:
    meta: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        value = json.loads((folder / META).read_text())
        meta = value if isinstance(value, dict) else {}
    used = (folder / META if (folder / META).exists() else folder).stat().st_mtime
    size = sum(path.stat().st_size for path in folder.iterdir())
    return CacheEntry(folder, str(meta.get("source", "? (damaged)")), str(meta.get("tokenizer", "?")),
                      meta.get("num_tokens", 0), size, max(0.0, time.time() - used), _is_used(folder))


def _is_used(folder: Path) -> bool:
    with contextlib.suppress(OSError), (folder / META).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def clean(root: Path, age_s: float) -> tuple[list[CacheEntry], list[CacheEntry]]:
    """Remove prepared data that were not used for `age_s`, and killed builds. Returns (removed, what would be
    old enough and is in use)."""
    remove_stale(root)
    old = [entry for entry in entries(root) if entry.age_s >= age_s]
    for entry in old:
        if not entry.in_use:
            aside = entry.folder.with_name(f"{entry.folder.name}.{uuid.uuid4().hex[:12]}.tmp")
            try:
                entry.folder.rename(aside)  # no start finds half of it
            except OSError as error:
                raise InputError(f"{entry.folder} cannot be removed: {error.strerror or error}") from None
            shutil.rmtree(aside, ignore_errors=True)
    return [entry for entry in old if not entry.in_use], [entry for entry in old if entry.in_use]


def parse_age(text: str) -> float:
    """'30d' -> seconds. InputError for anything else than a number and m, h, d or w, or 0."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([mhdw])", text.strip())
    if text.strip() != "0" and match is None:
        raise InputError(f"'{text}' is not an age; write for example 30d, 12h or 0 (all that is not in use)")
    return float(match[1]) * _UNITS_S[match[2]] if match else 0.0


def _show_age(age_s: float) -> str:
    unit = next((unit for unit in ("d", "h") if age_s >= _UNITS_S[unit]), "m")
    return f"{age_s / _UNITS_S[unit]:.0f}{unit}"


def show(root: Path, found: list[CacheEntry]) -> str:
    """A table of prepared data."""
    lines = [f"{'size':>10}  {'tokens':>8}  {'unused for':>10}  source (tokenizer), folder in {root}"]
    for entry in found:
        age = "in use" if entry.in_use else _show_age(entry.age_s)
        lines.append(f"{show_bytes(entry.size):>10}  {show_count(entry.num_tokens):>8}  {age:>10}  "
                     f"{entry.source} ({entry.tokenizer}), {entry.folder.name}")
    total = show_bytes(sum(entry.size for entry in found))
    return "\n".join([*lines, f"{total:>10}  in all"]) if found else f"{root} holds no prepared data"


def show_cleaned(root: Path, removed: list[CacheEntry], kept: list[CacheEntry]) -> str:
    """What `clean` has done."""
    lines = [f"removed {entry.folder} ({entry.source}), {show_bytes(entry.size)}" for entry in removed]
    lines += [f"kept {entry.folder} ({entry.source}): in use" for entry in kept]
    total = show_bytes(sum(entry.size for entry in removed))
    return "\n".join([*lines, f"{total} freed"]) if lines else f"{root} holds nothing that old"

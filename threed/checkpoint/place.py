"""Place: a folder or a store where copies of checkpoints are kept."""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from threed.base.address import local_path
from threed.base.errors import InputError
from threed.base.files import sync, write_whole
from threed.checkpoint.format import (
    INDEX,
    LATEST,
    MANIFEST,
    REPLACED,
    Unusable,
    step_of,
)
from threed.checkpoint.lineage import parse_latest
from threed.checkpoint.manifest import unseal_data
from threed.checkpoint.shard_file import Parts, check

COPYING = ".copying.tmp"  # suffix of a copy that is not complete yet


class Store:
    """A place for copies. A failure is an OSError, or an exception of the store's own library."""

    def __init__(self, address: str):
        from fsspec.core import url_to_fs

        self.address, self.is_folder = address.rstrip("/"), local_path(address) is not None
        self._fs, root = url_to_fs(address, skip_instance_cache=True)
        self._root = root.rstrip("/")

    def names(self) -> tuple[list[str], list[str]]:
        """Names of the checkpoints in this place, the newest first: the complete ones, and the incomplete
        ones that interrupted copies left."""
        self._fs.invalidate_cache()
        try:
            paths = [entry["name"].rstrip("/") for entry in self._fs.ls(self._root, detail=True)]
        except FileNotFoundError:
            return [], []
        names = (Path(path).name for path in paths if step_of_copy(path) >= 0)
        steps = sorted(names, key=step_of_copy, reverse=True)
        complete = [name for name in steps if not name.endswith(".tmp") and self.has(name, MANIFEST)]
        return complete, [name for name in steps if name not in complete]

    def newest(self) -> Iterator[str]:
        """Complete checkpoints of the lineage that `latest` names, the newest first; all complete checkpoints
        if there is no `latest`."""
        complete, _ = self.names()
        _, lineage = parse_latest(self.read(LATEST) or b"")
        owners = ((name, self.owner(name)) for name in complete)
        return (name for name, owner in owners
                if lineage is None or lineage.may_have(owner, step_of_copy(name)))

    def owner(self, name: str) -> str | None:
        """The name of a checkpoint's lineage; None where its manifest cannot be used."""
        try:
            return unseal_data(self._at(name), self.read(name, MANIFEST) or b"").lineage
        except InputError:
            return None

    def has(self, *names: str) -> bool:
        """Whether a file exists. (fsspec's `exists` is false also where the store does not answer.)"""
        try:
            self._fs.info(self._at(*names))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def read(self, *names: str) -> bytes | None:
        """A file's content; None where the file does not exist."""
        try:
            return self._fs.cat_file(self._at(*names))
        except FileNotFoundError:
            return None

    def write(self, text: str, *names: str) -> None:
        """Write a small file in one piece."""
        if self.is_folder:
            path = Path(self._at(*names))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text, lasting=True)
            sync(path.parent)
        else:
            self._fs.pipe_file(self._at(*names), text.encode())

    def begin(self, name: str) -> str:
        """Remove older files of this name. Returns the name under which the copy is written."""
        aside = f"{name}{COPYING}" if self.is_folder else name
        self.remove(aside)
        return aside

    def put(self, source: Path, parts: Parts, moved: Callable[[int], None], *names: str) -> None:
        """Copy a file to this place, and check the copy. `parts`: sizes and checksums of the source; `moved`
        is called with each number of bytes that was copied. Raises Unusable if the source is damaged."""
        at, size = self._at(*names), sum(size for size, _ in parts)
        if self.is_folder:
            os.makedirs(os.path.dirname(at), exist_ok=True)
            self._fs.put_file(str(source), at, callback=_meter(moved))
            sync(Path(at))
            try:
                check(Path(at), parts)
            except OSError:
                check_source(source, parts)  # raises if the source is at fault, not the copy
                raise
            return
        check_source(source, parts)
        self._fs.put_file(str(source), at, callback=_meter(moved))
        arrived = self._fs.info(at)["size"]
        if arrived != size:
            raise OSError(f"{names[-1]} has {arrived} bytes there, not {size}")
        checked = parts if names[-1] == INDEX else parts[:1]
        data, start = self._fs.cat_file(at, start=0, end=sum(size for size, _ in checked)), 0
        for size, crc in checked:
            if zlib.crc32(data[start:start + size]) != crc:
                raise OSError(f"{names[-1]} reads back otherwise than it was written")
            start += size

    def finish(self, aside: str, name: str) -> None:
        """Give a complete copy its name; it replaces an older copy of that name."""
        if not self.is_folder:
            return
        complete, final, older = (Path(self._at(each)) for each in (aside, name, f"{name}{REPLACED}"))
        sync(complete)
        if final.exists():
            shutil.rmtree(older, ignore_errors=True)
            os.replace(final, older)
        try:
            os.replace(complete, final)
        except OSError:
            with contextlib.suppress(OSError):
                os.replace(older, final)
            raise
        sync(final.parent)
        shutil.rmtree(older, ignore_errors=True)

    def get(self, target: Path, moved: Callable[[int], None], *names: str) -> None:
        self._fs.get_file(self._at(*names), str(target), callback=_meter(moved))

    def remove(self, name: str) -> None:
        """Remove a copy, complete or not. Its manifest is removed first."""
        for path, recursive in ((self._at(name, MANIFEST), False), (self._at(name), True)):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(path, recursive=recursive)

    def _at(self, *names: str) -> str:
        return "/".join((self._root, *names))


def _meter(moved: Callable[[int], None]) -> Any:
    from fsspec.callbacks import Callback

    return type("Meter", (Callback,), {"relative_update": lambda self, inc=1: moved(int(inc))})()


def step_of_copy(name: str) -> int:
    """The step of a copy, also of one that is incomplete or being replaced; -1 for other names."""
    return step_of(Path(Path(name).name.removesuffix(COPYING).removesuffix(REPLACED)))


def reason(error: Exception) -> str:
    """The message of a store's or a disk's failure, on one line."""
    text = " ".join(str(error).split()) or "no reason was given"
    return text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"


def check_source(path: Path, parts: Parts) -> None:
    """Unusable where a file of a checkpoint does not have the sizes and checksums of its manifest and
    index."""
    try:
        check(path, parts)
    except FileNotFoundError:
        raise
    except OSError as error:
        damaged = error.errno is None
        what = f"is damaged: {error}" if damaged else f"cannot be read: {path.name}: {error.strerror}"
        raise Unusable(path.parent, what) from None

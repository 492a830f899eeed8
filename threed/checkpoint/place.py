"""Place: a folder or a store where copies of checkpoints are kept."""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from threed.address import local_path
from threed.checkpoint.format import (
    INDEX,
    LATEST,
    MANIFEST,
    Unusable,
    replace_text,
    step_of,
    sync,
    unseal_data,
)
from threed.checkpoint.lineage import parse_latest
from threed.checkpoint.write import Parts, check
from threed.errors import InputError

# in a folder: a copy that is not whole yet, and the one in its place
COPYING, REPLACED = ".copying.tmp", ".replaced.tmp"


class Store:
    """A place for copies. What goes wrong there is an OSError, or an exception of the store's own."""

    def __init__(self, address: str):
        from fsspec.core import url_to_fs

        self.address, self.is_folder = address.rstrip("/"), local_path(address) is not None
        self._fs, root = url_to_fs(address, skip_instance_cache=True)
        self._root = root.rstrip("/")

    def names(self) -> tuple[list[str], list[str]]:
        """Checkpoints there, the newest first: complete ones, and what copies that were cut off have left."""
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
        """Complete checkpoints of the lineage that `latest` names, the newest first; without a `latest`, all
        that there are."""
        complete, _ = self.names()
        _, lineage = parse_latest(self.read(LATEST) or b"")
        owners = ((name, self.owner(name)) for name in complete)
        return (name for name, owner in owners
                if lineage is None or lineage.may_have(owner, step_of_copy(name)))

    def owner(self, name: str) -> str | None:
        """Whose lineage a checkpoint is of; None where its manifest cannot be used."""
        try:
            return unseal_data(self._at(name), self.read(name, MANIFEST) or b"")["lineage"][0]
        except InputError:
            return None

    def has(self, *names: str) -> bool:
        """Whether a file is there. (fsspec's `exists` says no, too, where it gets no answer.)"""
        try:
            self._fs.info(self._at(*names))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def read(self, *names: str) -> bytes | None:
        """A file's content; None where there is none."""
        try:
            return self._fs.cat_file(self._at(*names))
        except FileNotFoundError:
            return None

    def write(self, text: str, *names: str) -> None:
        """A small file, there whole or not at all."""
        if self.is_folder:
            path = Path(self._at(*names))
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, text)
            sync(path.parent)
        else:
            self._fs.pipe_file(self._at(*names), text.encode())

    def begin(self, name: str) -> str:
        """Make room for a copy. Where its files go until it is whole."""
        aside = f"{name}{COPYING}" if self.is_folder else name
        self.remove(aside)
        return aside

    def put(self, source: Path, parts: Parts, moved: Callable[[int], None], *names: str) -> None:
        """Copy a file there, and check it. Unusable where it is not what it must be before."""
        at, size = self._at(*names), sum(size for size, _ in parts)
        if self.is_folder:
            os.makedirs(os.path.dirname(at), exist_ok=True)
            self._fs.put_file(str(source), at, callback=_meter(moved))
            sync(Path(at))
            try:
                check(Path(at), parts)
            except OSError:
                check_source(source, parts)  # which of the two it is
                raise
            return
        check_source(source, parts)
        self._fs.put_file(str(source), at, callback=_meter(moved))
        arrived = self._fs.info(at)["size"]
        if arrived != size:
            raise OSError(f"{names[-1]} has {arrived} bytes there, not {size}")
        looked_at = parts if names[-1] == INDEX else parts[:1]
        data, start = self._fs.cat_file(at, start=0, end=sum(size for size, _ in looked_at)), 0
        for size, crc in looked_at:
            if zlib.crc32(data[start:start + size]) != crc:
                raise OSError(f"{names[-1]} reads back otherwise than it was written")
            start += size

    def finish(self, aside: str, name: str) -> None:
        """A copy is whole: it gets its name, and takes the place of one that has it."""
        if not self.is_folder:
            return
        made, final, older = (Path(self._at(each)) for each in (aside, name, f"{name}{REPLACED}"))
        sync(made)
        if final.exists():
            shutil.rmtree(older, ignore_errors=True)
            os.replace(final, older)
        try:
            os.replace(made, final)
        except OSError:
            with contextlib.suppress(OSError):
                os.replace(older, final)
            raise
        sync(final.parent)
        shutil.rmtree(older, ignore_errors=True)

    def get(self, target: Path, moved: Callable[[int], None], *names: str) -> None:
        self._fs.get_file(self._at(*names), str(target), callback=_meter(moved))

    def remove(self, name: str) -> None:
        """A copy, or what there is of it. Its manifest goes first."""
        for path, recursive in ((self._at(name, MANIFEST), False), (self._at(name), True)):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(path, recursive=recursive)

    def _at(self, *names: str) -> str:
        return "/".join((self._root, *names))


def _meter(moved: Callable[[int], None]) -> Any:
    from fsspec.callbacks import Callback

    return type("Meter", (Callback,), {"relative_update": lambda self, inc=1: moved(int(inc))})()


def step_of_copy(name: str) -> int:
    """Of a copy, or of one that is being made or replaced."""
    return step_of(Path(Path(name).name.removesuffix(COPYING).removesuffix(REPLACED)))


def reason(error: Exception) -> str:
    """What a store or a disk says of a failure, on one line."""
    text = " ".join(str(error).split()) or "no reason was given"
    return text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"


def check_source(path: Path, parts: Parts) -> None:
    """Unusable where a file of a checkpoint is not what its manifest and its index say."""
    try:
        check(path, parts)
    except FileNotFoundError:
        raise
    except OSError as error:
        what = (
            f"is damaged: {error}"
            if error.errno is None
            else f"cannot be read: {path.name}: {error.strerror}"
        )
        raise Unusable(path.parent, what) from None

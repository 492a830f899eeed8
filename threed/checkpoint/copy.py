"""Copy: complete checkpoints to another place, a folder or a store such as s3://BUCKET/RUN, and back from
there.

    checkpoint.copy_to/             of the same format as run.dir/checkpoints
        step-00000100/              its files, its index, and last its manifest: a copy without one does not
                                    count
        latest                      name and lineage of the newest copy

Rank 0 copies on a thread, so all bytes go through its host; no step and no save waits for it. While it is
busy it takes note of the newest checkpoint only. What is at the other place is checked before the manifest
goes there: in a folder all bytes, by the checksums that the manifest and the index have of them; in a store
the size of each file, its head, and the whole index (that the bytes arrive as they were sent is between the
store and its client; what is sent is checked before). In a folder a copy is made aside and renamed; a store
cannot rename, so what has the copy's name goes first. What is fetched is checked byte by byte.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from threed.checkpoint.format import (
    INDEX,
    LATEST,
    MANIFEST,
    Unusable,
    rank_of,
    step_of,
    sync,
    unseal,
    unseal_data,
)
from threed.checkpoint.lineage import Lineage, text_of_latest
from threed.checkpoint.place import Store, check_source, reason, step_of_copy
from threed.checkpoint.write import Parts, check
from threed.errors import InputError
from threed.quantity import show_bytes, show_seconds

ASIDE = ".fetched.tmp"  # `save.tidy` removes what a killed run has left


# ---------------------------------------------------------------- what the bytes of a checkpoint must be


def parts_of_index(manifest: dict[str, Any]) -> Parts:
    return [(entry["size"], entry["crc"]) for entry in sorted(manifest["parameters"].values(),
                                                              key=lambda each: each["at"])]


def parts_of_files(path: Path | str, manifest: dict[str, Any], index: Path) -> dict[str, Parts]:
    """Of each file its parts: its head, then its tensors. Unusable where they are not all of it."""
    tensors: dict[int, list[tuple[int, int, int]]] = {}
    with index.open("rb") as lines:
        for line in lines:
            for rank, _, shape, pieces in json.loads(line)["boxes"]:
                tensors.setdefault(rank, []).extend((at, 4 * math.prod(shape), crc) for at,
                                                    crc in pieces.values())
    files = {}
    for name, (size, head, crc) in manifest["files"].items():
        parts = [(0, head, crc), *sorted(tensors.get(rank_of(name), []))]
        ends = [at + length for at, length, _ in parts]
        if [at for at, *_ in parts] != [0, *ends[:-1]] or ends[-1] != size:
            raise Unusable(path, f"is damaged: {INDEX} does not have all bytes of {name}")
        files[name] = [(length, crc) for _, length, crc in parts]
    return files


# ---------------------------------------------------------------- there


class Copied(NamedTuple):
    """How a copy ended."""

    path: Path
    size: int | None  # bytes that were copied, 0 where the copy was there already; None: there is none, for
    # the problem
    took_s: float
    problem: str | None  # with a size: the copy is whole, but it is not named there, or older ones could not
    # be removed


class Copier:
    """Copies checkpoints on a thread, one at a time, of those that wait the newest."""

    def __init__(self, address: str, keep: int):
        self.address, self._keep = address.rstrip("/"), keep
        self._lock = threading.Lock()
        self._next: Path | None = None
        self._ended: list[Copied] = []
        self._thread: threading.Thread | None = None
        self.being_copied: Path | None = None  # it must stay until that is over
        self.moved = self.size = 0  # bytes of it

    def offer(self, path: Path) -> Path | None:
        """Copy a complete checkpoint, once what is under way is over. The one that it takes the place of."""
        with self._lock:
            dropped, self._next = self._next, path
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="copy")
                self._thread.start()
        return dropped

    def ended(self) -> list[Copied]:
        """Since the last call."""
        with self._lock:
            taken, self._ended = self._ended, []
        return taken

    def wait(self, most_s: float) -> bool:
        """Whether there is nothing to copy any more."""
        thread = self._thread
        if thread is None:
            return True
        thread.join(most_s)
        return not thread.is_alive()

    def _work(self) -> None:
        try:
            while (path := self._take()) is not None:
                begin = time.monotonic()
                size, problem = self._try(path)
                with self._lock:
                    self._ended.append(Copied(path, size, time.monotonic() - begin, problem))
        finally:
            with self._lock:
                # whatever has ended it, the next offer starts another
                if self._thread is threading.current_thread():
                    self._thread = self.being_copied = None

    def _take(self) -> Path | None:
        with self._lock:
            self.being_copied, self._next, self.moved, self.size = self._next, None, 0, 0
            if self.being_copied is None:
                self._thread = None
            return self.being_copied

    def _try(self, path: Path) -> tuple[int | None, str | None]:
        """Bytes that were copied, and what went wrong."""
        size = None
        try:
            store = Store(self.address)
            size = self._copy(store, path)
            self._prune(store, path)
        except Unusable as error:
            return size, f"it {error.what}"
        except FileNotFoundError as error:
            gone = size is None and not os.path.isdir(path)  # which never raises
            return size, "it was removed before its copy was complete" if gone else reason(error)
        except Exception as error:
            return size, reason(error)
        return size, None

    def _copy(self, store: Store, path: Path) -> int:
        name, data = path.name, (path / MANIFEST).read_bytes()
        manifest = unseal_data(path, data)
        if store.read(name, MANIFEST) == data:
            return 0
        index = parts_of_index(manifest)
        check_source(path / INDEX, index)
        parts = {**parts_of_files(path, manifest, path / INDEX), INDEX: index}
        self.size = sum(size for each in parts.values() for size, _ in each)
        aside = store.begin(name)
        try:
            for file, of_file in parts.items():
                before = self.moved
                store.put(path / file, of_file, self._move, aside, file)
                self.moved = before + sum(size for size, _ in of_file)
            store.put(path / MANIFEST, [(len(data), zlib.crc32(data))], lambda size: None, aside, MANIFEST)
            store.finish(aside, name)
        except Exception:
            with contextlib.suppress(Exception):
                store.remove(aside)
            raise
        return self.size

    def _move(self, size: int) -> None:
        self.moved += size

    def _prune(self, store: Store, path: Path) -> None:
        """Name the newest copy; remove older ones of its lineage that are not to be kept, and what is left of
        others. One whose lineage cannot be read stays."""
        lineage = Lineage.of(unseal(path))
        store.write(text_of_latest(path.name, lineage), LATEST)
        complete, rest = store.names()
        before = (name for name in complete if self._keep and step_of_copy(name) <= step_of(path))
        old = [name for name in before if lineage.has(store.owner(name), step_of_copy(name))][self._keep:]
        for name in [*old, *(name for name in rest if step_of_copy(name) < step_of(path))]:
            store.remove(name)


# ---------------------------------------------------------------- and back


def fetch(address: str, folder: Path, say: Callable[[str], None]) -> Path | None:
    """Bring a checkpoint from `address` into `folder`: the one that it names, or the newest complete one in
    it. None where it holds none, which is said. InputError where it cannot be read, or where what it names is
    not a checkpoint that can be used."""
    try:
        store, names = Store(address), None
        name = Path(store.address).name
        if step_of(Path(name)) >= 0:
            store, names = Store(store.address.removesuffix(f"/{name}")), [name]
        problems = []
        for name in names or store.newest():
            try:
                return _fetch(store, name, folder, say)
            except Unusable as error:
                if names is not None:
                    raise
                problems.append(str(error))
                say(f"note: {error}: going on with the one before it")
        if problems:
            raise InputError(f"none of the checkpoints at {address} can be used:\n  " + "\n  ".join(problems))
        say(f"note: no checkpoint at {address}: a run that has no other begins anew")
        return None
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"checkpoints at {address} cannot be fetched: {reason(error)}; start again when "
                         f"that is mended, or "
                         "begin anew with train.resume=never") from None


def _fetch(store: Store, name: str, folder: Path, say: Callable[[str], None]) -> Path:
    begin, whence, final = time.monotonic(), f"{store.address}/{name}", folder / name
    data = store.read(name, MANIFEST)
    if data is None:
        raise Unusable(whence, f"is not there, or incomplete: it has no {MANIFEST}")
    manifest = unseal_data(whence, data)
    if final.exists():
        if (final / MANIFEST).is_file() and (final / MANIFEST).read_bytes() == data:
            say(f"{whence} is in {folder} already")
            return final
        raise InputError(f"{final} is another checkpoint than {whence}: give the run a run.dir of its own, "
                         f"or move that one away")
    aside = folder / f"{name}{ASIDE}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        say(f"fetching {whence}: {show_bytes(sum(size for size, *_ in manifest['files'].values()))}")
        _get(store, name, INDEX, parts_of_index(manifest), aside)
        parts = parts_of_files(whence, manifest, aside / INDEX)
        for file, of_file in parts.items():
            _get(store, name, file, of_file, aside)
        (aside / MANIFEST).write_bytes(data)
        sync(aside / MANIFEST)
        sync(aside)
        os.replace(aside, final)
        sync(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    size = sum(size for each in parts.values() for size, _ in each)
    say(f"fetched {whence}: {show_bytes(size)} in {show_seconds(time.monotonic() - begin)}")
    return final


def _get(store: Store, name: str, file: str, parts: Parts, aside: Path) -> None:
    """One file, checked. Unusable where it is not what it was."""
    try:
        store.get(aside / file, lambda size: None, name, file)
    except FileNotFoundError:
        raise Unusable(f"{store.address}/{name}", f"is incomplete: {file} is not there") from None
    sync(aside / file)
    try:
        check(aside / file, parts)
    except OSError as error:
        raise Unusable(f"{store.address}/{name}", f"is damaged: {error}") from None

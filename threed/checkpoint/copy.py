"""Copy: complete checkpoints to another place, a folder or a store such as s3://BUCKET/RUN, and back.

    checkpoint.copy_to/             the same format as run.dir/checkpoints
        step-00000100/              files, index; last the manifest: a copy without it is incomplete
        latest                      name and lineage of the newest copy

Rank 0 copies on a thread: all bytes go through its host, and no step and no save waits for the copy. While
one checkpoint is copied, only the newest of the others waits for its turn. The copy is checked before its
manifest is written: in a folder all bytes, by the checksums of the manifest and the index; in a store the
size of each file, its head, and the whole index (the store's client guards the bytes on their way; the source
is checked before it is sent). In a folder a copy is written under a temporary name and renamed. A store
cannot rename, so whatever has the copy's name is removed first. A fetched checkpoint is checked byte by byte.
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
from typing import NamedTuple

from threed.base.errors import InputError
from threed.base.files import sync
from threed.base.quantity import show_bytes, show_seconds
from threed.checkpoint.format import (
    INDEX,
    LATEST,
    MANIFEST,
    Manifest,
    Unusable,
    rank_of,
    step_of,
)
from threed.checkpoint.lineage import Lineage, text_of_latest
from threed.checkpoint.manifest import unseal, unseal_data
from threed.checkpoint.place import Store, check_source, reason, step_of_copy
from threed.checkpoint.shard_file import Parts, check

ASIDE = ".fetched.tmp"  # `save.tidy` removes what a killed run leaves


# ---------------------------------------------------------------- sizes and checksums of a checkpoint's files


def parts_of_index(manifest: Manifest) -> Parts:
    entries = sorted(manifest.parameters.values(), key=lambda entry: entry.at)
    return [(entry.size, entry.crc) for entry in entries]


def parts_of_files(path: Path | str, manifest: Manifest, index: Path) -> dict[str, Parts]:
    """File name -> its parts: the head, then the tensors. Unusable where the parts do not cover the file."""
    tensors: dict[int, list[tuple[int, int, int]]] = {}
    with index.open("rb") as lines:
        for line in lines:
            for rank, _, shape, pieces in json.loads(line)["boxes"]:
                size = 4 * math.prod(shape)
                tensors.setdefault(rank, []).extend((at, size, crc) for at, crc in pieces.values())
    files = {}
    for name, (size, head, crc) in manifest.files.items():
        parts = [(0, head, crc), *sorted(tensors.get(rank_of(name), []))]
        ends = [at + length for at, length, _ in parts]
        if [at for at, *_ in parts] != [0, *ends[:-1]] or ends[-1] != size:
            raise Unusable(path, f"is damaged: {INDEX} does not cover all bytes of {name}")
        files[name] = [(length, crc) for _, length, crc in parts]
    return files


# ---------------------------------------------------------------- copying to another place


class Copied(NamedTuple):
    """How a copy ended."""

    path: Path
    size: int | None  # bytes that were copied, 0 if the copy existed already; None: the copy failed
    took_s: float
    # beside a size: the copy is whole, but `latest` does not name it, or older copies could not be removed
    problem: str | None


class Copier:
    """Copies checkpoints on a thread, one at a time. Of the checkpoints that wait, only the newest is
    copied."""

    def __init__(self, address: str, keep: int):
        self.address, self._keep = address.rstrip("/"), keep
        self._lock = threading.Lock()
        self._next: Path | None = None
        self._ended: list[Copied] = []
        self._thread: threading.Thread | None = None
        self.being_copied: Path | None = None  # must not be removed until its copy has ended
        self.moved = self.size = 0  # bytes of this checkpoint: copied so far, and in all

    def offer(self, path: Path) -> Path | None:
        """Copy a complete checkpoint once the copy under way has ended. Returns the waiting checkpoint that
        it replaces."""
        with self._lock:
            dropped, self._next = self._next, path
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="copy")
                self._thread.start()
        return dropped

    def ended(self) -> list[Copied]:
        """The copies that ended since the last call."""
        with self._lock:
            taken, self._ended = self._ended, []
        return taken

    def wait(self, most_s: float) -> bool:
        """Wait up to `most_s` seconds. Whether all copies have ended."""
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
                # However this thread ends, the next offer starts another.
                if self._thread is threading.current_thread():
                    self._thread = self.being_copied = None

    def _take(self) -> Path | None:
        with self._lock:
            self.being_copied, self._next, self.moved, self.size = self._next, None, 0, 0
            if self.being_copied is None:
                self._thread = None
            return self.being_copied

    def _try(self, path: Path) -> tuple[int | None, str | None]:
        """(bytes that were copied, problem), as in Copied."""
        size = None
        try:
            store = Store(self.address)
            size = self._copy(store, path)
            self._prune(store, path)
        except Unusable as error:
            return size, f"it {error.what}"
        except FileNotFoundError as error:
            gone = size is None and not os.path.isdir(path)  # isdir never raises
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
        """Name the newest copy in `latest`; remove copies of its lineage beyond `keep`, and incomplete older
        ones. A copy whose lineage cannot be read is kept."""
        lineage = Lineage.of(unseal(path))
        store.write(text_of_latest(path.name, lineage), LATEST)
        complete, rest = store.names()
        before = (name for name in complete if self._keep and step_of_copy(name) <= step_of(path))
        old = [name for name in before if lineage.has(store.owner(name), step_of_copy(name))][self._keep:]
        for name in [*old, *(name for name in rest if step_of_copy(name) < step_of(path))]:
            store.remove(name)


# ---------------------------------------------------------------- fetching a copy


def fetch(address: str, folder: Path, say: Callable[[str], None]) -> Path | None:
    """Bring a checkpoint into `folder`: `address` is a checkpoint, or holds several, of which the newest
    complete one is fetched. None, and a note, where `address` holds no checkpoint. InputError where `address`
    cannot be read, or names a checkpoint that cannot be used."""
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
                         "that is mended, or begin anew with train.resume=never") from None


def _fetch(store: Store, name: str, folder: Path, say: Callable[[str], None]) -> Path:
    begin, whence, final = time.monotonic(), f"{store.address}/{name}", folder / name
    data = store.read(name, MANIFEST)
    if data is None:
        raise Unusable(whence, f"does not exist, or is incomplete: it has no {MANIFEST}")
    manifest = unseal_data(whence, data)
    if final.exists():
        if (final / MANIFEST).is_file() and (final / MANIFEST).read_bytes() == data:
            say(f"{whence} is in {folder} already")
            return final
        raise InputError(f"{final} is another checkpoint than {whence}: give the run a run.dir of its own, "
                         f"or move {final} away")
    aside = folder / f"{name}{ASIDE}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        say(f"fetching {whence}: {show_bytes(manifest.bytes)}")
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
    """Fetch one file and check it. Unusable where its bytes do not have their checksums."""
    try:
        store.get(aside / file, lambda size: None, name, file)
    except FileNotFoundError:
        raise Unusable(f"{store.address}/{name}", f"is incomplete: {file} is missing") from None
    sync(aside / file)
    try:
        check(aside / file, parts)
    except OSError as error:
        raise Unusable(f"{store.address}/{name}", f"is damaged: {error}") from None

"""Copy: complete checkpoints to another place, a folder or a store such as s3://BUCKET/RUN, and back from there.

    checkpoint.copy_to/             of the same format as run.dir/checkpoints
        step-00000100/              its files, its index, and last its manifest: a copy without one does not count
        latest                      name and lineage of the newest copy

Rank 0 copies on a thread, so all bytes go through its host; no step and no save waits for it. While it is busy it takes note of
the newest checkpoint only. What is at the other place is checked before the manifest goes there: in a folder all bytes, by the
checksums that the manifest and the index have of them; in a store the size of each file, its head, and the whole index (that
the bytes arrive as they were sent is between the store and its client; what is sent is checked before). In a folder a copy is
made aside and renamed; a store cannot rename, so what has the copy's name goes first. What is fetched is checked byte by byte.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from threed.address import local_path
from threed.checkpoint.format import (
    INDEX,
    LATEST,
    MANIFEST,
    Unusable,
    rank_of,
    replace_text,
    step_of,
    sync,
    unseal,
    unseal_data,
)
from threed.checkpoint.lineage import Lineage, parse_latest, text_of_latest
from threed.checkpoint.write import Parts, check
from threed.errors import InputError
from threed.quantity import show_bytes, show_seconds

ASIDE = ".fetched.tmp"  # `save.tidy` removes what a killed run has left
COPYING, REPLACED = ".copying.tmp", ".replaced.tmp"  # in a folder: a copy that is not whole yet, and the one in its place


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
        steps = sorted((Path(path).name for path in paths if _step(path) >= 0), key=_step, reverse=True)
        complete = [name for name in steps if not name.endswith(".tmp") and self.has(name, MANIFEST)]
        return complete, [name for name in steps if name not in complete]

    def newest(self) -> Iterator[str]:
        """Complete checkpoints of the lineage that `latest` names, the newest first; without a `latest`, all that there are."""
        complete, _ = self.names()
        _, lineage = parse_latest(self.read(LATEST) or b"")
        owners = ((name, self.owner(name)) for name in complete)
        return (name for name, owner in owners if lineage is None or lineage.may_have(owner, _step(name)))

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


def _step(name: str) -> int:
    """Of a copy, or of one that is being made or replaced."""
    return step_of(Path(Path(name).name.removesuffix(COPYING).removesuffix(REPLACED)))


def reason(error: Exception) -> str:
    """What a store or a disk says of a failure, on one line."""
    text = " ".join(str(error).split()) or "no reason was given"
    return text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"


# ---------------------------------------------------------------- what the bytes of a checkpoint must be


def parts_of_index(manifest: dict[str, Any]) -> Parts:
    return [(entry["size"], entry["crc"]) for entry in sorted(manifest["parameters"].values(), key=lambda each: each["at"])]


def parts_of_files(path: Path | str, manifest: dict[str, Any], index: Path) -> dict[str, Parts]:
    """Of each file its parts: its head, then its tensors. Unusable where they are not all of it."""
    tensors: dict[int, list[tuple[int, int, int]]] = {}
    with index.open("rb") as lines:
        for line in lines:
            for rank, _, shape, pieces in json.loads(line)["boxes"]:
                tensors.setdefault(rank, []).extend((at, 4 * math.prod(shape), crc) for at, crc in pieces.values())
    files = {}
    for name, (size, head, crc) in manifest["files"].items():
        parts = [(0, head, crc), *sorted(tensors.get(rank_of(name), []))]
        ends = [at + length for at, length, _ in parts]
        if [at for at, *_ in parts] != [0, *ends[:-1]] or ends[-1] != size:
            raise Unusable(path, f"is damaged: {INDEX} does not have all bytes of {name}")
        files[name] = [(length, crc) for _, length, crc in parts]
    return files


def check_source(path: Path, parts: Parts) -> None:
    """Unusable where a file of a checkpoint is not what its manifest and its index say."""
    try:
        check(path, parts)
    except FileNotFoundError:
        raise
    except OSError as error:
        what = f"is damaged: {error}" if error.errno is None else f"cannot be read: {path.name}: {error.strerror}"
        raise Unusable(path.parent, what) from None


# ---------------------------------------------------------------- there


class Copied(NamedTuple):
    """How a copy ended."""

    path: Path
    size: int | None  # bytes that were copied, 0 where the copy was there already; None: there is none, for the problem
    took_s: float
    problem: str | None  # with a size: the copy is whole, but it is not named there, or older ones could not be removed


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
                if self._thread is threading.current_thread():  # whatever has ended it, the next offer starts another
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
        """Name the newest copy; remove older ones of its lineage that are not to be kept, and what is left of others. One whose
        lineage cannot be read stays."""
        lineage = Lineage.of(unseal(path))
        store.write(text_of_latest(path.name, lineage), LATEST)
        complete, rest = store.names()
        before = (name for name in complete if self._keep and _step(name) <= step_of(path))
        old = [name for name in before if lineage.has(store.owner(name), _step(name))][self._keep:]
        for name in [*old, *(name for name in rest if _step(name) < step_of(path))]:
            store.remove(name)


# ---------------------------------------------------------------- and back


def fetch(address: str, folder: Path, say: Callable[[str], None]) -> Path | None:
    """Bring a checkpoint from `address` into `folder`: the one that it names, or the newest complete one in it. None where it
    holds none, which is said. InputError where it cannot be read, or where what it names is not a checkpoint that can be used."""
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
        raise InputError(f"checkpoints at {address} cannot be fetched: {reason(error)}; start again when that is mended, or "
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
        raise InputError(f"{final} is another checkpoint than {whence}: give the run a run.dir of its own, or move that one away")
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

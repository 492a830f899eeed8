"""Compressed files: open one of gzip, xz, bzip2 or zstandard as what it holds."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from threed.base.errors import InputError
from threed.data.file_types import HEAD_BYTES, PACKED, check_kind

_READ_BYTES = 2**17


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file's content, unpacked where its name says that it is packed: a buffered reader. InputError where
    it is not what its name says, is damaged, or needs a library that is not installed."""
    suffix = path.suffix.lower()
    with path.open("rb") as file:
        if suffix not in PACKED:
            yield file
            return
        magic, packer = PACKED[suffix]
        frame = {".xz": lzma.LZMADecompressor, ".bz2": bz2.BZ2Decompressor}.get(suffix)
        damaged = EOFError, zlib.error, lzma.LZMAError, OSError
        if suffix == ".zst":
            library = _zstandard(path)
            frame, damaged = lambda: library.ZstdDecompressor().decompressobj(), (*damaged, library.ZstdError)
        head = file.peek(HEAD_BYTES)[:HEAD_BYTES]
        if head and not head.startswith(magic):
            check_kind(path, head, f"packed by {packer}")
            raise InputError(f"{path} cannot be unpacked: it is not packed by {packer}, but begins with "
                             f"{head[:12]!r}; if it is plain text, leave {suffix} out of its name")
        try:
            if frame is None:
                yield gzip.GzipFile(fileobj=file)
            else:
                yield io.BufferedReader(_Parts(_frames(file, frame)), _READ_BYTES)
        except damaged as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk
            raise InputError(f"{path} cannot be unpacked: {error}; it is damaged or cut short") from None


class _Parts(io.RawIOBase):
    """Parts of a content as a file."""

    def __init__(self, parts: Iterator[bytes]):
        self._parts, self._rest = parts, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            try:
                self._rest = next(self._parts)
            except StopIteration:
                return 0
        part, self._rest = self._rest[:len(buffer)], self._rest[len(buffer):]
        buffer[:len(part)] = part
        return len(part)


def _frames(file: Any, new: Callable[[], Any]) -> Iterator[bytes]:
    """The content of a file of frames, one after the other; `new` makes what unpacks one. (The readers
    of the libraries, and so of fsspec, end without a word where a frame of zstandard is cut short, or where
    something else follows a frame of xz or bzip2.)"""
    frame = None
    while data := file.read(_READ_BYTES):
        while data:
            if frame is None and not (data := data.lstrip(b"\0")):  # xz pads with them
                break
            frame = frame or new()
            yield frame.decompress(data)
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("its last frame is not whole")


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise InputError(f"{path} needs the package zstandard: pip install zstandard, or unpack the "
                         "file") from None
    return zstandard

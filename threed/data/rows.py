"""Rows: files whose lines or rows are objects: JSONL, plain or compressed, and Parquet."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from threed.errors import InputError

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PACKED_SUFFIXES = (".gz", ".zst")
PARQUET_SUFFIX = ".parquet"
SUFFIXES = (*JSONL_SUFFIXES, *(plain + packed for plain in JSONL_SUFFIXES for packed in PACKED_SUFFIXES),
            PARQUET_SUFFIX)
_BATCH_ROWS = 1024
_READ_BYTES = 2**17


def holds_rows(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


def rows(path: Path, fields: Sequence[str],
         optional: Sequence[str] = ()) -> Iterator[tuple[dict[str, Any], str]]:
    """(object, where it is) of each line or row that is not empty. InputError for a file that is damaged, or
    needs a library that is not installed. `fields`: all that is read of a Parquet file, with those of
    `optional` that it has."""
    if path.name.lower().endswith(PARQUET_SUFFIX):
        yield from _parquet(path, fields, optional)
        return
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            where = f"{path}:{number}"
            yield _object(line, where), where


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, unpacked."""
    suffix = path.suffix.lower()
    if suffix not in PACKED_SUFFIXES:
        with path.open("rb") as file:
            yield from file
        return
    damaged: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    library = _zstandard(path) if suffix == ".zst" else None
    if library is not None:
        damaged = EOFError, library.ZstdError
    try:
        with path.open("rb") if library is not None else gzip.open(path) as file:
            yield from file if library is None else _split(_unpacked(file, library))
    except damaged as error:
        raise InputError(f"{path} cannot be unpacked: {error}; it is damaged or cut short") from None


def _unpacked(file: Any, zstandard: Any) -> Iterator[bytes]:
    """The content of a file of zstandard's frames. (Its own reader ends without a word where one is cut
    short.)"""
    frame = None
    while data := file.read(_READ_BYTES):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(data)
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("its last frame is not whole")


def _split(parts: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
    yield rest


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise InputError(f"{path} needs the package zstandard: pip install zstandard, or unpack the "
                         "file") from None
    return zstandard


def _parquet(path: Path, fields: Sequence[str],
             optional: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path} needs the package pyarrow: pip install pyarrow, or convert the file "
                         "to JSONL") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            wanted = [name for name in fields if name in file.schema_arrow.names]
            if len(wanted) < len(fields):
                # As a line of JSONL without the field.
                yield dict.fromkeys(file.schema_arrow.names), f"{path}, row 0"
            wanted += [name for name in optional if name in file.schema_arrow.names]
            number = 0
            for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
                for value in batch.to_pylist():
                    yield value, f"{path}, row {number}"
                    number += 1
    except pyarrow.ArrowException as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}; it is damaged, or of another "
                         "format") from None


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, or not JSON
        raise InputError(f"{where}: not a line of JSON: {error}; each line must be one object") from None
    if not isinstance(value, dict):
        raise InputError(f"{where}: the line holds a {type(value).__name__}; each line must be one JSON "
                         "object")
    return value


def text_of(value: dict[str, Any], field: str, key: str, where: str) -> str:
    """The text in a field, which the key `key` of the config names."""
    if field not in value:
        fields = ", ".join(value) or "none"
        raise InputError(f"{where}: no field '{field}' (the fields are: {fields}); set {key} to the one that "
                         "holds the text")
    return checked_text(value[field], f"field '{field}'", key, where)


def checked_text(text: Any, what: str, key: str, where: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"{where}: {what} is a {type(text).__name__}, not a string; set {key} to the one "
                         "that holds the text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which no encoding can hold
        raise InputError(f"{where}: {what} is not valid Unicode: {error.reason}; repair the line") from None
    return text

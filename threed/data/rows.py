"""Rows: files whose lines, items or rows are objects: JSON lines, a JSON list of objects, and Parquet.

A row that cannot be used is a BadRow, with its reason; a file that cannot be read is an InputError. So a
reader can go on after the first and not after the second.
"""

from __future__ import annotations

import codecs
import datetime
import json
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from threed.base.errors import InputError
from threed.data.compressed import opened
from threed.data.file_types import HEAD_BYTES, PACKED, PARQUET, check_kind

JSONL_SUFFIXES = (".jsonl", ".ndjson")
JSON_SUFFIX = ".json"
PARQUET_SUFFIX = ".parquet"
SUFFIXES = (*JSONL_SUFFIXES, JSON_SUFFIX, PARQUET_SUFFIX)
_BATCH_ROWS = 1024
_READ_BYTES = 2**17
_LIST = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*(\{|$)")
_SPACE = re.compile(r"[ \t\r\n]*")
_NAMES: dict[type, str] = {type(None): "null", int: "a number", float: "a number", Decimal: "a number",
                           list: "a list", dict: "an object", str: "a text", bytes: "binary",
                           datetime.date: "a date", datetime.datetime: "a date", datetime.time: "a time"}

Row = dict[str, Any]


class BadRow(InputError):
    """A row that is no document. `reason`: what is wrong, in words that all such rows share. `key`: the key
    of the config that names the field that is looked for. `fitting`: other fields, which could be it."""

    def __init__(self, where: str, reason: str, detail: str = "", key: str | None = None,
                 fitting: Sequence[str] = ()):
        super().__init__(f"{where}: {reason}{detail}")
        self.where, self.reason, self.key, self.fitting = where, reason, key, list(fitting)


class NotRows(InputError):
    """A .json file that holds one object, which is no row."""


def plain_suffix(path: Path) -> str:
    """'.json' of a.json, and of a.json.gz."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in PACKED else suffix


def holds_rows(path: Path) -> bool:
    suffix = plain_suffix(path)
    return suffix in SUFFIXES if suffix != PARQUET_SUFFIX else path.suffix.lower() == PARQUET_SUFFIX


def name_of(value: Any) -> str:
    """What a value of JSON is, in JSON's words."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return _NAMES.get(type(value), "no text")


def rows(path: Path, fields: Sequence[str], optional: Sequence[str] = ()) -> Iterator[tuple[Row | BadRow,
                                                                                           str]]:
    """(object, or what is wrong with it; where it is) of each line, item or row that is not empty. InputError
    for a file that is damaged or of another kind, or needs a library that is not installed; NotRows.
    `fields`: all that is read of a Parquet file, with those of `optional` that it has."""
    if path.suffix.lower() == PARQUET_SUFFIX:
        yield from _parquet(path, fields, optional)
        return
    with opened(path) as file:
        head = file.peek(HEAD_BYTES)[:HEAD_BYTES]
        check_kind(path, head, "JSON")
        if plain_suffix(path) == JSON_SUFFIX:
            yield from _json(path, file, head, fields)
        elif _LIST.match(head):
            raise InputError(f"{path} is one JSON list, not lines of JSON; give it a name that ends in "
                             ".json, and it is read as one")
        else:
            yield from _lines(path, enumerate(file, 1))


def _lines(path: Path, lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[Row | BadRow, str]]:
    for number, line in lines:
        if line.strip():
            where = f"{path}:{number}"
            yield _object(line, where), where


def _json(path: Path, file: Any, head: bytes,
          fields: Sequence[str]) -> Iterator[tuple[Row | BadRow, str]]:
    """The rows of a .json file: its lines, the items of its list, or its only object."""
    if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        yield from _items(path, file)
        return
    lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
    first, second = next(lines, None), None
    if first is None:
        return
    if _is_whole(first[1]) and (second := next(lines, None)) is not None:
        yield from _lines(path, iter((first, second)))
        yield from _lines(path, lines)
        return
    try:
        values = _values((first[1] + b"".join(line for _, line in lines)).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} holds neither lines of JSON nor objects one after the other: {error}; it "
                         "is damaged or cut short") from None
    value = values[0]
    if len(values) > 1:
        for number, value in enumerate(values):
            where = f"{path}, object {number}"
            yield value if isinstance(value, dict) else _no_object(where, value), where
        return
    if isinstance(value, dict) and all(field in value for field in fields):
        yield value, f"{path}"
        return
    items = value.items() if isinstance(value, dict) else ()
    lists = [name for name, each in items if isinstance(each, list)]
    how = f", as jq -c '.{lists[0]}[]' {path.name} writes its list '{lists[0]}'" if lists else ""
    raise NotRows(f"{path} holds one object, and no field '{fields[0]}' in it; give JSON lines or a list of "
                  f"objects{how}")


def _values(text: str) -> list[Any]:
    """Values of JSON, one after the other."""
    values, take, at, text = [], json.JSONDecoder().raw_decode, 0, text.strip()
    while at < len(text):
        value, at = take(text, at)
        values.append(value)
        while text[at:at + 1].isspace():
            at += 1
    return values


def _is_whole(line: bytes) -> bool:
    """Whether a line of JSON ends where it does, right or wrong, and is not the first of several."""
    text = line.decode("utf-8-sig", errors="replace").rstrip()
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos < len(text)
    except (ValueError, RecursionError):
        return True
    return True


class _Text:
    """A file of JSON, of which a part is in memory at a time.

    (Not by ijson: it reads half of a surrogate pair as "?", refuses NaN and numbers of more than 64 bits, and
    takes all memory where a file goes on with "[".)
    """

    def __init__(self, file: Any):
        self._file, self._decode = file, codecs.getincrementaldecoder("utf-8-sig")()
        self._take, self._text, self._at = json.JSONDecoder().raw_decode, "", 0

    def char(self) -> str:
        """The next character that is no white space, which is not taken; "" at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text) or not self._more():
                return self._text[self._at:self._at + 1]

    def take(self, wanted: str) -> None:
        """Take a character. ValueError where there is another."""
        if (found := self.char()) != wanted:
            raise ValueError(f"{wanted} is missing" + (f" before {found}" if found else ""))
        self._at += 1

    def value(self) -> Any:
        """Take a value. ValueError where there is none."""
        while True:
            try:
                value, end = self._take(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = error.pos > len(self._text) - 16 or error.msg.startswith("Unterminated")
                if cut and self._more():
                    continue
                raise ValueError(error.msg) from None
            if end < len(self._text) or not self._more():  # of a number there may be more
                self._at = end
                return value

    def _more(self) -> bool:
        """Read as much as is held already, or more: a long value is not looked at over and over."""
        block = self._file.read(max(_READ_BYTES, len(self._text) - self._at))
        self._text, self._at = self._text[self._at:] + self._decode.decode(block, not block), 0
        return bool(block)


def _items(path: Path, file: Any) -> Iterator[tuple[Row | BadRow, str]]:
    """The items of a list of JSON."""
    text, number = _Text(file), 0
    try:
        text.take("[")
        while text.char() != "]" or number:
            value, where = text.value(), f"{path}, item {number}"
            yield value if isinstance(value, dict) else _no_object(where, value), where
            number += 1
            if text.char() != ",":
                break
            text.take(",")
        text.take("]")
        if text.char():
            raise ValueError("the file goes on after its list")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON at item {number} of its list: {error}; the file is damaged or "
                         "cut short") from None


def _parquet(path: Path, fields: Sequence[str],
             optional: Sequence[str]) -> Iterator[tuple[Row | BadRow, str]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path} needs the package pyarrow: pip install pyarrow, or convert the file "
                         "to JSONL") from None
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head.startswith(PARQUET):
        check_kind(path, head, "Parquet")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            # Without a field, what the others hold is looked at for advice.
            wanted = [name for name in (*fields, *optional) if name in names] \
                if all(name in names for name in fields) else names
            number = 0
            for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
                for value in _batch_rows(batch, f"{path}, row", number):
                    yield value, f"{path}, row {number}"
                    number += 1
    except pyarrow.ArrowException as error:
        raise InputError(f"{path} cannot be read as Parquet: {error}; it is damaged, or of another "
                         "format") from None


def _batch_rows(batch: Any, where: str, first: int) -> Iterator[Row | BadRow]:
    """The rows of a batch of Parquet, of which the first has this number."""
    try:
        yield from map(_as_given, batch.to_pylist())
        return
    except UnicodeDecodeError:  # Parquet's writers do not check their text
        pass
    for at in range(len(batch)):
        try:
            yield _as_given(batch.slice(at, 1).to_pylist()[0])
        except UnicodeDecodeError as error:
            yield BadRow(f"{where} {first + at}", "a text that is not UTF-8",
                         f": {error.reason} at byte {error.start}")


def _as_given(row: Row) -> Row:
    """A row without what Parquet fills with null: all objects of a column have the fields of all."""
    return {name: _filled(value) for name, value in row.items()}


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _filled(each) for name, each in value.items() if each is not None}
    return [_filled(each) for each in value] if isinstance(value, list) else value


def _object(line: bytes, where: str) -> Row | BadRow:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return BadRow(where, "not a line of JSON in UTF-8", f": {error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        if b"\0" in line:
            return BadRow(where, "NUL bytes", ", no line of JSON: the file was damaged, as by a crash")
        return BadRow(where, "not a line of JSON", f": {error}")
    return value if isinstance(value, dict) else _no_object(where, value)


def _no_object(where: str, value: Any) -> BadRow:
    return BadRow(where, f"{name_of(value)}, not an object", " with fields")


def text_of(value: Row, field: str, key: str, where: str, taken: Sequence[str] = ()) -> str:
    """The text in a field, which the key `key` of the config names. `taken`: fields that are read already."""
    others = [name for name, text in value.items()
              if name not in (field, *taken) and isinstance(text, str) and text.strip()]
    if field not in value and not others:
        ids = next((name for name, ids in value.items() if _are_ids(ids)), None)
        if ids is not None:
            raise BadRow(where, f"field '{ids}' holds token ids, and no field a text", "; give the text that "
                         "they were made of: tokens are read from a pair of Megatron's .bin and .idx alone")
    if field not in value:
        fields = ", ".join(value) or "none"
        raise BadRow(where, f"no field '{field}'", f" (the fields are: {fields})", key, others)
    text = value[field]
    if isinstance(text, bytes):  # of Parquet, some writers of which do not mark text as such
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            raise BadRow(where, f"field '{field}' is binary, and not text in UTF-8",
                         f": {error.reason} at byte {error.start}") from None
    return checked_text(text, f"field '{field}'", where, key, others)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int and each >= 0 for each in value)


def checked_text(text: Any, what: str, where: str, key: str | None = None,
                 fitting: Sequence[str] = ()) -> str:
    if not isinstance(text, str):
        raise BadRow(where, f"{what} is {name_of(text)}, not a text", "", key, fitting)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which no encoding can hold
        raise BadRow(where, f"{what} is not valid Unicode", f": {error.reason}") from None
    return text

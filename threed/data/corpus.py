"""Corpus: read documents from `data.source`: the standard library, a folder, a glob, files of text, JSON
lines, JSON or Parquet.

A document is a list of segments, texts that count in the loss or do not (data.loss_mask): all of a plain text
counts, of a prompt and its answer the second.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from threed.base.errors import InputError
from threed.data.compressed import opened
from threed.data.file_types import HEAD_BYTES, kind_of
from threed.data.files import STDLIB, LeftOut, list_files, of_held_out, shown
from threed.data.messages import (
    FLAGS,
    NOT_READ,
    SPLITS,
    TOOLS,
    UNWANTED,
    Message,
    messages_of,
    tools_of,
    without_effect,
)
from threed.data.rows import BadRow, NotRows, Row, holds_rows, rows, text_of
from threed.schema import DataConfig

_LOOK_ROWS = 100_000  # after a bad row, for how many are like it


class TextSegment(NamedTuple):
    text: str
    counts: bool = True  # in the loss


Segments = list[TextSegment]
# Chat messages, the tools that they may call, and where they are -> their segments.
Render = Callable[[list[Message], list[Any] | None, str], Segments]


class RowReader(NamedTuple):
    """How a row becomes a document."""

    fields: tuple[str, ...]  # that it reads
    parse: Callable[[Row, str], Segments]  # object, where it is -> segments; BadRow
    plain: bool  # whether a file of text is a document
    optional: tuple[str, ...] = ()  # fields that it reads where there are some
    beside: tuple[str, ...] = SPLITS  # fields that it does not heed, and that a person may mean
    skips: int | None = None  # how many bad rows are left out, at most; None: none is


def text_reader(text_key: str) -> RowReader:
    def parse(value: Row, where: str) -> Segments:
        return [TextSegment(text_of(value, text_key, "data.text_key", where))]

    return RowReader((text_key,), parse, True)


def reader_of(data: DataConfig, render: Render | None = None) -> RowReader:
    """`render`: with data.loss_mask=chat."""
    reader = text_reader(data.text_key)
    if data.loss_mask == "answers":
        reader = RowReader((data.prompt_key, data.answer_key), _answers(data), False,
                           beside=(*SPLITS, *FLAGS))
    elif data.loss_mask == "chat":
        assert render is not None
        reader = RowReader((data.messages_key,), _chat(data, render), False, (TOOLS,),
                           (*SPLITS, UNWANTED, *FLAGS, *NOT_READ))
    return reader._replace(skips=data.bad_rows_limit if data.on_bad_row == "skip" else None)


def _answers(data: DataConfig) -> Callable[[Row, str], Segments]:
    def parse(value: Row, where: str) -> Segments:
        keys = data.prompt_key, data.answer_key
        return [TextSegment(text_of(value, keys[0], "data.prompt_key", where, keys), False),
                TextSegment(text_of(value, keys[1], "data.answer_key", where, keys))]

    return parse


def _chat(data: DataConfig, render: Render) -> Callable[[Row, str], Segments]:
    def parse(value: Row, where: str) -> Segments:
        return render(messages_of(value, data.messages_key, where), tools_of(value, where), where)

    return parse


def documents(source: str, text_key: str) -> Iterator[str]:
    """The texts of a source, always in the same order. Texts of nothing but white space are left out.

    * `python-stdlib`: the .py files of the running Python's standard library, without installed packages,
      folders named test, tests or idle_test, and files that are not UTF-8: about 12 MB.
    * a folder: every file below it with a suffix in TEXT_SUFFIXES, one document each, and every file of rows;
      names that start with a dot are passed over.
    * a glob or a file: as in a folder, whatever the suffix.
    * JSON lines (.jsonl, .ndjson), .json (such lines, or a list of objects) and Parquet: a document a line,
      item or row, in the field `text_key`.

    All but Parquet may be packed (.gz, .xz, .bz2, .zst). A text file that is not UTF-8 is skipped. Raises
    InputError for a source that is missing or holds no text, and for a bad row.
    """
    for segments in read(source, text_reader(text_key)):
        yield segments[0].text


def read(source: str, reader: RowReader,
         say: Callable[[str], None] = lambda line: None) -> Iterator[Segments]:
    """The documents of a source, as `documents`. Those of which nothing counts are left out, too. `say` gets
    a line about all that was left out, at the end."""
    listing = list_files(source)
    bad, skipped, empty, noted, count = LeftOut(), LeftOut(), LeftOut(), LeftOut(), 0
    for path in listing.files:
        if not reader.plain and not holds_rows(path):
            raise InputError(f"{path} of data.source={source} holds plain text, of which nothing says what "
                             "counts in the loss; give JSONL or Parquet, or set data.loss_mask=none")
        try:
            for segments, where in _of_file(path, reader, bad, skipped, noted, count):
                if any(segment.counts and segment.text.strip() for segment in segments):
                    count += 1
                    yield segments
                else:
                    empty.add("of white space alone" if reader.plain else "in which nothing counts", where)
        except NotRows as error:
            if listing.named:
                raise
            skipped.add("that hold one object, and no rows", error.args[0].partition(" ")[0])
        except OSError as error:
            raise _unreadable(path, error) from None
    if not count:
        rest = ", ".join(str(each) for each in (skipped, bad, empty, listing.left_out) if each.total)
        why = f" ({rest})" if rest else ""
        what = "text" if reader.plain else "example of which something counts"
        give = "files that hold UTF-8 text" if reader.plain else "some in which there is an answer"
        raise InputError(f"data.source={source} holds no {what}{why}; give {give}")
    if source == STDLIB:
        return
    if skipped.total:
        say(f"data.source={source}: files are skipped: {skipped}; mend them to use them")
    if bad.total:
        say(f"data.source={source}: {bad.total:,} of {count + bad.total + empty.total:,} documents are "
            f"skipped (data.on_bad_row=skip): {bad}")
    if empty.total:
        say(f"data.source={source}: documents are left out: {empty}")
    if noted.total:
        say(f"data.source={source}: there are rows: {noted}")


def _of_file(path: Path, reader: RowReader, bad: LeftOut, skipped: LeftOut, noted: LeftOut,
             good: int) -> Iterator[tuple[Segments, str]]:
    """(document, where it is) of a file. `good`: how many documents were read before it. Adds to `bad` and
    `skipped` what is left out, and to `noted` what is used otherwise than a person may think."""
    if not holds_rows(path):
        text = _text(path, skipped)
        if text is not None:
            yield [TextSegment(text)], str(path)
        return
    if not path.stat().st_size:
        return
    stream = rows(path, reader.fields, (*reader.optional, *reader.beside))
    fine = 0
    for value, where in stream:
        parsed = _parsed(reader, value, where)
        if not isinstance(parsed, BadRow):
            fine += 1
            assert not isinstance(value, BadRow)
            for what in without_effect(value, reader.beside):
                noted.add(what, where)
            yield parsed, where
        elif reader.skips is None:
            raise _explained(parsed, path, reader, stream, fine, good + fine)
        else:
            bad.add(parsed.reason, where)
            if bad.total > reader.skips:
                raise InputError(f"{parsed}; {bad.total:,} rows cannot be used: {bad}; that is more than "
                                 f"data.bad_rows_limit={reader.skips}; repair them, or raise it"
                                 f"{'' if good + fine else _advice(parsed)}")


def _parsed(reader: RowReader, value: Row | BadRow, where: str) -> Segments | BadRow:
    if isinstance(value, BadRow):
        return value
    try:
        return reader.parse(value, where)
    except BadRow as error:
        return error


def _explained(first: BadRow, path: Path, reader: RowReader, rest: Iterator[tuple[Row | BadRow, str]],
               before: int, good: int) -> InputError:
    """The error of a bad row: with how many rows of its file are like it, and what to do. `before`: good rows
    of the file; `good`: of the source."""
    found = LeftOut()
    found.add(first.reason, first.where)
    looked = before + 1
    try:
        for value, where in itertools.islice(rest, _LOOK_ROWS):
            looked += 1
            if isinstance(parsed := _parsed(reader, value, where), BadRow):
                found.add(parsed.reason, where)
            else:
                good += 1
    except (InputError, OSError):  # the rest of the file cannot be read: it is a second fault
        pass
    alike, of = found.counts[first.reason], f"{looked:,} row{'' if looked == 1 else 's'}"
    others = f", {found.total - alike:,} more {'is' if found.total - alike == 1 else 'are'} bad otherwise" \
        if found.total > alike else ""
    if not good and first.key and not others:
        return InputError(f"{first}, in all of {of}{_advice(first)}" if looked > 1 else
                          f"{first}{_advice(first)}")
    fits = first.fitting and first.reason.startswith("no ")
    other = f" (here field '{first.fitting[0]}' would fit)" if fits else ""
    skip = ", or set data.on_bad_row=skip, which leaves such rows out and counts them"
    return InputError(f"{first}{other}; of {of} of {path.name} {alike:,} {'is' if alike == 1 else 'are'} "
                      f"so{others}; repair {'it' if found.total == 1 else 'them'}"
                      f"{skip if found.total < looked else ''}")


def _advice(row: BadRow) -> str:
    """What to do where no row has what is looked for."""
    if row.key is None:
        return ""
    fitting = f", such as '{row.fitting[0]}'" if row.fitting else ""
    return f"; set {row.key} to the one that holds it{fitting}"


def _text(path: Path, skipped: LeftOut) -> str | None:
    """The text of a file; None where it holds none."""
    with opened(path) as file:
        content = file.read()
    kind = kind_of(content[:HEAD_BYTES])
    if kind is not None and not kind.page:
        skipped.add(f"of another kind, {kind.what}: {kind.advice}", path)
    elif b"\0" in content:
        skipped.add("with NUL bytes: no text, or damaged by a crash", path)
    else:
        try:
            return content.decode("utf-8-sig")  # not read_text, which would change line ends
        except UnicodeDecodeError:
            skipped.add("not UTF-8", path)
    return None


def source_bytes(source: str) -> int:
    """Bytes of a source's files: as many as their characters, or more, where none is packed."""
    return sum(path.stat().st_size for path in list_files(source).files)


def not_read(source: str) -> list[str]:
    """Lines about the files of a source that are not read, and about those that a person may not mean."""
    listing = list_files(source)
    if source == STDLIB:
        return []
    lines = []
    if listing.left_out.total:
        lines.append(f"data.source={source}: not read: {listing.left_out}")
    if held := of_held_out(listing.files):  # of a glob
        lines.append(f"data.source={source}: is trained on, though named as a validation or test split: "
                     f"{shown(held)}; another glob leaves it out")
    plain = [path for path in listing.files if not holds_rows(path)]
    if not listing.named and 0 < len(plain) < len(listing.files):
        lines.append(f"data.source={source}: beside files of rows, {len(plain):,} of text "
                     f"{'is a document' if len(plain) == 1 else 'are a document each'} ({plain[0]}); a glob "
                     "leaves them out")
    return lines


def fingerprint(source: str, text_key: str) -> str:
    """A hash of a source's content: the same content has the same hash in any folder.

    Every byte is read once. The names of files matter only where they change the order of the files or how
    they are read. `text_key`: the field that is read, or whatever else says what a line becomes.
    """
    total = hashlib.blake2b(digest_size=16)
    for path in list_files(source).files:
        # Text and JSONL of the same bytes are different documents; so are two fields of the same JSONL.
        kind = f"jsonl {text_key}" if holds_rows(path) else "text"
        try:
            with path.open("rb") as file:
                total.update(f"{kind}\0".encode() + hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise _unreadable(path, error) from None
    return total.hexdigest()


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path} cannot be read: {error.strerror or error}; check its permissions")

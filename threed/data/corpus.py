"""Corpus: read documents from `data.source`: the standard library, a folder, a glob, files of text, JSONL or
Parquet.

A document is a list of segments, texts that count in the loss or do not (data.loss_mask): all of a plain text
counts, of a prompt and its answer the second.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from threed.data.rows import SUFFIXES, checked_text, holds_rows, rows, text_of
from threed.errors import InputError
from threed.schema import DataConfig

STDLIB = "python-stdlib"
TOOLS = "tools"  # the field beside the messages of a chat that describes the tools
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv", ".yaml", ".yml",
                 ".toml", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java",
                 ".js", ".ts", ".sh")
_NOT_STDLIB = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")


class Segment(NamedTuple):
    text: str
    counts: bool = True  # in the loss


Segments = list[Segment]
# Chat messages, the tools that they may call, and where they are -> their segments.
Render = Callable[[list[dict[str, Any]], list[Any] | None, str], Segments]


class Reader(NamedTuple):
    """How an object of JSONL or Parquet becomes a document."""

    fields: tuple[str, ...]  # that it reads
    parse: Callable[[dict[str, Any], str], Segments]  # object, where it is -> segments
    plain: bool  # whether a file of text is a document
    optional: tuple[str, ...] = ()  # fields that it reads where there are some


def text_reader(text_key: str) -> Reader:
    def parse(value: dict[str, Any], where: str) -> Segments:
        return [Segment(text_of(value, text_key, "data.text_key", where))]

    return Reader((text_key,), parse, True)


def reader_of(data: DataConfig, render: Render | None = None) -> Reader:
    """`render`: with data.loss_mask=chat."""
    if data.loss_mask == "none":
        return text_reader(data.text_key)

    def answers(value: dict[str, Any], where: str) -> Segments:
        return [Segment(text_of(value, data.prompt_key, "data.prompt_key", where), False),
                Segment(text_of(value, data.answer_key, "data.answer_key", where))]

    def chat(value: dict[str, Any], where: str) -> Segments:
        messages = value.get(data.messages_key)
        if not isinstance(messages, list) or not messages:
            fields = ", ".join(value) or "none"
            raise InputError(f"{where}: no list of messages in field '{data.messages_key}' (the fields are: "
                             f"{fields}); set data.messages_key to the one that holds it")
        for number, message in enumerate(messages):
            what = f"message {number} of field '{data.messages_key}'"
            if not isinstance(message, dict) or "role" not in message:
                raise InputError(f"{where}: {what} must be an object with role and content")
            if message.get("content") is None and message.get("tool_calls"):
                message["content"] = ""  # it calls instead
            for name in ("role", "content"):
                if not isinstance(text := message.get(name), str):
                    raise InputError(f"{where}: {name} of {what} is a {type(text).__name__}, not a text")
                checked_text(text, f"{name} of {what}", "data.messages_key", where)
        assert render is not None
        return render(messages, value.get(TOOLS), where)

    if data.loss_mask == "answers":
        return Reader((data.prompt_key, data.answer_key), answers, False)
    return Reader((data.messages_key,), chat, False, (TOOLS,))


def documents(source: str, text_key: str) -> Iterator[str]:
    """The texts of a source, always in the same order. Texts of nothing but white space are left out.

    * `python-stdlib`: the .py files of the running Python's standard library, without installed packages,
      folders named test, tests or idle_test, and files that are not UTF-8: about 12 MB.
    * a folder: every file below it with a suffix in TEXT_SUFFIXES, one document each, and every JSONL and
      Parquet file; names that start with a dot are passed over.
    * a glob or a file: as in a folder, whatever the suffix (only .json is refused: it may be JSON lines or
      one text).
    * JSONL (.jsonl, .ndjson, also .gz and .zst) and Parquet: a document a line or row, in the field
      `text_key`.

    A text file that is not UTF-8 is skipped, and a warning counts them. Raises InputError for a source that
    is missing or holds no text, and for a bad line.
    """
    for segments in read(source, text_reader(text_key)):
        yield segments[0].text


def read(source: str, reader: Reader) -> Iterator[Segments]:
    """The documents of a source, as `documents`. Those of which nothing counts are left out, too."""
    count = skipped = empty = 0
    for path in _files(source):
        if not reader.plain and not holds_rows(path):
            raise InputError(f"{path} of data.source={source} holds plain text, of which nothing says what "
                             "counts in the loss; give JSONL or Parquet, or set data.loss_mask=none")
        try:
            for segments in _of_file(path, reader):
                if any(segment.counts and segment.text.strip() for segment in segments):
                    count += 1
                    yield segments
                else:
                    empty += 1
        except UnicodeDecodeError:
            skipped += 1
        except OSError as error:
            raise _unreadable(path, error) from None
    not_utf8 = f"{skipped} {'file' if skipped == 1 else 'files'} of data.source={source} not UTF-8"
    if not count:
        why = f" ({not_utf8})" if skipped else ""
        what = "text" if reader.plain else "example of which something counts"
        give = "files that hold UTF-8 text" if reader.plain else "some in which there is an answer"
        raise InputError(f"data.source={source} holds no {what}{why}; give {give}")
    if skipped and source != STDLIB:
        warnings.warn(f"{not_utf8}: skipped; convert to UTF-8 to use them", stacklevel=2)
    if empty and not reader.plain:
        warnings.warn(f"{empty} {'example' if empty == 1 else 'examples'} of data.source={source} in which "
                      "nothing counts: skipped", stacklevel=2)


def _of_file(path: Path, reader: Reader) -> Iterator[Segments]:
    if not holds_rows(path):
        yield [Segment(path.read_bytes().decode("utf-8-sig"))]  # not read_text, which would change line ends
        return
    for value, where in rows(path, reader.fields, reader.optional):
        yield reader.parse(value, where)


def source_bytes(source: str) -> int:
    """Bytes of a source's files: as many as their characters, or more."""
    return sum(path.stat().st_size for path in _files(source))


def fingerprint(source: str, text_key: str) -> str:
    """A hash of a source's content: the same content has the same hash in any folder.

    Every byte is read once. The names of files matter only where they change the order of the files or how
    they are read. `text_key`: the field that is read, or whatever else says what a line becomes.
    """
    total = hashlib.blake2b(digest_size=16)
    for path in _files(source):
        # Text and JSONL of the same bytes are different documents; so are two fields of the same JSONL.
        kind = f"jsonl {text_key}" if holds_rows(path) else "text"
        try:
            with path.open("rb") as file:
                total.update(f"{kind}\0".encode() + hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise _unreadable(path, error) from None
    return total.hexdigest()


def _files(source: str) -> list[Path]:
    """The files of a source, sorted; at least one."""
    if source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        files = _walk(root, lambda name: name not in _NOT_STDLIB, lambda path: path.suffix == ".py")
        advice = f"this Python has no standard library in {root}; give a folder of text instead"
    elif os.path.isdir(path := os.path.expanduser(source)):
        files = _walk(Path(path), lambda name: not name.startswith("."),
                      lambda path: path.suffix.lower() in TEXT_SUFFIXES or holds_rows(path))
        advice = ("the folder has no file with one of the suffixes "
                  f"{' '.join(TEXT_SUFFIXES + SUFFIXES)}; for other names give a glob, as in "
                  f"'{source}/*', and for Megatron's .bin/.idx their prefix")
    elif os.path.exists(path):
        files, advice = [_refuse_json(Path(path))], ""
    elif glob.has_magic(path):
        files = [_refuse_json(Path(name)) for name in sorted(glob.glob(path, recursive=True))
                 if os.path.isfile(name)]
        advice = "the glob matches no file; ** goes through folders"
    else:
        fetch = "; threed downloads nothing: fetch the data first" if "://" in source else ""
        raise InputError(f"data.source={source} does not exist; give {STDLIB}, or a folder, a glob, a text "
                         f"file, a .jsonl file or the prefix of a Megatron .bin/.idx pair{fetch}")
    if not files:
        raise InputError(f"data.source={source} holds no text: {advice}")
    return files


def _walk(root: Path, keep_name, keep_file) -> list[Path]:
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = filter(keep_name, folders)
        files += [Path(folder, name) for name in names if keep_name(name) and keep_file(Path(name))]
    # Sorted by the path's parts below the root: the order depends neither on the system nor on the root.
    return sorted((path for path in files if path.is_file()), key=lambda path: path.relative_to(root).parts)


def _refuse_json(path: Path) -> Path:
    if path.suffix.lower() == ".json":
        raise InputError(f"{path}: a .json file is not read; name it .jsonl if each line is a JSON object, "
                         "or .txt to train on it as it stands")
    return path


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path} cannot be read: {error.strerror or error}; check its permissions")

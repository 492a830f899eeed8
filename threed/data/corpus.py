"""Corpus: read documents of text from `data.source`: the standard library, a folder, a glob, a file or
JSONL."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from threed.errors import InputError

STDLIB = "python-stdlib"
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv", ".yaml", ".yml",
                 ".toml", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java",
                 ".js", ".ts", ".sh")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
_NOT_STDLIB = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")


def documents(source: str, text_key: str) -> Iterator[str]:
    """The texts of a source, always in the same order. Texts of nothing but white space are left out.

    * `python-stdlib`: the .py files of the running Python's standard library, without installed packages,
      folders named test, tests or idle_test, and files that are not UTF-8: about 12 MB.
    * a folder: every file below it with a suffix in TEXT_SUFFIXES, one document each, and every JSONL file;
      names that start with a dot are passed over.
    * a glob or a file: as in a folder, whatever the suffix (only .json is refused: it may be JSON lines or
      one text).
    * JSONL (.jsonl, .ndjson): a document a line, in the field `text_key`.

    A text file that is not UTF-8 is skipped, and a warning counts them. Raises InputError for a source that
    is missing or holds no text, and for a bad JSONL line.
    """
    count = skipped = 0
    for path in _files(source):
        try:
            texts = _json_lines(path, text_key) if _is_jsonl(path) else _whole_file(path)
            for text in texts:
                if text.strip():
                    count += 1
                    yield text
        except UnicodeDecodeError:
            skipped += 1
        except OSError as error:
            raise _unreadable(path, error) from None
    not_utf8 = f"{skipped} {'file' if skipped == 1 else 'files'} of data.source={source} not UTF-8"
    if not count:
        why = f" ({not_utf8})" if skipped else ""
        raise InputError(f"data.source={source} holds no text{why}; give files that hold UTF-8 text")
    if skipped and source != STDLIB:
        warnings.warn(f"{not_utf8}: skipped; convert to UTF-8 to use them", stacklevel=2)


def source_bytes(source: str) -> int:
    """Bytes of a source's files: as many as their characters, or more."""
    return sum(path.stat().st_size for path in _files(source))


def fingerprint(source: str, text_key: str) -> str:
    """A hash of a source's content: the same content has the same hash in any folder.

    Every byte is read once. The names of files matter only where they change the order of the files or how
    they are read.
    """
    total = hashlib.blake2b(digest_size=16)
    for path in _files(source):
        # Text and JSONL of the same bytes are different documents; so are two fields of the same JSONL.
        kind = f"jsonl {text_key}" if _is_jsonl(path) else "text"
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
                      lambda path: path.suffix.lower() in TEXT_SUFFIXES or _is_jsonl(path))
        advice = ("the folder has no file with one of the suffixes "
                  f"{' '.join(TEXT_SUFFIXES + JSONL_SUFFIXES)}; for other names give a glob, as in "
                  f"'{source}/*', and for Megatron's .bin/.idx their prefix")
    elif os.path.exists(path):
        files, advice = [_refuse_json(Path(path))], ""
    elif glob.has_magic(path):
        files = [_refuse_json(Path(name)) for name in sorted(glob.glob(path, recursive=True))
                 if os.path.isfile(name)]
        advice = "the glob matches no file; ** goes through folders"
    else:
        raise InputError(f"data.source={source} does not exist; give {STDLIB}, or a folder, a glob, a text "
                         "file, a .jsonl file or the prefix of a Megatron .bin/.idx pair")
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


def _is_jsonl(path: Path) -> bool:
    return path.suffix.lower() in JSONL_SUFFIXES


def _refuse_json(path: Path) -> Path:
    if path.suffix.lower() == ".json":
        raise InputError(f"{path}: a .json file is not read; name it .jsonl if each line is a JSON object, "
                         "or .txt to train on it as it stands")
    return path


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path} cannot be read: {error.strerror or error}; check its permissions")


def _whole_file(path: Path) -> Iterator[str]:
    yield path.read_bytes().decode("utf-8-sig")  # not read_text, which would change line ends


def _json_lines(path: Path, text_key: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _json_text(line, text_key, f"{path}:{number}")


def _json_text(line: bytes, text_key: str, where: str) -> str:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, or not JSON
        raise InputError(f"{where}: not a line of JSON: {error}; each line must be one object") from None
    if not isinstance(value, dict):
        raise InputError(f"{where}: the line holds a {type(value).__name__}; each line must be one JSON "
                         "object")
    if text_key not in value:
        fields = ", ".join(value) or "none"
        raise InputError(f"{where}: no field '{text_key}' (the fields are: {fields}); set data.text_key to "
                         "the one that holds the text")
    text = value[text_key]
    if not isinstance(text, str):
        raise InputError(f"{where}: field '{text_key}' is a {type(text).__name__}, not a string; set "
                         "data.text_key to the one that holds the text")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which no encoding can hold
        raise InputError(f"{where}: field '{text_key}' is not valid Unicode: {error.reason}; repair the "
                         "line") from None
    return text

"""File types: what a file is by its first bytes, whatever its name says."""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import NamedTuple

from threed.base.errors import InputError

HEAD_BYTES = 4096  # of a file, by which its kind is told
# Suffix of a packed file -> how its content begins, and what packs it.
PACKED = {".gz": (b"\x1f\x8b", "gzip"), ".xz": (b"\xfd7zXZ\0", "xz"), ".bz2": (b"BZh", "bzip2"),
          ".zst": (b"\x28\xb5\x2f\xfd", "zstandard")}
PARQUET = b"PAR1"
INDEX = b"MMIDIDX\0\0"  # of Megatron's .idx
_JSONL = "write its texts to JSONL or Parquet"
_OTHERS = {  # how the content begins -> (what it is, what to do)
    PARQUET: ("a Parquet file", "name it .parquet"),
    INDEX: ("the index of Megatron data", "give the prefix of its .bin/.idx pair"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it"),
    b"\x04\x22\x4d\x18": ("packed by lz4", "unpack it"),
    b"\xff\xfe": ("text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"),
    b"ARROW1": ("an Arrow file", _JSONL),
    b"\x93NUMPY": ("a NumPy array", _JSONL),
    b"\x89HDF\r\n": ("an HDF5 file", _JSONL), b"SQLite format 3\0": ("an SQLite database", _JSONL),
    b"Obj\x01": ("an Avro file", _JSONL), b"%PDF-": ("a PDF", _JSONL),
    b"GGUF": ("a model in GGUF", "give the model's tokenizer.json or its data"),
    b"\x89PNG\r\n": ("a picture", "leave it out"), b"\xff\xd8\xff": ("a picture", "leave it out"),
}
_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGE = re.compile(rb"\s*<(!doctype\s+html|html|head)\b", re.IGNORECASE)
_REFUSAL = re.compile(rb"\s*(<\?xml[^>]*\?>\s*)?<Error>", re.IGNORECASE)  # of a store of objects


class Kind(NamedTuple):
    what: str  # "a Git LFS pointer", after "is"
    advice: str
    page: bool = False  # of HTML or XML: of a file that may hold such text it says nothing


def kind_of(head: bytes) -> Kind | None:
    """The kind of a file that begins with `head`, of at most HEAD_BYTES; None: text in UTF-8, or nothing that
    is known here."""
    for suffix, (magic, packer) in PACKED.items():
        if head.startswith(magic):
            return Kind(f"packed by {packer}", f"give it a name that ends in {suffix}, or unpack it")
    for magic, (what, advice) in _OTHERS.items():
        if head.startswith(magic):
            return Kind(what, advice)
    # a mark, and how long the description is that follows
    if head[:4] == b"\xff\xff\xff\xff" and 0 < int.from_bytes(head[4:8], "little") < 2**24:
        return Kind("an Arrow stream", _JSONL)
    if head[257:262] == b"ustar":
        return Kind("a tar archive", "unpack it")
    if (kind := stand_in(head)) is not None:
        return kind
    if head and not head.strip(b"\0"):
        return Kind("nothing but NUL bytes, as after a crash or a copy that did not end",
                    "copy or download it again")
    if (encoding := _wide(head)) is not None:
        return Kind(f"text in {encoding}", f"convert it: iconv -f {encoding} -t UTF-8")
    if max(head[::2].count(0), head[1::2].count(0)) > 0.4 * len(head):
        return Kind("binary data, no text", "give the text that they were made of; token ids are read from a "
                    "pair of Megatron's .bin and .idx alone")
    return None


def stand_in(head: bytes) -> Kind | None:
    """What lies in place of a file, where a download brought no file."""
    if head.startswith(_POINTER):
        return Kind("a Git LFS pointer in place of the file", "fetch that with git lfs pull")
    if _PAGE.match(head) or _REFUSAL.match(head):
        return Kind("a page that a server sent in place of the file", "download the file again and look at "
                    "the address: most often it needs a login, or names a page about the file", True)
    return None


def _wide(head: bytes) -> str | None:
    """UTF-16 or UTF-32 without a mark, of which `head` is text. Its zeros alone do not say so: numbers have
    them, too."""
    if head.count(0) < 0.4 * len(head):
        return None
    for encoding in ("UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE"):
        try:
            text = codecs.getincrementaldecoder(encoding)().decode(head)  # whose last character may be cut
        except UnicodeDecodeError:
            continue
        if text and sum(char.isprintable() or char.isspace() for char in text) > 0.95 * len(text):
            return encoding
    return None


def check_kind(path: Path, head: bytes, wanted: str = "") -> None:
    """InputError where a file is of a kind that its name does not say. `wanted`: what it should be."""
    if (kind := kind_of(head)) is not None:
        raise InputError(f"{path} is {kind.what}{f', not {wanted}' if wanted else ''}; {kind.advice}")

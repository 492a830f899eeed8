"""JSONL, plain and compressed, and Parquet: the same documents; damaged files are refused by name."""

from __future__ import annotations

import builtins
import gzip
import json

import pytest

from threed.base.errors import InputError
from threed.data import compressed as packed
from threed.data import rows as subject
from threed.data.corpus import documents

TEXTS = [f"document {number}\nof two lines" for number in range(50)]
LINES = "\n".join(json.dumps({"id": number, "text": text}) for number, text in enumerate(TEXTS)).encode()


def test_gzip(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    assert list(documents(str(tmp_path), "text")) == TEXTS


def test_zstandard(tmp_path, monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    pack = zstandard.ZstdCompressor().compress
    half = LINES.index(b"\n", len(LINES) // 2) + 5  # two frames, cut inside a line
    (tmp_path / "a.jsonl.zst").write_bytes(pack(LINES[:half]) + pack(LINES[half:]))
    assert list(documents(str(tmp_path), "text")) == TEXTS
    monkeypatch.setattr(packed, "_READ_BYTES", 7)
    assert list(documents(str(tmp_path), "text")) == TEXTS


def test_parquet(tmp_path, monkeypatch):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"id": list(range(50)), "text": TEXTS}), tmp_path / "a.parquet")
    monkeypatch.setattr(subject, "_BATCH_ROWS", 7)
    assert list(documents(str(tmp_path), "text")) == TEXTS
    with pytest.raises(InputError, match=r"a.parquet, row 0: no field 'body' \(the fields are: id, text\)"):
        list(documents(str(tmp_path), "body"))
    with pytest.raises(InputError, match=r"field 'id' is a number, not a text, in all of 50 rows; set"):
        list(documents(str(tmp_path), "id"))


def test_text_of_parquet_that_is_not_utf8(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = pyarrow.array([b"fine", b"caf\xe9", b"good"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a.parquet, row 1: a text that is not UTF-8: .* at byte 3; of 3"):
        list(documents(str(tmp_path), "text"))


def test_text_of_parquet_that_is_not_marked_as_such(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": [b"one", b"caf\xc3\xa9"]}), tmp_path / "a.parquet")
    assert list(documents(str(tmp_path), "text")) == ["one", "caf\xe9"]
    parquet.write_table(pyarrow.table({"text": [b"\x89PNG"]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"row 0: field 'text' is binary, and not text in UTF-8: .* byte 0"):
        list(documents(str(tmp_path), "text"))


@pytest.mark.parametrize("name, library", [
    ("a.jsonl.gz", None), ("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
@pytest.mark.parametrize("damage", ["cut", "noise", "empty"])
def test_damaged_files(tmp_path, name, library, damage):
    module = pytest.importorskip(library) if library else gzip
    if library == "pyarrow":
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(module.table({"text": TEXTS}), tmp_path / name)
        whole = (tmp_path / name).read_bytes()
    else:
        whole = module.compress(LINES) if library is None else module.ZstdCompressor().compress(LINES)
    content = {"cut": whole[:len(whole) // 2], "noise": b"noise" * 20, "empty": b""}[damage]
    (tmp_path / name).write_bytes(content)
    says = "holds no text: it is empty" if damage == "empty" else f"{name} cannot be"
    with pytest.raises(InputError, match=says):
        list(documents(str(tmp_path / name), "text"))


@pytest.mark.parametrize("name, library", [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_library_that_is_missing(tmp_path, name, library, monkeypatch):
    find = builtins.__import__

    def missing(wanted, *rest, **named):
        if wanted.partition(".")[0] == library:
            raise ImportError(wanted)
        return find(wanted, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", missing)
    (tmp_path / name).write_bytes(b"something")
    with pytest.raises(InputError, match=rf"{name} needs the package {library}: pip install {library}"):
        list(documents(str(tmp_path), "text"))


def test_lines_keep_their_numbers(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "fine"}\n\nnot json\n'))
    with pytest.raises(InputError, match=r"a.jsonl.gz:3: not a line of JSON"):
        list(documents(str(tmp_path), "text"))

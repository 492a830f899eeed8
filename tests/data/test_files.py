"""Files of a source: each is used, said or refused, and named for what it is."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import struct

import pytest

from threed.base.errors import InputError
from threed.data import files as subject
from threed.data.corpus import documents, not_read, text_reader
from threed.data.corpus import read as read_all
from threed.data.files import list_files

ROWS = [{"text": f"document {number}"} for number in range(9)]
TEXTS = [row["text"] for row in ROWS]
LINES = "\n".join(map(json.dumps, ROWS)).encode()
LIST = json.dumps(ROWS).encode()
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def read(source):
    return list(documents(str(source), "text"))


def test_each_file_of_a_folder_is_read_or_said(tmp_path):
    root = tmp_path / "d"
    (root / "sub" / ".git").mkdir(parents=True)
    for name in ("a.jsonl", "sub/b.jsonl"):
        (root / name).write_bytes(LINES)
    (root / "z.gz").write_bytes(gzip.compress(b"x"))
    for name in ("p.png", "sub/q.png", "noname", "m.bin", "m.idx", "r.tar.gz"):
        (root / name).write_bytes(b"x")
    (root / "e.jsonl").write_bytes(b"")
    (root / ".hidden.txt").write_text("x")
    (root / "gone.txt").symlink_to("nowhere")
    (root / "info.json").write_text(json.dumps({"splits": 3}))
    (root / "README.md").write_text("about")
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "c.json").write_bytes(LIST)
    (root / "linked").symlink_to(tmp_path / "else")
    (root / "sub" / "loop").symlink_to(root)
    assert read(root) == ["about", *TEXTS, *TEXTS, *TEXTS]
    said, beside = not_read(str(root))
    for part in ("2 .png (", "1 .tar.gz (", "1 .gz (", "1 without a suffix (", "2 of Megatron's .bin/.idx",
                 "1 empty (", "2 hidden (", "1 dead link (", "1 link to a folder that is read already ("):
        assert part in said
    assert f"beside files of rows, 1 of text is a document ({root}/README.md)" in beside


def test_a_glob_says_what_it_leaves_out(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl").write_bytes(b"")
    (tmp_path / ".c.jsonl").write_bytes(LINES)
    (tmp_path / "d").symlink_to("nowhere")
    assert read(tmp_path / "*") == TEXTS
    (said,) = not_read(str(tmp_path / "*"))
    for part in ("1 folder (", "1 empty (", "1 hidden (", "1 dead link ("):
        assert part in said
    with pytest.raises(InputError, match=r"the glob matches no file; .*there are: 1 folder \("):
        read(tmp_path / "su*")
    with pytest.raises(InputError, match=r"is a link to nowhere, which does not exist"):
        read(tmp_path / "d")


def test_a_data_set_in_the_hubs_cache_is_read_once(tmp_path):
    root = tmp_path / "datasets--me--x"
    for commit in ("new", "old"):
        (root / "snapshots" / commit).mkdir(parents=True)
        (root / "snapshots" / commit / "a.jsonl").write_text(json.dumps({"text": commit}))
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("new")
    assert read(root) == ["new"] and not_read(str(root)) == []
    (root / "refs" / "main").write_text("gone")
    with pytest.raises(InputError, match="give the folder of one snapshot"):
        read(root)


def test_a_folder_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    def walk(root, onerror, **_):
        onerror(PermissionError(13, "Permission denied", f"{root}/closed"))
        return iter(())

    monkeypatch.setattr(subject.os, "walk", walk)
    with pytest.raises(InputError, match=r"closed cannot be read: Permission denied; check its permissions"):
        read(tmp_path)


@pytest.mark.parametrize("name, content", [
    ("a.json", LINES), ("a.json", LIST), ("a.json", json.dumps(ROWS, indent=2).encode()),
    ("a.json", b"\xef\xbb\xbf  " + LIST), ("a.json", b"\n\n" + LINES),
    ("a.json", "\n".join(json.dumps(row, indent=1) for row in ROWS).encode()),
    ("a.jsonl", b"\xef\xbb\xbf" + LINES), ("a.jsonl.xz", lzma.compress(LINES)),
    ("a.JSON.bz2", bz2.compress(LIST)), ("a.ndjson.gz", gzip.compress(LINES, mtime=0)),
])
def test_json_and_packed_files(tmp_path, monkeypatch, name, content):
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path) == read(tmp_path / name) == TEXTS
    monkeypatch.setattr("threed.data.rows._READ_BYTES", 5)
    assert read(tmp_path) == TEXTS


def test_numbers_in_a_list_of_json(tmp_path):
    """As json reads them: beyond 64 bits, and NaN, which is no JSON."""
    (tmp_path / "a.json").write_text(f'[{{"text": "one", "id": {10**30}}}, {{"text": "two", "id": NaN}}]')
    assert read(tmp_path) == ["one", "two"]


def test_a_packed_text_and_an_only_object(tmp_path):
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"one\r\ntwo"))
    (tmp_path / "b.json").write_text('{\n "text": "only"\n}')
    assert read(tmp_path) == ["one\r\ntwo", "only"]


@pytest.mark.parametrize("name, content, says", [
    ("a.jsonl", gzip.compress(LINES, mtime=0), "is packed by gzip, not JSON; give it a name that ends in "),
    ("a.jsonl", lzma.compress(LINES), "is packed by xz"),
    ("a.json", bz2.compress(LINES), "is packed by bzip2"),
    ("a.json", b"\x28\xb5\x2f\xfd....", "is packed by zstandard"),
    ("a.jsonl", b"PAR1....", "is a Parquet file"),
    ("a.jsonl.gz", LINES, "cannot be unpacked: it is not packed by gzip, but begins with"),
    ("a.jsonl.gz", lzma.compress(LINES), "is packed by xz, not packed by gzip"),
    ("a.jsonl", POINTER, "is a Git LFS pointer in place of the file, not JSON; fetch that with git lfs pull"),
    ("a.jsonl.xz", POINTER, "is a Git LFS pointer"), ("a.txt", POINTER, "a Git LFS pointer"),
    ("a.parquet", POINTER, "is a Git LFS pointer"),
    ("a.parquet", b"<!doctype html>", "is a page that a server sent"),
    ("a.jsonl", b" <HTML><head>", "is a page that a server sent in place of the file"),
    ("a.jsonl", b"<?xml version='1.0'?><Error>", "is a page that a server sent"),
    ("a.jsonl", LINES.decode().encode("utf-16"), "is text in UTF-16, not JSON; convert it: iconv"),
    ("a.jsonl", LINES.decode().encode("utf-16-le"), "is text in UTF-16LE.* iconv -f UTF-16LE"),
    ("a.txt", "text".encode("utf-32-be") * 9, "text in UTF-32BE: convert it"),
    ("a.txt", b"\xff\xff\xff\xff\x10\x01\0\0", "an Arrow stream"),
    ("a.dat", struct.pack("<300H", *range(300)), "binary data, no text"),
    ("a.st", b"\x20" + bytes(7) + b'{"a": {}}' + bytes(200), "binary data, no text"),
    ("a.jsonl.bz2", bz2.compress(LINES) + b"rest", "cannot be unpacked"),
    ("a.jsonl.xz", lzma.compress(LINES) + b"more", "cannot be unpacked"),
    ("a.txt", "text".encode("utf-16"), "holds no text .*text in UTF-16: convert it"),
    ("a.jsonl", bytes(5000), "is nothing but NUL bytes, as after a crash"),
    ("a.txt", bytes(99), "nothing but NUL"),
    ("a.txt", b"text" + bytes(9), "with NUL bytes: no text, or damaged by a crash"),
    ("a.jsonl", LINES + b"\n" + bytes(9), "a.jsonl:10: NUL bytes, no line of JSON: the file was damaged"),
    ("a.jsonl", b"", "holds no text: it is empty; copy or download it again"), ("a.txt", b"", "it is empty"),
    ("a.jsonl", LIST, "is one JSON list, not lines of JSON; give it a name that ends in .json"),
    ("a.json", LIST[:-20], "a.json: not JSON at item 8 of its list: .* damaged or cut short"),
    ("a.json", LIST + b"x", "the file goes on after its list"),
    ("a.json", b'[{"text": "a"} {}]', "] is missing"),
    ("a.json", b'[{"text": "\\ud800"}]', "a.json, item 0: field 'text' is not valid Unicode"),
    ("a.json", b"[" * 100_000, "not JSON at item 0 of its list"),
    ("a.jsonl.bz2", bz2.compress(LINES) + b"B" + bz2.compress(LINES)[2:], "cannot be unpacked"),
    ("a.jsonl.xz", lzma.compress(LINES) + b"_" + lzma.compress(LINES)[1:], "cannot be unpacked"),
    ("a.json", json.dumps({"data": ROWS}).encode(), "holds one object, and no field 'text' .*jq -c '.data"),
    ("a.json", b'{\n"text": "a",\n', "holds neither lines of JSON nor objects one after the other"),
    ("a.jsonl", b"PK\x03\x04", "is a zip archive"),
    ("a.jsonl.bz2", bz2.compress(LINES)[:-9], "cannot be unpacked"),
    ("a.jsonl.xz", lzma.compress(LINES)[:-9], "cannot be unpacked: .* damaged or cut short"),
])
def test_a_file_is_named_for_what_it_is(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=says):
        read(tmp_path / name)


@pytest.mark.parametrize("names, read", [
    ("data/train-00000-of-00001 data/validation-00000-of-00001 data/test-00000-of-00001", 1),
    ("train dev", 1), ("train valid val eval holdout held-out Evaluation", 1), ("train/a test/a dev/b", 1),
    ("en/train-0 en/test-0 de/train-0", 2), ("test/train-0 test/validation-0", 1), ("train_sft test_sft", 1),
    ("trainset testset dev_set", 1),
    ("wiki.train wiki.test", 1), ("TRAIN TEST2", 1), ("data test", 1), ("a b train test", 3),
    ("test-0 test-1", 2), ("latest contest devices attest trainer", 5)])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet", ".txt"])
def test_splits_that_are_held_out(names, read, suffix, tmp_path):
    """They are not read where there are others, and a line says so; a glob reads them, and a line says so."""
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}{suffix}").write_bytes(LINES)
    folder, pattern, count = str(tmp_path), f"{tmp_path}/**/*{suffix}", len(names.split())
    assert (len(list_files(folder).files), len(list_files(pattern).files)) == (read, count)
    lines = [*not_read(folder), *not_read(pattern)]
    if read == count:
        assert lines == []
    else:
        assert f": not read: {count - read} named as a validation or test split, which a glob" in lines[0]
        assert ": is trained on, though named as a validation or test split: " in lines[1]


def test_files_that_are_no_splits(tmp_path):
    """Source code has tests, too."""
    for name in ("train.py", "test_a.py", "tests/b.py", "test/c.py", "train.md", "test.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    assert len(list_files(str(tmp_path)).files) == 6


def test_a_row_names_its_split(tmp_path):
    rows = [{"text": "a", "split": "train"}, {"text": "b", "split": "test"}, {"text": "c", "split": 3}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said: list[str] = []
    assert len(list(read_all(str(tmp_path / "a.jsonl"), text_reader("text"), said.append))) == 3
    assert said[0].endswith(": there are rows: 1 of split 'test' by a field of the row, trained on "
                            f"({tmp_path}/a.jsonl:2)")


def test_a_glob_has_the_order_of_a_folder(tmp_path):
    for name in ("a-b", "a", "a.c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_bytes(LINES)
    assert list_files(f"{tmp_path}/*/*.jsonl").files == list_files(str(tmp_path)).files

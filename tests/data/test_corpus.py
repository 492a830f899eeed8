"""Every kind of source, and every bad one."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest

from threed.base.errors import InputError
from threed.data import corpus
from threed.data import files as listed
from threed.data.corpus import documents, fingerprint, text_reader


def read(source, text_key="text"):
    return list(documents(str(source), text_key))


def test_stdlib_filter(tmp_path, monkeypatch):
    for name in ("b.py", "a/x.py", "a/test/t.py", "tests/t.py", "site-packages/p.py", "lib/idle_test/i.py",
                 "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin.py").write_bytes(b"# \xe9\xff")
    (tmp_path / "empty.py").write_text("\n")
    monkeypatch.setattr(listed.sysconfig, "get_path", lambda name: str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read("python-stdlib") == ["a/x.py", "b.py"]
    assert fingerprint("python-stdlib", "text") == fingerprint("python-stdlib", "text")


def test_stdlib_is_about_12_mb():
    files = listed.list_files("python-stdlib").files
    assert len(files) > 400 and 8e6 < sum(path.stat().st_size for path in files) < 25e6
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)


def test_no_stdlib(tmp_path, monkeypatch):
    monkeypatch.setattr(listed.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    with pytest.raises(InputError, match="no standard library"):
        read("python-stdlib")


def test_folder_glob_and_file(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("two")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n")
    (tmp_path / "z.jsonl").write_text('{"text": "three"}\n\n{"text": " "}\n{"text": "four", "id": 1}')
    (tmp_path / "x.unknown").write_text("five")
    (tmp_path / ".hidden.txt").write_text("no")
    assert read(tmp_path) == ["one\r\n", "two", "three", "four"]
    assert read(tmp_path / "*.txt") == ["one\r\n"]
    assert read(tmp_path / "**" / "*.md") == ["two"]
    assert read(tmp_path / "x.unknown") == ["five"]
    assert read(tmp_path / "z.jsonl") == ["three", "four"]


def test_fingerprint_follows_content_only(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two" / "deep"
    one.mkdir()
    (one / "a.txt").write_text("hello")
    (one / "b.txt").write_text("world")
    shutil.copytree(one, two)
    before = fingerprint(str(one), "text")
    assert before == fingerprint(str(two), "text") == fingerprint(str(one / "*.txt"), "text")
    assert before == fingerprint(str(one), "body")  # no JSONL: the field has no say
    (two / "a.txt").write_text("hello!")
    assert before != fingerprint(str(two), "text")
    (one / "a.txt").write_text("hellow")  # the same bytes, cut elsewhere
    (one / "b.txt").write_text("orld")
    assert before != fingerprint(str(one), "text")


def test_fingerprint_of_jsonl_depends_on_the_field(tmp_path):
    line = json.dumps({"text": "a", "body": "b"})
    (tmp_path / "a.jsonl").write_text(line)
    (tmp_path / "a.txt").write_text(line)
    corpora = [("a.jsonl", "text"), ("a.jsonl", "body"), ("a.txt", "text")]
    assert len({fingerprint(str(tmp_path / name), key) for name, key in corpora}) == 3


@pytest.mark.parametrize("name, says", [
    ("missing", "does not exist"), ("missing.txt", "does not exist"), ("missing.bin", "does not exist"),
    ("*.txt", "matches no file"), ("empty", "no file with one of the suffixes"),
    ("odd", "no file with one of"),
    ("blank.md", r"holds no text \(1 of white space alone .*; give"), ("latin.md", "1 not UTF-8"),
    ("data.json", "data.json holds one object, and no field 'text' in it"),
])
def test_no_text(tmp_path, name, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "a.xyz").write_text("text")
    (tmp_path / "blank.md").write_text(" \n\t")
    (tmp_path / "latin.md").write_bytes(b"caf\xe9")
    (tmp_path / "data.json").write_text("{}")
    with pytest.raises(InputError, match=says):
        fingerprint(str(tmp_path / name), "text")
        read(tmp_path / name)


def test_not_utf8_is_counted(tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    said = []
    found = list(corpus.read(str(tmp_path), text_reader("text"), said.append))
    assert [segments[0].text for segments in found] == ["fine"]
    assert said == [f"data.source={tmp_path}: files are skipped: 1 not UTF-8 ({tmp_path / 'b.txt'}), 1 of "
                    "another kind, text in UTF-16: convert it: iconv -f UTF-16 -t UTF-8 "
                    f"({tmp_path / 'c.txt'}); mend them to use them"]


@pytest.mark.parametrize("line, says", [
    (b'{"text": ', "not a line of JSON"), (b'{"text": "caf\xe9"}', "not a line of JSON"),
    (b'["text"]', "a list, not an object"),
    (b"[" * 100_000, "not a line of JSON"),
    (b'{"body": "b", "id": 2}', r"no field 'text' \(the fields are: body, id\) \(here field 'body' would fi"),
    (b"{}", "none"), (b'{"text": 3}', "is a number, not a text; of 2 rows of a.jsonl 1 is so"),
    (b'{"text": null}', "'text' is null, not a text; .* 1 is so; repair it, or set data.on_bad"),
    (b'{"text": "\\ud800"}', "not valid Unicode"),
])
def test_bad_jsonl_names_file_and_line(tmp_path, line, says):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(InputError, match=says) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:3: ")

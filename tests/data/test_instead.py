"""What is given in place of a tokenizer.json is named for what it is, with how to get one."""

from __future__ import annotations

import base64
import gzip
import json

import pytest

from tests.data.files import word_level
from threed.base.errors import InputError
from threed.data.tokenizer import load

CONVERT = (r"transformers, .* installed, writes one: .*from_pretrained\('.*'\).save_pretrained\('OUT'\).*"
           r"data.tokenizer=OUT")
PIECE = b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02"  # message 1 of a model of SentencePiece
PAD = b"\n\x10\n\x07[START]\x15\0\0\0\0\x18\x03"
TIKTOKEN = b"".join(base64.b64encode(bytes([at])) + b" %d\n" % at for at in range(9))


@pytest.mark.parametrize("name, content, says", [
    ("tokenizer.model", PIECE, f"is a SentencePiece model, not a tokenizer.json; {CONVERT}"),
    ("spiece.model", PAD + PIECE, "is a SentencePiece model"),
    ("tokenizer.json", PIECE, "is a SentencePiece model"),
    ("tokenizer.model", TIKTOKEN, f"is a tiktoken vocabulary, not a tokenizer.json; {CONVERT}"),
    ("qwen.tiktoken", TIKTOKEN.replace(b"\n", b"\r\n"), "is a tiktoken vocabulary"),
    ("vocab.json", b'{"a": 0, "b": 1}', f"a vocabulary alone, whose merges are in another file.*{CONVERT}"),
    ("merges.txt", b"#version: 0.2\na b\n", f"holds the merges of a BPE.*{CONVERT}"),
    ("vocab.txt", b"[PAD]\n[UNK]\n", "is a word list of BERT"),
    ("tokenizer_config.json", b'{"tokenizer_class": "X", "eos_token": ""}', "is the settings of a tokenizer"),
    ("config.json", b'{"model_type": "llama", "hidden_size": 8}', "is the config of a model"),
    ("tekken.json", b'{"config": {}, "vocab": [], "special_tokens": []}', "is a tokenizer of Mistral's"),
    ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer.*git lfs pull"),
    ("tokenizer.json", b"<!DOCTYPE html>", "is a page that a server sent in place of the file"),
    ("tokenizer.json", b"", "is empty, no tokenizer.json: the download or copy did not end"),
    ("tokenizer.json", b" \n", "is empty"), ("tokenizer.json", bytes(99), "is nothing but NUL bytes"),
    ("tokenizer.json", gzip.compress(b"{}", mtime=0), "is packed by gzip"),
    ("tokenizer.json", b"null", "is JSON, but null is no object, so no tokenizer.json; docs/tokenizers.md"),
    ("tokenizer.json", b"{}", r"is JSON, but no tokenizer.json: it has no model \(the fields are: none\)"),
    ("tokenizer.json", b'{"error": "x"}', r"it has no model \(the fields are: error\); docs/tokenizers.md"),
    ("t.json", b"PK\x03\x04", "is a zip archive"),
    ("tokenizer.json", '{"model": 1}'.encode("utf-16"), "is text in UTF-16"),
    ("tokenizer.json", b'{"version": "1.0", ', r"is not JSON \(.*damaged or cut short; docs/tokenizers.md"),
    ("tokenizer.json", b'{"version": "1.0", "model": {"type": "XYZ"}, "added_tokens": []}',
     "is not a tokenizer.json of the Hugging Face tokenizers library: .*docs/tokenizers.md"),
])
def test_a_file_of_another_kind(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"{name} {says}" if says.startswith("is") else says):
        load(tmp_path / name)


@pytest.mark.parametrize("names, says", [
    (["tokenizer.model"], f"but tokenizer.model, of SentencePiece or tiktoken; .*{CONVERT}"),
    (["tokenizer.model.v3"], "but tokenizer.model.v3"), (["qwen.tiktoken"], "but qwen.tiktoken"),
    (["vocab.json", "merges.txt"], f"but vocab.json and merges.txt, the two parts of a BPE; .*{CONVERT}"),
    (["vocab.txt"], "but vocab.txt"), (["spiece.model"], "but spiece.model"),
    (["config.json"], "has no tokenizer.json; docs/tokenizers.md says how to get"),
])
def test_a_folder_without_one(tmp_path, names, says):
    for name in names:
        (tmp_path / name).write_text("x")
    with pytest.raises(InputError, match=f"has no tokenizer.json, {says}" if "but" in says else says):
        load(tmp_path)


def test_a_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "meta-llama/Llama-3.1-8B"):
        says = rf"hf download {name} tokenizer.json tokenizer_config.json --local-dir {name}; then data.tok"
        with pytest.raises(InputError, match=says):
            load(name)
    with pytest.raises(InputError, match=r"and cl100k_base is a vocabulary of tiktoken; docs/tokenizers.md"):
        load("cl100k_base")
    folder = tmp_path / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    with pytest.raises(InputError, match=rf"hub's cache: set data.tokenizer={folder.parents[1]}$"):
        load("meta-llama/Llama-3.1-8B")
    word_level(folder / "tokenizer.json", "a", "</s>")
    assert load(folder.parents[1]).eod == load(folder).eod == 1
    with pytest.raises(InputError, match=r"tokenizer.model cannot be read as a tokenizer"):
        load("tokenizer.model")  # a file that is not there, no model of the hub
    with pytest.raises(InputError, match=r"/none/t.json cannot be read as a tokenizer: No such file"):
        load("/none/t.json")
    (tmp_path / "link.json").symlink_to("gone")
    with pytest.raises(InputError, match=r"data.tokenizer=link.json: link.json is a link to gone, which"):
        load("link.json")


def test_a_packed_one_is_to_be_unpacked(tmp_path):
    """No other name helps, as it does for a source."""
    (tmp_path / "tokenizer.json").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(InputError, match=r"is packed by gzip, not a tokenizer.json; unpack it$"):
        load(tmp_path)


def test_a_folder_with_a_dead_link(tmp_path):
    (tmp_path / "tokenizer.json").symlink_to("../blobs/x")
    with pytest.raises(InputError, match=r"tokenizer.json is a link to ../blobs/x, which does not exist"):
        load(tmp_path)


def test_settings_beside_a_tokenizer_lead_to_it(tmp_path):
    word_level(tmp_path / "tokenizer.json", "a", "</s>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    with pytest.raises(InputError, match=rf"; give {tmp_path}/tokenizer.json, which lies beside it"):
        load(tmp_path / "tokenizer_config.json")

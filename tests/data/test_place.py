"""Where a tokenizer lies, and which token ends a document."""

from __future__ import annotations

import json

import pytest
import tokenizers

from tests.data.files import word_level
from threed.base.errors import InputError
from threed.data.tokenizer import load
from threed.data.tokenizer_files import snapshot, tokenizer_file


def put(folder, **files):
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))


def test_end_token_is_the_one_beside_it(tmp_path):
    word_level(tmp_path / "tokenizer.json", "?", "a", "<end>", "</s>", "<stop>")
    assert load(tmp_path).eod == 3  # by its name
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.add_special_tokens(["<stop>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    put(tmp_path, config={"eos_token_id": 2})
    assert load(tmp_path).eod == 3  # 2 is no special token: a model's default
    put(tmp_path, config={"eos_token_id": [4, 2]})
    assert load(tmp_path).eod == 4
    put(tmp_path, generation_config={"eos_token_id": 99})  # the tokenizer has no such token
    put(tmp_path, special_tokens_map={"eos_token": {"content": "<end>"}})
    assert load(tmp_path).eod == 2
    put(tmp_path, tokenizer_config={"eos_token": "a"})
    assert load(tmp_path / "tokenizer.json").eod == 1
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match=r"tokenizer_config.json is not JSON"):
        load(tmp_path)


def test_a_model_in_the_cache_of_the_hub(tmp_path):
    root = tmp_path / "models--me--tiny"
    (root / "snapshots").mkdir(parents=True)
    with pytest.raises(InputError, match="no snapshot: the download did not end"):
        snapshot(root)
    for name in ("abc", "def"):
        (root / "snapshots" / name).mkdir()
    with pytest.raises(InputError, match=r"its snapshots are .*abc, .*def; give the folder of one"):
        tokenizer_file(root)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("def\n")
    assert snapshot(root) == snapshot(root / "snapshots") == root / "snapshots" / "def"
    assert tokenizer_file(root) == root / "snapshots" / "def" / "tokenizer.json"
    assert snapshot(root / "snapshots" / "abc") == root / "snapshots" / "abc"
    assert tokenizer_file(tmp_path / "x.json") == tmp_path / "x.json"

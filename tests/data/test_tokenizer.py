"""Training is deterministic and lossless; a file that is none is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models

from tests.data.files import word_level
from threed.base.errors import InputError
from threed.data import tokenizer as subject
from threed.data.tokenizer import EOD, PIECE_CHARS, load, pieces, train

TEXTS = [f"def function_{i}(argument):\n    return argument * {i}  # ünïcode 日本 🙂\n" * 5
         for i in range(40)]


def test_train_and_load(tmp_path):
    path = tmp_path / "tokenizer.json"
    trained, loaded = train(TEXTS, 300, path), load(path)
    assert trained.vocab_size == loaded.vocab_size == 300
    assert trained.eod == loaded.eod == 0
    texts = [*TEXTS[:3], "\x00 bytes never seen: \u1234\r\n\t", f"a {EOD} inside a text is text"]
    ids = loaded.encode_batch(texts)
    assert ids == trained.encode_batch(texts)
    assert [loaded.decode(row) for row in ids] == texts
    assert all(0 < id < 300 for row in ids for id in row)
    assert loaded.decode([0]) == EOD


def test_training_is_deterministic_across_processes(tmp_path):
    code = ("import sys; from threed.data.tokenizer import train; "
            "train([f'word{i % 17} other{i % 5} ' * 3 for i in range(200)], 400, sys.argv[1])")
    root = str(Path(subject.__file__).parents[2])
    for name, hash_seed in (("a", "1"), ("b", "2")):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=True,
                       env={**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": hash_seed})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_small_corpus_gives_a_smaller_vocabulary(tmp_path):
    assert train(["aaaa"], 1000, tmp_path / "t.json").vocab_size < 300


def test_too_small_a_vocabulary(tmp_path):
    with pytest.raises(InputError, match=r"model\.vocab=256 .*at least 257"):
        train(TEXTS, 256, tmp_path / "t.json")
    assert train(TEXTS, 257, tmp_path / "t.json").vocab_size == 257


def test_pieces_join_to_the_text():
    for text in ("short", "x" * (3 * PIECE_CHARS + 1), "a line\n" * PIECE_CHARS, ""):
        cut = list(pieces(text))
        assert "".join(cut) == text and max(map(len, cut)) <= PIECE_CHARS
    assert all(piece.endswith("\n") for piece in pieces("a line\n" * PIECE_CHARS))


def test_sample_spans_the_corpus():
    kept = subject._sample((f"{i:04}" for i in range(1000)), limit=400)
    assert kept == [f"{i:04}" for i in range(0, 1000, 16)]
    assert subject._sample(["ab", "cd"], limit=400) == ["ab", "cd"]
    assert subject._sample(["long" * 100], limit=4) == ["long" * 100]


def test_a_file_that_pads_and_truncates(tmp_path):
    loaded = load(word_level(tmp_path / "t.json", "a", "b", "</s>"))
    assert loaded.encode_batch(["a b a", "b"]) == [[0, 1, 0], [1]]
    assert loaded.eod == 2


@pytest.mark.parametrize("name, eod", [(name, 1) for name in subject.EOD_NAMES] + [("<end>", None)])
def test_end_of_text_is_found_by_name(tmp_path, name, eod):
    assert load(word_level(tmp_path / "t.json", "a", name)).eod == eod


def test_vocab_size_is_the_largest_id(tmp_path):
    path = tmp_path / "t.json"
    tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 41}, unk_token="a")).save(str(path))
    assert load(path).vocab_size == 42


@pytest.mark.parametrize("content", [b"{not json", b'{"model": 3}', b"\xff\xfe", None])
def test_bad_files(tmp_path, content):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=r"t\.json .*tokenizer"):
        load(path)
    with pytest.raises(InputError, match=r"has no tokenizer.json; docs/tokenizers.md says how"):
        load(tmp_path)

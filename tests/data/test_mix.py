"""Mixtures have exactly their shares, and go on from any sample."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from tests.data.files import word_level, write
from threed.base.errors import ConfigError, InputError
from threed.config.load import load
from threed.data import tokens
from threed.data.mix import MOST, Mixture, open_splits, report, sources
from threed.data.samples import Split, Tokens
from threed.data.tokenizer import load as load_tokenizer
from threed.data.tokens import prepare
from threed.schema import DataConfig, ModelConfig

MODEL = ModelConfig(vocab=300)


def split(path, first: int, seed: int) -> Split:
    stream = Tokens(write(path, [list(range(first, first + 97))]))
    return Split(stream, 0, 97, 8, seed)


@pytest.fixture
def mixture(tmp_path):
    return Mixture([split(tmp_path / str(first), first, first) for first in (0, 1000, 2000)],
                   [Fraction("0.5"), Fraction("0.3"), Fraction("0.2")])


def test_shares_are_exact(mixture):
    taken = [mixture.at(index) for index in range(1000)]
    assert Counter(number for number, _ in taken) == {0: 500, 1: 300, 2: 200}
    for start in range(0, 1000, 10):  # a block
        assert Counter(number for number, _ in taken[start:start + 10]) == {0: 5, 1: 3, 2: 2}
    for count in range(1, 1000):  # never far from its share, at any moment
        assert abs(sum(number == 1 for number, _ in taken[:count]) - 0.3 * count) < 1


def test_each_source_is_read_in_its_own_order(mixture):
    for number, part in enumerate(mixture.parts):
        mine = [own for source, own in map(mixture.at, range(500)) if source == number]
        assert mine == list(range(len(mine)))
        first = next(index for index in range(10) if mixture.at(index)[0] == number)
        assert np.array_equal(mixture.sample(first).inputs, part.sample(0).inputs)


def test_a_sample_is_a_function_of_its_index(mixture, tmp_path):
    """A resumed run has another reader, which begins in the middle of an epoch of each source."""
    whole = [mixture.sample(index).inputs.tolist() for index in range(60)]
    again = Mixture(mixture.parts, [Fraction(5), Fraction(3), Fraction(2)])
    assert whole[37:] == [again.sample(index).inputs.tolist() for index in range(37, 60)]
    assert mixture.count(3, 40) == 37 * 8 and mixture.positions(5).tolist() == list(range(8))


def test_weights_that_need_a_long_block_are_rounded(tmp_path):
    parts = [split(tmp_path / name, 0, 0) for name in "abc"]
    mixture = Mixture(parts, [Fraction("0.33333"), Fraction("0.66666"), Fraction("0.00001")])
    assert sum(mixture.shares) == MOST and mixture.shares == [3333, 6666, 1]


@pytest.mark.parametrize("mix, says", [
    (["half web"], r"data.mix\[0\]: 'half web' is not a weight above 0 and a source"),
    (["0.5 a", "0 b"], r"data.mix\[1\]: '0 b' is not"), (["-1 a"], "above 0"), (["0.5"], "and a source"),
    (["1/0 a"], "above 0"), ([], "one of them names the data"),
])
def test_bad_weights(mix, says):
    with pytest.raises(ConfigError, match=says):
        load(None, [f"data.mix={mix}"])


def test_one_of_source_and_mix(tmp_path):
    with pytest.raises(ConfigError, match="one of them names the data"):
        load(None, ["data.mix=['1 a']", "data.source=b"])


def text(tmp_path, name: str, word: str) -> str:
    (tmp_path / name).mkdir(exist_ok=True)
    for number in range(20):
        (tmp_path / name / f"{number}.txt").write_text(f"{word} {number} " * 30)
    return str(tmp_path / name)


def test_sources_share_a_tokenizer(tmp_path):
    one, two = text(tmp_path, "one", "alpha"), text(tmp_path, "two", "omega")
    data = DataConfig(mix=[f"3 {one}", f"1 {two}"], cache=str(tmp_path / "cache"))
    prepared = prepare(data, MODEL)
    assert [len(prepared.parts), prepared.num_documents, prepared.cached] == [2, 40, False]
    assert prepared.tokenizer is not None
    first, second = (each.tokenizer.read_bytes() for each in prepared.parts if each.tokenizer is not None)
    assert first == second
    tokenizer = load_tokenizer(prepared.tokenizer)
    assert len(tokenizer.encode_batch(["alpha"])[0]) < 5 > len(tokenizer.encode_batch(["omega"])[0])
    assert prepare(data, MODEL).cached
    config = load(None, [f"data.mix=['3 {one}','1 {two}']", "model.seq_len=16", "model.vocab=300"])
    training, validation = open_splits(config, prepared)
    assert isinstance(training, Mixture) and training.shares == [3, 1] and validation.num_windows > 1
    lines = report(config, training)
    assert lines[0].startswith("data.mix: 75.00% of samples from ") and "epochs in train.steps" in lines[0]


def test_each_source_is_hashed_once(tmp_path, monkeypatch):
    """Its hash takes as long as reading all of it; the tokenizer of all sources needs each hash, too."""
    read, original = [], tokens.fingerprint
    monkeypatch.setattr(tokens, "fingerprint", lambda *which: (read.append(which[0]), original(*which))[1])
    files = [str(text(tmp_path, name, name * 3)) for name in ("one", "two", "three")]
    prepare(DataConfig(mix=[f"1 {file}" for file in files], cache=str(tmp_path / "cache")), MODEL)
    assert sorted(read) == sorted(files)


def test_megatron_data_and_text_need_a_tokenizer(tmp_path):
    one, two = text(tmp_path, "one", "alpha"), write(tmp_path / "two", [[1, 2, 3]] * 9)
    data = DataConfig(mix=[f"1 {one}", f"1 {two}"], cache=str(tmp_path / "cache"))
    with pytest.raises(InputError, match="two, which holds tokens, and sources of text: give the tokenizer"):
        prepare(data, MODEL)
    data.tokenizer = str(word_level(tmp_path / "tokenizer.json", "?", "<eos>", "alpha", "omega"))
    assert [each.num_documents for each in prepare(data, MODEL).parts] == [20, 9]


def test_no_mix_is_one_source():
    assert sources(DataConfig(source="a")) == [(1, DataConfig(source="a"))]


def lines_of(tmp_path, *overrides: str) -> list[str]:
    """What a run says of its data."""
    config = load(None, [f"data.source={text(tmp_path, 'own', 'some words ')}", "model.vocab=300",
                         f"data.cache={tmp_path / 'cache'}", "model.seq_len=16", *overrides])
    return report(config, *open_splits(config, prepare(config.data, config.model)))


def test_how_often_one_source_is_seen_is_said(tmp_path):
    lines = lines_of(tmp_path, "train.steps=40", "train.global_batch_size=32")
    windows = int(lines[0].split(" windows")[0].split()[-1])
    assert lines[0].endswith(f"own, {windows} windows, {1280 / windows:.2f} epochs in train.steps")
    assert lines[1].startswith("held out for validation: ") and lines[1].endswith(" windows")
    few = lines_of(tmp_path, "train.steps=1", "train.global_batch_size=8", "train.eval_every=1")
    assert f"{8 / windows:.2f} epochs" in few[0] and "of which an evaluation sees 2.67 epochs" in few[1]
    assert len(lines_of(tmp_path, "data.validation_fraction=0")) == 1


def test_what_fills_no_window_is_said(tmp_path):
    (line,) = (line for line in lines_of(tmp_path, "model.seq_len=700", "data.validation_fraction=0")
               if line.startswith("warning"))
    assert "tokens are left over at the end: a window needs model.seq_len + 1 = 701" in line
    packed = lines_of(tmp_path, "model.seq_len=8", "data.packing=best-fit")
    assert any("documents of more than model.seq_len + 1 = 9 tokens are cut into several windows" in line
               for line in packed)

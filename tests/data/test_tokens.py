"""Prepared data: what is written, the cache, two builders at once, Megatron data in place."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.files import word_level, write
from threed.base.errors import InputError
from threed.data import encode
from threed.data import megatron as in_place
from threed.data import tokens as subject
from threed.data.cache import entries
from threed.data.samples import Tokens
from threed.data.tokenizer import PIECE_CHARS, load
from threed.data.tokens import prepare
from threed.schema import DataConfig, ModelConfig

TEXTS = [f"document {i}: " + "some words and more words\n" * (i % 7 + 1) for i in range(30)]
MODEL = ModelConfig(vocab=300)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"{i:02}.txt").write_text(text)
    return folder


def config(source, tmp_path, **values) -> DataConfig:
    return DataConfig(source=str(source), cache=str(tmp_path / "cache"), **values)


def folders(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").iterdir())


def texts_of(prepared) -> list[str]:
    tokens, tokenizer = Tokens(prepared.prefix), load(prepared.tokenizer)
    return [tokenizer.decode(ids.tolist()) for ids in np.split(tokens.stream, tokens.document_ends[:-1])]


def test_importing_is_cheap():
    code = (
        "import sys, threed.data.tokens; sys.exit(any(name in sys.modules for name in ('torch', 'megatron')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(subject.__file__).parents[2])


def test_prepare(source, tmp_path):
    lines = []
    prepared = prepare(config(source, tmp_path), MODEL, lines.append)
    assert (prepared.num_documents, prepared.vocab_size, prepared.eod, prepared.cached) == (30, 300, 0, False)
    texts = texts_of(prepared)
    expected = [text + "<|endoftext|>" for text in TEXTS]
    assert sorted(texts) == sorted(expected)
    assert texts != expected  # shuffled
    meta = json.loads((prepared.prefix.parent / "meta.json").read_text())
    assert meta["num_tokens"] == prepared.num_tokens == Tokens(prepared.prefix).num_tokens
    assert [line.split()[0] for line in lines] == ["training", "trained", "encoded", "shuffled", "prepared"]
    assert sorted(path.name for path in prepared.prefix.parent.iterdir()) == [
        "meta.json", "tokenizer.json", "tokens.bin", "tokens.crc32", "tokens.idx"]


def test_megatron_reads_the_same(source, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prepared = prepare(config(source, tmp_path), MODEL)
    theirs, ours = IndexedDataset(str(prepared.prefix)), Tokens(prepared.prefix)
    assert len(theirs) == ours.num_documents
    for i, ids in enumerate(np.split(ours.stream, ours.document_ends[:-1])):
        document = np.asarray(theirs[i])
        assert document.dtype == ids.dtype and document.tolist() == ids.tolist()


def test_cache_follows_content_and_settings(source, tmp_path):
    first = prepare(config(source, tmp_path), MODEL)
    lines = []
    again = prepare(config(source, tmp_path), MODEL, lines.append)
    assert again.cached and again.prefix == first.prefix and len(lines) == 1 and lines[0].startswith("found")
    moved = source.rename(tmp_path / "elsewhere")
    assert prepare(config(moved, tmp_path, text_key="body"), MODEL).prefix == first.prefix
    others = [prepare(config(moved, tmp_path, append_eod=False), MODEL),
              prepare(config(moved, tmp_path), ModelConfig(vocab=290)),
              prepare(config(moved, tmp_path, tokenizer=str(first.tokenizer)), MODEL)]
    (moved / "new.txt").write_text("more")
    others.append(prepare(config(moved, tmp_path), MODEL))
    assert not any(other.cached for other in others)
    assert len({first.prefix, *(other.prefix for other in others)}) == 5 == len(folders(tmp_path))
    assert sorted(texts_of(others[0])) == sorted(TEXTS)
    assert Path(f"{others[2].prefix}.bin").read_bytes() == Path(f"{first.prefix}.bin").read_bytes()


def test_equal_bytes_in_another_cache(source, tmp_path):
    one, two = (prepare(DataConfig(source=str(source), cache=str(tmp_path / name)), MODEL).prefix
                for name in "ab")
    for name in ("tokens.bin", "tokens.idx", "tokenizer.json", "meta.json"):
        assert (one.parent / name).read_bytes() == (two.parent / name).read_bytes()


def test_default_cache(source, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert prepare(DataConfig(source=str(source)), MODEL).prefix.is_relative_to(tmp_path / "xdg" / "threed")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    home = prepare(DataConfig(source=str(source)), MODEL).prefix
    assert home.is_relative_to(tmp_path / "home" / ".cache" / "threed")


def test_long_documents_and_many_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BATCH_CHARS", 1000)
    path = tmp_path / "a.jsonl"
    texts = ["long " * (PIECE_CHARS // 2), *TEXTS]
    path.write_text("\n".join(json.dumps({"body": text}) for text in texts))
    prepared = prepare(config(path, tmp_path, text_key="body"), MODEL)
    assert sorted(texts_of(prepared)) == sorted(text + "<|endoftext|>" for text in texts)


def test_two_at_once(source, tmp_path):
    data = config(source, tmp_path)
    with multiprocessing.get_context("fork").Pool(2) as pool:  # spawned ones would each import megatron.core
        one, two = pool.starmap(prepare, [(data, MODEL)] * 2, chunksize=1)
    assert one.prefix == two.prefix and one.num_tokens == two.num_tokens
    assert folders(tmp_path) == [one.prefix.parent.name]


def test_second_builder_keeps_the_first_ones_data(source, tmp_path, monkeypatch):
    data, fill = config(source, tmp_path), subject._fill

    def overtaken(*args):
        fill(*args)
        monkeypatch.setattr(subject, "_fill", fill)
        prepare(data, MODEL)
        (other,) = (path for path in (tmp_path / "cache").iterdir() if path.suffix != ".tmp")
        (other / "first").touch()

    monkeypatch.setattr(subject, "_fill", overtaken)
    prepared = prepare(data, MODEL)
    assert (prepared.prefix.parent / "first").exists() and len(folders(tmp_path)) == 1


def test_an_interrupted_build_leaves_nothing(source, tmp_path, monkeypatch):
    def stop(line):
        if line.startswith("encoded"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config(source, tmp_path), MODEL, stop)
    assert folders(tmp_path) == []
    with monkeypatch.context() as patch:
        patch.setattr(subject.shutil, "rmtree", lambda *args, **kwargs: None)  # killed: no time to clean up
        with pytest.raises(KeyboardInterrupt):
            prepare(config(source, tmp_path), MODEL, stop)
    assert [name.endswith(".tmp") for name in folders(tmp_path)] == [True]
    assert not prepare(config(source, tmp_path), MODEL).cached


def test_full_disk(source, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(subject.json, "dumps", full)
    says = r"written to .*cache: No space left on device; make room there, or set data.cache to a folder on"
    with pytest.raises(InputError, match=says):
        prepare(config(source, tmp_path), MODEL)
    assert folders(tmp_path) == []


def test_cache_that_cannot_be_made(source, tmp_path, monkeypatch):
    """A file, a folder in one, a name that is too long: no room is missing."""
    (tmp_path / "cache").write_text("a file")
    for cache, why in (("cache", "Not a dir"), ("cache/x", "Not a dir"), ("x" * 300, "name too long")):
        says = f"prepared data cannot be written to .*{cache}: .*{why}.*; set data.cache to a folder that can"
        with pytest.raises(InputError, match=says):
            prepare(replace(config(source, tmp_path), cache=str(tmp_path / cache)), MODEL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(InputError, match=r"/threed \(data.cache is not set\): "):
        prepare(replace(config(source, tmp_path), cache=None), MODEL)
    with pytest.raises(InputError, match="cannot be read as a cache of prepared data: Not a directory"):
        entries(tmp_path / "cache")


@pytest.mark.parametrize("name, change", [
    ("tokens.bin", lambda path: path.write_bytes(path.read_bytes()[:-2])),
    ("meta.json", lambda path: path.write_text("{")),
    ("tokenizer.json", lambda path: path.unlink()),
])
def test_damaged_cache(source, tmp_path, name, change):
    folder = prepare(config(source, tmp_path), MODEL).prefix.parent
    change(folder / name)
    with pytest.raises(InputError, match=f"damaged: .*\ndelete the folder {folder} "):
        prepare(config(source, tmp_path), MODEL)


def flip(path: Path, *places: int) -> None:
    """Another bit at each of these bytes."""
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 1 << place % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "tokens.crc32", "tokenizer.json", "meta.json"])
@pytest.mark.parametrize("every", [64, None])
def test_flipped_bits(source, tmp_path, name, every):
    """A bit in every 64th byte, or one alone, of any file: trained on without a word."""
    folder = prepare(config(source, tmp_path), MODEL).prefix.parent
    size = (folder / name).stat().st_size
    flip(folder / name, *(range(0, size, every) if every else [size // 2]))
    with pytest.raises(InputError, match=f"damaged: .*\ndelete the folder {folder} "):
        prepare(config(source, tmp_path), MODEL)


def test_a_changed_number(source, tmp_path):
    """A meta.json that can be read and says something else."""
    path = prepare(config(source, tmp_path), MODEL).prefix.parent / "meta.json"
    path.write_text(path.read_text().replace('"eod": 0', '"eod": 1'))
    with pytest.raises(InputError, match="does not have its own checksum"):
        prepare(config(source, tmp_path), MODEL)


def test_long_streams_are_checked_as_they_are_read(source, tmp_path, monkeypatch):
    """A stream too long to be read at each start: a damaged block is refused when a sample comes from it, and
    only then."""
    from threed.data import samples

    monkeypatch.setattr(samples, "BLOCK_BYTES", 64)
    monkeypatch.setattr(subject, "BLOCK_BYTES", 64)
    prefix = prepare(config(source, tmp_path), MODEL).prefix
    monkeypatch.setattr(subject, "_CHECK_BYTES", 0)
    flip(Path(f"{prefix}.bin"), 1000)
    assert prepare(config(source, tmp_path), MODEL).cached
    split, _ = samples.splits(prefix, 16, 1, 0.1)
    bad = 1000 // 64 * 32  # the block's first token
    failed = set()
    for index in range(split.num_windows):
        try:
            split.window(index)
        except InputError as error:
            assert f"tokens.bin: tokens {bad} to {bad + 31} do not have the checksum" in str(error)
            failed.add(index)
    assert 2 <= len(failed) <= 4 < split.num_windows


def test_an_id_out_of_range(tmp_path):
    """Of Megatron's data only a sample is looked at before the run: later the file and the place are
    named."""
    from threed.data.samples import splits

    prefix = write(tmp_path / "m", [[1] * 40, [1] * 15 + [500] + [1] * 4])
    split, _ = splits(prefix, 8, 1, 0, vocab=300)
    with pytest.raises(InputError,
                       match=r"m.bin holds token 500 at position 55, in sample \d, but .* allows 0 to 299"):
        [split.window(index) for index in range(split.num_windows)]


def begin(data: DataConfig, note: str) -> None:
    """Prepare until the first line that begins with `note`, then wait to be killed."""

    def stop(line: str) -> None:
        while line.startswith(note):
            time.sleep(0.1)

    prepare(data, MODEL, stop)


@pytest.mark.parametrize("note", ["training", "encoded"])
def test_a_killed_build_is_removed(source, tmp_path, note):
    """SIGKILL leaves a folder, which the next start removes; not one that is being built now, nor a folder
    without a lock that may have been made this moment."""
    data = config(source, tmp_path)
    context = multiprocessing.get_context("fork")
    builders = [context.Process(target=begin, args=(data, note)) for _ in range(2)]
    for builder in builders:
        builder.start()
    until = time.monotonic() + 60
    while len(list((tmp_path / "cache").glob("*.tmp/lock"))) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    builders[0].kill()
    builders[0].join()
    (tmp_path / "cache" / "new.tmp").mkdir()
    (tmp_path / "cache" / "old.tmp").mkdir()
    os.utime(tmp_path / "cache" / "old.tmp", (1, 1))
    prepared = prepare(data, MODEL)
    left = set(folders(tmp_path)) - {prepared.prefix.parent.name, "new.tmp"}
    assert len(left) == 1 and builders[1].is_alive(), left
    builders[1].kill()
    builders[1].join()
    prepare(data, MODEL)
    assert set(folders(tmp_path)) == {prepared.prefix.parent.name, "new.tmp"}


def test_bad_source_and_tokenizer(source, tmp_path):
    def says(match, model=MODEL, **values):
        with pytest.raises(InputError, match=match):
            prepare(config(values.pop("source", source), tmp_path, **values), model)
        assert not (tmp_path / "cache").exists() or not folders(tmp_path)

    no_eod = word_level(tmp_path / "t.json", "a", "b", "c")
    says("does not exist", source=tmp_path / "none")
    says("cannot be read as a tokenizer", tokenizer=str(tmp_path / "none.json"))
    says("has 3 tokens, more than model.vocab=2; set model.vocab=3", ModelConfig(vocab=2),
         tokenizer=str(no_eod))
    says("append_eod=true, but .* has none of .*set data.append_eod=false", tokenizer=str(no_eod))
    says("model.vocab=100 is too small", ModelConfig(vocab=100))
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{')
    says("bad.jsonl:2: not a line of JSON", source=tmp_path / "bad.jsonl")
    deaf = tmp_path / "deaf.json"
    deaf.write_text('{"model": {"type": "BPE", "vocab": {"\u00e9": 0}, "merges": []}}')
    says("makes no token of the text", tokenizer=str(deaf), append_eod=False)
    prepared = prepare(config(source, tmp_path, tokenizer=str(no_eod), append_eod=False), MODEL)
    assert prepared.eod is None and prepared.vocab_size == 3


def test_another_end_makes_other_data(source, tmp_path):
    """The end-of-text token is named beside the tokenizer, for every source of a mix; the cache knows."""
    file, beside = word_level(tmp_path / "t.json", "a", "</s>", "<end>"), tmp_path / "tokenizer_config.json"
    both = DataConfig(mix=[f"1 {source}", f"1 {source}"], cache=str(tmp_path / "cache"), tokenizer=str(file))
    first = prepare(both, MODEL)
    beside.write_text('{"eos_token": "<end>"}')
    second = prepare(both, MODEL)
    assert (first.eod, second.eod, second.cached, len(folders(tmp_path))) == (1, 2, False, 2)
    for prepared, end in ((first, 1), (second, 2)):
        assert prepared.tokenizer is not None and load(prepared.tokenizer).eod == end
        for part in prepared.parts:
            tokens = Tokens(part.prefix)
            assert part.eod == end and set(tokens.stream[tokens.document_ends - 1].tolist()) == {end}
    beside.write_text('{"eos_token": "</s>"}')
    assert prepare(both, MODEL).cached


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_megatron_prefix_is_used_in_place(tmp_path, suffix):
    prefix = write(tmp_path / "data.v1_text_document", [[1, 2, 3], [4, 5]])
    lines = []
    prepared = prepare(config(f"{prefix}{suffix}", tmp_path), MODEL, lines.append)
    assert prepared == subject.Prepared(prefix, None, 5, 2, 6, None, True)
    assert not (tmp_path / "cache").exists() and lines[0].startswith("checked 5 of 5 tokens")


def test_bad_megatron_prefix(tmp_path):
    def says(match, source, **values):
        with pytest.raises(InputError, match=match):
            prepare(config(source, tmp_path, **values), MODEL)

    says("m.bin holds token 300, but model.vocab=300 allows 0 to 299.* at least 301",
         write(tmp_path / "m", [[300, 1]]))
    says("holds -1, and no token is negative .1 of 2 tokens.* position 0: the data are damaged, or of "
         "another type than the int32", write(tmp_path / "n", [[-1, 40]], np.int32))
    says("token 9000, far above model.vocab=300 .1 of 3 .* position 1: the data are damaged",
         write(tmp_path / "f", [[1, 9000, 2]]))
    says("token 7000000, far above .*2 of 2 tokens",
         write(tmp_path / "g", [[7_000_000, 4_000_000]], np.int32))
    says("nothing but token 0: it is filled with NUL bytes", write(tmp_path / "z", [[0, 0, 0]]))
    write(tmp_path / "w", [[1, 2, 3]])
    np.array([1, 2, 3], np.int32).tofile(tmp_path / "w.bin")
    says("w.bin is of another type, with 4 bytes a token, or too long .* 3 tokens of uint16", tmp_path / "w")
    words = str(word_level(tmp_path / "t.json", "a", "b", "c"))
    says("holds token 3, but data.tokenizer=.* has only 3 tokens", write(tmp_path / "o", [[3, 1]]),
         tokenizer=words)
    assert prepare(config(write(tmp_path / "o", [[2, 1]]), tmp_path, tokenizer=words), MODEL).vocab_size == 3
    for gone, kept in (("bin", "idx"), ("idx", "bin")):
        prefix = write(tmp_path / f"no_{gone}", [[1, 2]])
        Path(f"{prefix}.{gone}").unlink()
        for source in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
            says(rf"no_{gone}\.{kept} is there, but .*no_{gone}\.{gone} is missing", source)


@pytest.mark.parametrize("length, scan, chunk", [(10, 100, 4), (12, 12, 4), (10, 100, 100), (1000, 100, 10)])
def test_vocabulary_scan(monkeypatch, length, scan, chunk):
    monkeypatch.setattr(in_place, "_SCAN_TOKENS", scan)
    monkeypatch.setattr(in_place, "_SCAN_CHUNK", chunk)
    stream = np.arange(length)
    assert in_place._scan(stream, length)[:3] == (0, length - 1, min(length, scan))
    if length <= scan:
        for place in range(length):  # no token is passed over
            seen = in_place._scan(np.eye(1, length, place, dtype=np.int64)[0], 1)
            assert (seen.high, seen.outside, seen.first) == (1, 1, place)

"""Tokens: turn `data.source` into tokens on disk, once. Prepared data are cached under a hash of their
content.

    cache/<key>/tokens.bin, tokens.idx   the stream, in Megatron's format
                tokens.mask              with data.loss_mask: a byte a token, 1 where it counts
                tokens.crc32             CRC-32 of each BLOCK_BYTES of the stream
                tokenizer.json           and tokenizer_config.json, where it names the end-of-text token
                meta.json                the fields of Prepared, CRC-32 of the other files but the stream,
                                         and CRC-32 of meta.json's own values

<key> is a hash of the content, the tokenizer and the settings, so an existing folder is never out of date. A
build writes to a folder `<key>.*.tmp` beside it, which is renamed when it is complete. A killed build leaves
such a folder, whose file `lock` no process holds; the next start removes it. If two processes build the same
data, the first to finish wins.

A stream of up to _CHECK_BYTES is compared with its checksums at every start; each block of a longer one when
it is first read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from threed.base.errors import InputError
from threed.base.hashing import splitmix64
from threed.base.quantity import show_bytes, show_count, show_many, show_seconds
from threed.data.cache import cache_root, cannot_be_written, open_scratch, remove_stale
from threed.data.chat import ChatTemplate
from threed.data.corpus import fingerprint, not_read, source_bytes
from threed.data.encode import documents_of, encode
from threed.data.megatron import look_at, megatron_prefix
from threed.data.mix import sources
from threed.data.samples import BLOCK_BYTES, Tokens
from threed.data.tokenizer_files import CONFIG, tokenizer_file
from threed.schema import DataConfig, ModelConfig

if TYPE_CHECKING:
    from threed.data.tokenizer import Tokenizer

_FORMAT = 2  # of the cache: raise it when the same content would give other files
_CHECK_BYTES = 2**31  # a prepared stream up to this long is read and checked at each start: about a second
MASK = "tokens.mask"
_CHECKED = ("tokens.idx", "tokens.crc32", "tokenizer.json", CONFIG, MASK)
_LONG_BYTES = 2**31  # a source that takes seconds to read


@dataclass(frozen=True)
class Prepared:
    """Tokens ready to train on. `prefix`: path of the .bin/.idx pair without the suffix.

    `tokenizer` and `eod` are None where they are not known: Megatron data bring no tokenizer. `vocab_size`:
    all ids are below it. `cached`: nothing had to be built.
    """

    prefix: Path
    tokenizer: Path | None
    num_tokens: int
    num_documents: int
    vocab_size: int
    eod: int | None
    cached: bool
    mixed: tuple[Prepared, ...] = ()  # with data.mix: each source
    notes: tuple[str, ...] = ()  # what was left out of the source, or is there more than once

    @property
    def parts(self) -> tuple[Prepared, ...]:
        """Each source."""
        return self.mixed or (self,)


def prepare(data: DataConfig, model: ModelConfig,
            progress: Callable[[str], None] = lambda line: None) -> Prepared:
    """Tokenize `data.source`, or each source of `data.mix`, into the cache, unless the cache has it. A
    Megatron prefix is checked and used in place. A tokenizer is trained on all sources together.

    `progress` is called with a line at each stage, and about every second while encoding. The documents are
    shuffled, with the content as the seed, so that the end of the stream is a fair sample to hold out. Raises
    InputError for bad input, a vocabulary above `model.vocab`, and a cache that cannot be written.
    """
    if model.own_layers:  # their samples are not tokens
        return Prepared(Path(), None, 0, 0, 0, None, True)
    whole = [each for _, each in sources(data)]
    content_of = cache(fingerprint)  # which reads every byte of a source
    if data.mix is None:
        return _prepare(data, whole, model, content_of, progress)
    ready = [each for each in whole if megatron_prefix(each.source) is not None]
    if data.tokenizer == "bpe" and 0 < len(ready) < len(whole):
        raise InputError(f"data.mix has {ready[0].source}, which holds tokens, and sources of text: give the "
                         "tokenizer that made those tokens in data.tokenizer")
    made: list[Prepared] = []
    for each in whole:
        if data.tokenizer == "bpe" and made and made[0].tokenizer is not None:
            each = replace(each, tokenizer=str(made[0].tokenizer))
        made.append(_prepare(each, whole if each.tokenizer == "bpe" else [each], model, content_of, progress))
    for number, each in enumerate(made):
        other = next((at for at in range(number) if made[at].prefix == each.prefix), None)
        if other is not None:
            progress(f"threed: warning: data.mix: {whole[number].source} holds the same as "
                     f"{whole[other].source}: its samples are seen by both weights")
    return replace(made[0], num_tokens=sum(each.num_tokens for each in made),
                   num_documents=sum(each.num_documents for each in made),
                   vocab_size=max(each.vocab_size for each in made), cached=all(each.cached for each in made),
                   mixed=tuple(made), notes=tuple(line for each in made for line in each.notes))


def _prepare(data: DataConfig, whole: Sequence[DataConfig], model: ModelConfig,
             content_of: Callable[[str, str], str], progress: Callable[[str], None]) -> Prepared:
    """Prepare one source. `whole`: all of which a tokenizer is trained on. `content_of`: as `fingerprint`."""
    prefix = megatron_prefix(data.source)
    if prefix is not None:
        tokens, path, vocab, eod = look_at(prefix, data, model, progress)
        return Prepared(prefix, path, tokens.num_tokens, tokens.num_documents, vocab, eod, cached=True)
    start_s = time.perf_counter()
    for line in not_read(data.source):
        progress(f"threed: warning: {line}")
    if (size := source_bytes(data.source)) > _LONG_BYTES:
        progress(f"reading {show_bytes(size)} of {data.source}, to see whether they are prepared")
    template = ChatTemplate(data) if data.loss_mask == "chat" else None
    content = content_of(data.source, _becomes(data, template))
    path = None if data.tokenizer == "bpe" else tokenizer_file(data.tokenizer)
    name = f"bpe {model.vocab}"
    if path is None and len(whole) > 1:
        name += "".join(f" {content_of(each.source, _becomes(each, template))}" for each in whole)
    if path is not None:
        name = _tokenizer_name(path, data, model)
    what = _FORMAT, content, name, data.append_eod, *["bos"] * data.prepend_bos, *_skipping(data)
    key = hashlib.blake2b(repr(what).encode(), digest_size=10).hexdigest()
    root = cache_root(data)
    folder = root / key
    try:
        remove_stale(root)
        cached = folder.is_dir()
        if not cached:
            _build(folder, content, _Making(path, data, whole, model, progress))
    except OSError as error:  # of the cache: a source that cannot be read has raised InputError
        raise cannot_be_written(data, error) from None
    prepared = _open(folder, cached)
    for line in prepared.notes:
        progress(f"threed: warning: {line}")
    elapsed = show_seconds(time.perf_counter() - start_s)
    progress(f"{'found' if cached else 'prepared'} {show_count(prepared.num_tokens)} tokens of "
             f"{show_many(prepared.num_documents, 'document')} in {elapsed}: {folder}")
    return prepared


def _tokenizer_name(path: Path, data: DataConfig, model: ModelConfig) -> str:
    """All that a tokenizer does to data. InputError where it lacks what documents begin or end with."""
    from threed.data.tokenizer import check_ends, load_below

    tokenizer = load_below(path, model.vocab)
    check_ends(tokenizer, path, data)
    ends = f" ends {tokenizer.eod}" if tokenizer.ends_otherwise else ""  # the files beside it say so
    return hashlib.blake2b(path.read_bytes()).hexdigest() + ends


def _skipping(data: DataConfig) -> tuple[object, ...]:
    return ("skip", data.bad_rows_limit) if data.on_bad_row == "skip" else ()


def _becomes(data: DataConfig, template: ChatTemplate | None) -> str:
    """All that decides which document a line of JSONL becomes."""
    if data.loss_mask == "none":
        return data.text_key
    if data.loss_mask == "answers":
        return repr(("answers", data.prompt_key, data.answer_key))
    return repr(("chat", 3, data.messages_key, template.identity if template is not None else ""))


def _open(folder: Path, cached: bool) -> Prepared:
    prefix = folder / "tokens"
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta.pop("check") != _check(meta):
            raise InputError(f"{folder / 'meta.json'} does not have its own checksum")
        for name in _CHECKED:
            if name in meta["crc32"] and _checksum(folder / name) != meta["crc32"][name]:
                raise InputError(f"{folder / name} does not have the checksum of meta.json")
        if (folder / MASK).exists() != (MASK in meta["crc32"]):
            raise InputError(f"{folder / MASK} is missing")
        tokens = Tokens(prefix)
        if tokens.stream.nbytes <= _CHECK_BYTES:
            tokens.check(0, tokens.num_tokens)
        return Prepared(prefix, folder / "tokenizer.json", tokens.num_tokens, tokens.num_documents,
                        meta["vocab_size"], meta["eod"], cached, notes=tuple(meta.get("notes", ())))
    # an InputError is a ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"prepared data is damaged: {error}\ndelete the folder {folder} and start "
                         "again") from None


def _check(meta: dict[str, Any]) -> int:
    """CRC-32 of the values of meta.json."""
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


# ---------------------------------------------------------------- building


class _Making(NamedTuple):
    """What data are made of."""

    tokenizer: Path | None  # None: one is trained
    data: DataConfig
    whole: Sequence[DataConfig]  # the tokenizer is trained on
    model: ModelConfig
    progress: Callable[[str], None]


def _build(folder: Path, content: str, making: _Making) -> None:
    scratch, lock = open_scratch(folder)
    try:
        _fill(scratch, content, making)
        (scratch / "lock").unlink(missing_ok=True)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, and its data are the same
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        lock.close()


def _fill(folder: Path, content: str, making: _Making) -> None:
    """Write a complete set of prepared data into an empty folder.

    Documents are encoded in the order of the source to a scratch file, and copied from there in shuffled
    order: memory is bounded.
    """
    data, progress = making.data, making.progress
    tokenizer = _make_tokenizer(folder / "tokenizer.json", making)
    unordered, unmasked = folder / "unordered.bin", folder / "unordered.mask"
    with contextlib.ExitStack() as files:
        out = files.enter_context(unordered.open("wb"))
        mask = files.enter_context(unmasked.open("wb")) if data.loss_mask != "none" else None
        dtype = np.dtype(_indexed_dataset().DType.optimal_dtype(tokenizer.vocab_size))
        lengths, notes = encode(out, mask, tokenizer, data, dtype, progress)
    if not sum(lengths):
        raise InputError(f"data.tokenizer={making.tokenizer} makes no token of the text in "
                         f"data.source={data.source}; give a tokenizer for this kind of text")
    start_s = time.perf_counter()
    _shuffle(folder, unordered, lengths, dtype, seed=int(content[:16], 16))
    unordered.unlink()
    unmasked.unlink(missing_ok=True)
    checksums = [zlib.crc32(block) for block in _blocks(folder / "tokens.bin")]
    np.array(checksums, "<u4").tofile(folder / "tokens.crc32")
    meta = {"format": _FORMAT, "source": data.source, "content": content, "tokenizer": data.tokenizer,
            "num_documents": len(lengths), "num_tokens": sum(lengths), "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod, "notes": notes,
            "crc32": {name: _checksum(folder / name) for name in _CHECKED if (folder / name).exists()}}
    (folder / "meta.json").write_text(json.dumps({**meta, "check": _check(meta)}, indent=1))
    written = (folder / "tokens.bin").stat().st_size
    progress(f"shuffled and wrote {show_bytes(written)} in {show_seconds(time.perf_counter() - start_s)}")


def _make_tokenizer(file: Path, making: _Making) -> Tokenizer:
    """Train a tokenizer, or load the given one; `file` is the tokenizer.json to write."""
    from threed.data import tokenizer as tokenizers

    if making.tokenizer is not None:
        tokenizer = tokenizers.load(making.tokenizer)
        shutil.copyfile(making.tokenizer, file)
        tokenizers.keep_end(making.tokenizer, file)
        return tokenizer
    model, progress = making.model, making.progress
    start_s = time.perf_counter()
    named = ", ".join(each.source for each in making.whole)
    progress(f"training a byte-level BPE of {model.vocab} tokens on {named}")
    texts = ("".join(segment.text for segment in segments)
             for each in making.whole for segments in documents_of(each))
    tokenizer = tokenizers.train(texts, model.vocab, file)
    progress(f"trained {tokenizer.vocab_size} tokens in {show_seconds(time.perf_counter() - start_s)}")
    return tokenizer


def _shuffle(folder: Path, unordered: Path, lengths: list[int], dtype: np.dtype, seed: int) -> None:
    """Write tokens.bin and tokens.idx: the documents of `unordered`, in an order that depends on `seed`."""
    builder = _indexed_dataset().IndexedDatasetBuilder(str(folder / "tokens.bin"), dtype=dtype.type)
    stream, stops = np.memmap(unordered, dtype, mode="r"), np.cumsum(lengths)
    unmasked, masks = unordered.with_suffix(".mask"), contextlib.ExitStack()
    mask = np.memmap(unmasked, np.uint8, "r") if unmasked.exists() else None
    into = masks.enter_context((folder / MASK).open("wb")) if mask is not None else None
    # Sorted by a hash of (seed, number): the same order on every system and with every version of numpy.
    for d in np.argsort(splitmix64(np.arange(len(lengths), dtype=np.uint64) ^ np.uint64(seed))):
        place = slice(stops[d] - lengths[d], stops[d])
        builder.add_document(stream[place], [lengths[d]])  # pyright: ignore
        if mask is not None and into is not None:
            into.write(mask[place].tobytes())
    masks.close()
    builder.finalize(str(folder / "tokens.idx"))


def _indexed_dataset() -> Any:
    """megatron.core's module for .bin/.idx pairs: slow to import, so it is imported where it is needed."""
    with warnings.catch_warnings():
        # megatron.core warns of missing GPU libraries, which this module does not use
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset

    return indexed_dataset


def _checksum(path: Path) -> int:
    value = 0
    for block in _blocks(path):
        value = zlib.crc32(block, value)
    return value


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block

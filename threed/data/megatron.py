"""Megatron data: they need no preparation, and are looked at before they are trained on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from threed.base.errors import InputError
from threed.base.quantity import show_count, show_seconds
from threed.data.files import STDLIB
from threed.data.samples import Tokens
from threed.data.tokenizer_files import tokenizer_file
from threed.schema import DataConfig, ModelConfig

_SCAN_TOKENS = 10**9  # data up to this long are looked at in full
_SCAN_CHUNK = 2**24
_LARGEST_VOCAB = 2**20  # more than any tokenizer has
_ZEROS = 4096  # so many at the end of a file are no text


class InPlace(NamedTuple):
    """Megatron data that can be used. `tokenizer`, `eod`: None where they are not known."""

    tokens: Tokens
    tokenizer: Path | None
    vocab_size: int
    eod: int | None


def megatron_prefix(source: str) -> Path | None:
    """The prefix that a source names, by itself or by its .bin or .idx file; None when the source is text."""
    path = Path(source).expanduser()
    if path.suffix in (".bin", ".idx"):
        path = path.with_suffix("")
    elif source == STDLIB or os.path.exists(path):
        return None
    return path if any(os.path.isfile(f"{path}{suffix}") for suffix in (".bin", ".idx")) else None


def look_at(prefix: Path, data: DataConfig, model: ModelConfig, progress: Callable[[str], None]) -> InPlace:
    """Check Megatron data: data.append_eod, data.prepend_bos and data.text_key have no effect. InputError
    where they cannot be used."""
    if data.loss_mask != "none":
        raise InputError(f"data.loss_mask={data.loss_mask}, but {prefix} is Megatron data, which do not say "
                         "what counts in the loss; give JSONL or Parquet, or set data.loss_mask=none")
    start_s = time.perf_counter()
    tokens = Tokens(prefix)
    path = tokenizer = None
    if data.tokenizer != "bpe":
        from threed.data.tokenizer import load_below

        path = tokenizer_file(data.tokenizer)
        tokenizer = load_below(path, model.vocab)
    seen = _scan(tokens.stream, model.vocab)
    _check_tokens(tokens, seen, model.vocab)
    vocab = tokenizer.vocab_size if tokenizer is not None else seen.high + 1
    if seen.high >= vocab:
        raise InputError(f"{prefix}.bin holds token {seen.high}, but data.tokenizer={path} has only {vocab} "
                         "tokens; give the one that made the data")
    zeros = tokens.stream[-_ZEROS:]
    if len(zeros) == _ZEROS and not zeros.any():
        progress(f"threed: warning: {prefix}.bin ends with {_ZEROS:,} or more tokens 0: most often a copy "
                 "that did not end; compare it with the original")
    progress(f"checked {show_count(seen.checked)} of {show_count(tokens.num_tokens)} tokens of {prefix}.bin "
             f"in {show_seconds(time.perf_counter() - start_s)}")
    return InPlace(tokens, path, vocab, None if tokenizer is None else tokenizer.eod)


def _check_tokens(tokens: Tokens, seen: _Scan, vocab: int) -> None:
    """InputError where what a .bin holds cannot be tokens, or not of this model."""
    dtype = tokens.stream.dtype
    damaged = (f"the data are damaged, or of another type than the {dtype} that "
               f"{tokens.path.with_suffix('.idx')} names; copy or prepare them again")
    outside = f"({seen.outside:,} of {seen.checked:,} tokens are outside the vocabulary)"
    if seen.low < 0:
        raise InputError(f"{tokens.path} holds {seen.low}, and no token is negative {outside}, the first at "
                         f"position {seen.first}: {damaged}")
    if seen.high == 0 and seen.checked > 1:
        raise InputError(f"{tokens.path} holds nothing but token 0: it is filled with NUL bytes, as by a "
                         "crash or a copy that did not end; copy or prepare it again")
    if seen.high < vocab:
        return
    lone = seen.outside <= max(1, seen.checked // 1000) and seen.high >= 2 * vocab
    if lone or seen.high >= _LARGEST_VOCAB:
        raise InputError(f"{tokens.path} holds token {seen.high}, far above model.vocab={vocab} {outside}, "
                         f"the first at position {seen.first}: {damaged}")
    raise InputError(f"{tokens.path} holds token {seen.high}, but model.vocab={vocab} allows 0 to "
                     f"{vocab - 1} {outside}; set model.vocab to what its tokenizer has, at least "
                     f"{seen.high + 1}")


class _Scan(NamedTuple):
    """What tokens are. `outside`: how many are no ids of the vocabulary; `first`: the place of the first."""

    low: int
    high: int
    checked: int
    outside: int
    first: int | None


def _scan(stream: np.ndarray, vocab: int) -> _Scan:
    """Look at all tokens, or at about _SCAN_TOKENS in chunks that are spread over a longer stream."""
    num_chunks = -(-min(len(stream), _SCAN_TOKENS) // _SCAN_CHUNK)
    starts = np.linspace(0, max(0, len(stream) - _SCAN_CHUNK), num_chunks, dtype=np.int64)
    low, high, checked, outside, first = 0, 0, 0, 0, None
    stop = 0
    for start in starts.tolist():
        start, stop = max(start, stop), start + _SCAN_CHUNK
        chunk = stream[start:stop]
        least, most = int(chunk.min()), int(chunk.max())
        if least < 0 or most >= vocab:
            wrong = np.flatnonzero((chunk < 0) | (chunk >= vocab))
            outside, first = outside + len(wrong), start + int(wrong[0]) if first is None else first
        low, high, checked = min(low, least), max(high, most), checked + len(chunk)
    return _Scan(low, high, min(checked, len(stream)), outside, first)

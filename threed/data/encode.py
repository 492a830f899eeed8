"""Encoding: documents to ids and, with data.loss_mask, to a mask of which ids count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from threed.data.chat import Template
from threed.data.corpus import Segments, read, reader_of, source_bytes
from threed.quantity import show_count, show_left, show_seconds
from threed.schema import DataConfig

if TYPE_CHECKING:
    from threed.data.tokenizer import Tokenizer

BATCH_CHARS = 2**22


def documents_of(data: DataConfig) -> Iterator[Segments]:
    """The documents of `data.source`."""
    template = Template(data) if data.loss_mask == "chat" else None
    return read(data.source, reader_of(data, template.render if template is not None else None))


def encode(out: BinaryIO, mask: BinaryIO | None, tokenizer: Tokenizer, data: DataConfig, dtype: np.dtype,
           progress: Callable[[str], None]) -> list[int]:
    """Write the tokens of all documents to `out`, in the order of the source, and to `mask` which of them
    count. Segments are encoded one by one: a token belongs to one of them. Returns the number of tokens of
    each document."""
    from threed.data import tokenizer as tokenizers

    end = [tokenizer.eod] if data.append_eod else []
    lengths: list[int] = []
    num_chars, size, start_s = 0, source_bytes(data.source), time.perf_counter()
    next_s = start_s + 1
    if data.loss_mask == "chat":
        tokenizer.read_special_tokens()
    for batch in _batches(documents_of(data), tokenizers.pieces):
        if time.perf_counter() >= next_s:
            elapsed_s = time.perf_counter() - start_s
            progress(_encoded(lengths, num_chars, elapsed_s) + show_left(num_chars, size, elapsed_s))
            next_s = time.perf_counter() + 1
        encoded = tokenizer.encode_batch([piece.text for piece in batch])
        for piece, ids in zip(batch, encoded, strict=True):
            begun = tokenizer.begun(ids) if piece.first and data.prepend_bos else ids
            begin = begun[:len(begun) - len(ids)]
            last = end if piece.last and ids[-1:] != end else []  # a template may write it, too
            tokens = np.array([*begin, *ids, *last], dtype)
            out.write(tokens.tobytes())
            if mask is not None:
                counts = [False] * len(begin) + [piece.counts] * len(ids) + [piece.end_counts] * len(last)
                mask.write(bytes(counts))
            num_chars += len(piece.text)
            if piece.first:
                lengths.append(0)
            lengths[-1] += len(tokens)
    progress(_encoded(lengths, num_chars, time.perf_counter() - start_s))
    return lengths


class _Piece(NamedTuple):
    """A part of a segment that is encoded at once."""

    text: str
    first: bool  # whether it begins a document
    last: bool  # whether it ends one
    counts: bool
    end_counts: bool  # whether the end-of-document token after it counts


def _batches(texts: Iterable[Segments], pieces: Callable[[str], Iterator[str]]) -> Iterator[list[_Piece]]:
    """Pieces in batches of about BATCH_CHARS."""
    batch, size = [], 0
    for segments in texts:
        length, done = sum(len(segment.text) for segment in segments), 0
        ends = next((segment.counts for segment in reversed(segments) if segment.text.strip()), True)
        for text, counts in (segment for segment in segments if segment.text):
            for piece in pieces(text):
                first, done = done == 0, done + len(piece)
                batch.append(_Piece(piece, first, done == length, counts, ends))
                size += len(piece)
                if size >= BATCH_CHARS:
                    yield batch
                    batch, size = [], 0
    if batch:
        yield batch


def _encoded(lengths: list[int], num_chars: int, elapsed_s: float) -> str:
    return (f"encoded {show_count(len(lengths))} documents, {show_count(num_chars)} characters, "
            f"{show_count(sum(lengths))} tokens in {show_seconds(elapsed_s)}")

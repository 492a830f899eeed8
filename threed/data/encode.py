"""Encoding: documents to ids and, with data.loss_mask, to a mask of which ids count."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from threed.base.quantity import show_left, show_many, show_seconds
from threed.data.chat import ChatTemplate
from threed.data.corpus import Segments, read, reader_of, source_bytes
from threed.data.files import STDLIB
from threed.schema import DataConfig

if TYPE_CHECKING:
    from threed.data.tokenizer import Tokenizer

BATCH_CHARS = 2**22


def documents_of(data: DataConfig, say: Callable[[str], None] = lambda line: None) -> Iterator[Segments]:
    """The documents of `data.source`. `say` gets lines about what was left out."""
    template = ChatTemplate(data) if data.loss_mask == "chat" else None
    yield from read(data.source, reader_of(data, template.render if template is not None else None), say)
    if template is None:
        return
    for what, noted in ((f"{template.path} does not write these messages or parts of them, so they are "
                         "no part of the text, and change nothing of what counts", template.unwritten),
                        ("only what the assistant says counts, and these messages are marked to count, too",
                         template.not_counted)):
        if noted.total:
            say(f"data.source={data.source}: {what}: {noted}")


def encode(out: BinaryIO, mask: BinaryIO | None, tokenizer: Tokenizer, data: DataConfig, dtype: np.dtype,
           progress: Callable[[str], None]) -> tuple[list[int], list[str]]:
    """Write the tokens of all documents to `out`, in the order of the source, and to `mask` which of them
    count. Segments are encoded one by one: a token belongs to one of them. Returns the number of tokens of
    each document, and lines about what was left out or is there more than once."""
    from threed.data import tokenizer as tokenizers

    end = [tokenizer.eod] if data.append_eod else []
    lengths: list[int] = []
    notes: list[str] = []
    content = array("q")  # a hash of each document
    unknown = 0
    num_chars, size, start_s = 0, source_bytes(data.source), time.perf_counter()
    next_s = start_s + 1
    if data.loss_mask == "chat":
        tokenizer.read_special_tokens()
    for batch in _batches(documents_of(data, notes.append), tokenizers.pieces):
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
            unknown += 0 if tokenizer.unknown is None else int(np.count_nonzero(tokens == tokenizer.unknown))
            if mask is not None:
                counts = [False] * len(begin) + [piece.counts] * len(ids) + [piece.end_counts] * len(last)
                mask.write(bytes(counts))
            num_chars += len(piece.text)
            if piece.first:
                lengths.append(0)
                content.append(0)
            content[-1] = hash((content[-1], tokens.tobytes()))
            lengths[-1] += len(tokens)
    progress(_encoded(lengths, num_chars, time.perf_counter() - start_s))
    copies = len(content) - len(np.unique(np.frombuffer(content, np.int64))) if content else 0
    if copies and data.source != STDLIB:
        notes.append(f"data.source={data.source}: {copies:,} of {len(lengths):,} documents repeat another "
                     "word for word; they are kept")
    if unknown:
        notes.append(f"data.source={data.source}: {unknown / sum(lengths):.2%} of its tokens are the unknown "
                     f"one, {tokenizer.unknown}: data.tokenizer={data.tokenizer} is not made for this text")
    return lengths, notes


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
    return (f"encoded {show_many(len(lengths), 'document')}, {show_many(num_chars, 'character')}, "
            f"{show_many(sum(lengths), 'token')} in {show_seconds(elapsed_s)}")

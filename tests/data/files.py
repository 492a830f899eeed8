"""Small files that several tests need."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers


def write(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> Path:
    """A Megatron pair, spelled out byte by byte (test_tokens compares the reader with Megatron's own
    writer)."""
    code = {np.uint16: 8, np.int32: 4}[dtype]
    lengths = [len(document) for document in documents]
    np.concatenate([np.array(document, dtype) for document in documents]).tofile(f"{prefix}.bin")
    offsets = (np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize).astype(np.int64)
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
        + np.array(lengths, np.int32).tobytes() + offsets.tobytes()
        + np.arange(len(lengths) + 1, dtype=np.int64).tobytes())
    return prefix


def word_level(path: Path, *words: str) -> Path:
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)},
                                                  unk_token=words[0]))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore
    inner.decoder = decoders.Fuse()  # pyright: ignore
    inner.enable_padding(length=64)
    inner.enable_truncation(2)
    inner.save(str(path))
    return path

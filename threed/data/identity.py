"""Identity: what a run's data and tokenizer are, by their content, whatever their paths and dates.

    {"sources": [{"source": ..., "share": "1/2", "tokens": DIGEST}, ...], "tokenizer": DIGEST,
     "template": DIGEST of the chat template, with data.loss_mask=chat}

A checkpoint keeps it (checkpoint/provenance). Prepared data have checksums of all that matters in their
meta.json, so nothing is read again. Of Megatron's own files up to READ_BYTES are read, spread over a longer
one: a change of a few bytes of such a file may be overlooked.
"""

from __future__ import annotations

import hashlib
import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

from threed.data.chat import ChatTemplate
from threed.data.mix import sources
from threed.data.run_tokenizer import digest_of, tokenizer_digest
from threed.data.tokens import Prepared
from threed.schema import Config

READ_BYTES = 2**30
_BLOCK_BYTES = 2**16
_OF_META = ("tokens.crc32", "tokens.idx", "tokens.mask")  # checksums of blocks of the stream, its index, mask


def identity(config: Config, prepared: Prepared) -> dict[str, Any]:
    """What a run is trained on; {} of user layers, whose samples are not known."""
    if config.model.own_layers:
        return {}
    given = sources(config.data)
    total = sum((weight for weight, _ in given), Fraction())
    return {"sources": [{"source": data.source, "share": str(weight / total), "tokens": _tokens(part.prefix)}
                        for (weight, data), part in zip(given, prepared.parts, strict=True)],
            "tokenizer": tokenizer_digest(prepared.tokenizer),
            "template": digest_of(ChatTemplate(config.data).identity.encode())
            if config.data.loss_mask == "chat" else None}


def _tokens(prefix: Path) -> str:
    """A hash of the tokens of a .bin/.idx pair, of where documents end, and of what counts."""
    try:
        checksums = json.loads((prefix.parent / "meta.json").read_text())["crc32"]
        known = [(name, int(checksums[name])) for name in _OF_META if name in checksums]
        if prefix.name == "tokens" and len(known) > 1:
            return digest_of(repr(known).encode())
    except (OSError, ValueError, KeyError, TypeError):
        pass  # Megatron's own
    return digest_of(b"".join(_content(Path(f"{prefix}{suffix}")) for suffix in (".bin", ".idx")))


def _content(path: Path) -> bytes:
    """A hash of a file's size and of up to READ_BYTES of it."""
    total = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        total.update(f"{size}".encode())
        blocks, most = -(-size // _BLOCK_BYTES), READ_BYTES // _BLOCK_BYTES
        chosen = range(blocks) if blocks <= most else (number * (blocks - 1) // (most - 1)
                                                       for number in range(most))
        for number in chosen:
            file.seek(number * _BLOCK_BYTES)
            total.update(file.read(_BLOCK_BYTES))
    return total.digest()

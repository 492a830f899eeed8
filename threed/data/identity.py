"""Identity: what a run's data and tokenizer are, by their content, whatever their paths and dates.

    {"sources": [{"source": ..., "share": "1/2", "tokens": DIGEST}, ...], "tokenizer": DIGEST}

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

from threed.data.mix import sources
from threed.data.tokens import Prepared
from threed.sampling import TOKENIZER
from threed.schema import Config

READ_BYTES = 2**30
_BLOCK_BYTES = 2**16
_OF_META = ("tokens.crc32", "tokens.idx", "tokens.mask")  # checksums of blocks of the stream, its index, mask
_NOT_MEANT = ("version", "truncation", "padding")  # parts of a tokenizer.json without effect on tokens here


def identity(config: Config, prepared: Prepared) -> dict[str, Any]:
    """What a run is trained on; {} of layers of somebody's own, whose samples are not known."""
    if config.model.own_layers:
        return {}
    given = sources(config.data)
    total = sum((weight for weight, _ in given), Fraction())
    return {"sources": [{"source": data.source, "share": str(weight / total), "tokens": _tokens(part.prefix)}
                        for (weight, data), part in zip(given, prepared.parts, strict=True)],
            "tokenizer": tokenizer_digest(prepared.tokenizer)}


def tokenizer_digest(file: Path | None) -> str | None:
    """A hash of what a tokenizer.json says, however it is laid out; None where there is none."""
    if file is None:
        return None
    data = file.read_bytes()
    try:
        values = json.loads(data)
        for name in _NOT_MEANT:
            values.pop(name, None)
        data = json.dumps(values, sort_keys=True).encode()
    except (ValueError, AttributeError):  # a file of another kind
        pass
    return _hash(data)


def tokenizer_of(run: Path, digest: str | None) -> Path | None:
    """The tokenizer.json in a run's folder that has this digest."""
    for file in (run / TOKENIZER, *sorted(run.glob(f"tokenizer-*/{TOKENIZER}"))):
        try:
            if digest is not None and tokenizer_digest(file) == digest:
                return file
        except OSError:
            continue
    return None


def kept_for(run: Path, manifest: dict[str, Any]) -> Path:
    """The folder in which a run keeps the tokenizer of a checkpoint, by its manifest."""
    file = tokenizer_of(run, (manifest.get("data") or {}).get("tokenizer"))
    return file.parent if file is not None else run


def home_of(file: Path, run: Path) -> Path:
    """The folder in which a run keeps this tokenizer: the run's own, unless that has another one, which its
    older checkpoints need."""
    digest = tokenizer_digest(file)
    if not (run / TOKENIZER).exists() or tokenizer_digest(run / TOKENIZER) == digest:
        return run
    return run / f"tokenizer-{(digest or '')[:8]}"


def _tokens(prefix: Path) -> str:
    """A hash of the tokens of a .bin/.idx pair, of where documents end, and of what counts."""
    try:
        checksums = json.loads((prefix.parent / "meta.json").read_text())["crc32"]
        known = [(name, int(checksums[name])) for name in _OF_META if name in checksums]
        if prefix.name == "tokens" and len(known) > 1:
            return _hash(repr(known).encode())
    except (OSError, ValueError, KeyError, TypeError):
        pass  # Megatron's own
    return _hash(b"".join(_content(Path(f"{prefix}{suffix}")) for suffix in (".bin", ".idx")))


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


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()

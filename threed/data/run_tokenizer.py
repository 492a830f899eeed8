"""Run tokenizers: those in the folder of a run. Each checkpoint has the one that it was trained with.

    run.dir/tokenizer.json             of the run's data at its start
    run.dir/tokenizer-DIGEST/          another, let in by data.on_change=accept, with its chat template
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from threed.data.sampling import TOKENIZER

_NOT_MEANT = ("version", "truncation", "padding")  # parts of a tokenizer.json without effect on tokens here


def tokenizer_digest(file: Path | None) -> str | None:
    """A hash of what a tokenizer.json says, however it is laid out; None where there is none."""
    if file is None:
        return None
    data = (file / TOKENIZER if file.is_dir() else file).read_bytes()
    try:
        values = json.loads(data)
        for name in _NOT_MEANT:
            values.pop(name, None)
        data = json.dumps(values, sort_keys=True).encode()
    except (ValueError, AttributeError):  # a file of another kind
        pass
    return digest_of(data)


def tokenizer_of(run: Path, digest: str | None) -> Path | None:
    """The tokenizer.json in a run's folder that has this digest."""
    for file in (run / TOKENIZER, *sorted(run.glob(f"tokenizer-*/{TOKENIZER}"))):
        try:
            if digest is not None and tokenizer_digest(file) == digest:
                return file
        except OSError:
            continue
    return None


def kept_for(run: Path, digest: str | None) -> Path:
    """The folder in which a run keeps the tokenizer of a checkpoint. `digest`: as its manifest has it."""
    file = tokenizer_of(run, digest)
    return file.parent if file is not None else run


def home_of(file: Path, run: Path) -> Path:
    """The folder in which a run keeps this tokenizer: the run's own, unless that has another one, which its
    older checkpoints need."""
    digest = tokenizer_digest(file)
    if not (run / TOKENIZER).exists() or tokenizer_digest(run / TOKENIZER) == digest:
        return run
    return run / f"tokenizer-{(digest or '')[:8]}"


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()

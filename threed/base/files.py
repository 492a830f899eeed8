"""Files: writes of which no reader sees half."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, text: str, lasting: bool = False) -> None:
    """Replace a file in one piece: a reader gets the old text or the new one. `lasting`: after a crash of the
    host, too. A failed write leaves the old file, and raises OSError."""
    aside = path.with_name(path.name + ".tmp")
    try:
        aside.write_text(text)
        if lasting:
            sync(aside)
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

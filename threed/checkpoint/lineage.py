"""Lineage: a run as its owner sees it, a start from nothing or from a checkpoint that was named, and all that
went on from there by itself. A folder may hold checkpoints of others, with higher steps; `latest` says which
is the run's.

    latest      step-00000012 new-0-5f2c7a10         the newest checkpoint (or its address elsewhere, or
                                                     `none`), its lineage
                8 new-0-91d0e3b7                     an ancestor: that lineage, up to step 8
                2b7c01fe                             CRC-32 of the lines above
"""

from __future__ import annotations

import hashlib
import os
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from threed import environment
from threed.address import is_store
from threed.checkpoint.format import LATEST, checkpoints, folder, is_name, replace_text, step_of, sync, unseal
from threed.errors import InputError
from threed.schema import Config


class Lineage(NamedTuple):
    name: str  # ORIGIN-LAUNCH-NUMBER
    ancestors: tuple[tuple[str, int], ...] = ()  # from which it went on, and after which of their steps

    def has(self, name: str | None, step: int) -> bool:
        """Whether a checkpoint of that lineage and step is of this run's past. Where the name is not known it
        is not: what may be another's is never removed."""
        return name == self.name or any(name == ancestor and step <= last for ancestor,
                                        last in self.ancestors)

    def may_have(self, name: str | None, step: int) -> bool:
        """The same, where one is chosen: what may be the run's is tried, and refused with its reason."""
        return name is None or self.has(name, step)

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> Lineage:
        name, ancestors = manifest["lineage"]
        return cls(name, tuple((ancestor, last) for ancestor, last in ancestors))

    @classmethod
    def new(cls, config: Config, manifest: dict[str, Any] | None = None) -> Lineage:
        """Begins now: from nothing, or from a checkpoint. What came after that one is left behind."""
        parent = ()
        if manifest is not None:
            before = cls.of(manifest)
            parent = (*before.ancestors, (before.name, manifest["step"]))
        return cls(f"{_start(config)}{uuid.uuid4().hex[:8]}", parent)

    def goes_on(self, config: Config) -> bool:
        """Whether a restart by itself goes on in this lineage: its start began it."""
        return environment.restarted() and self.name.startswith(_start(config))


def _start(config: Config) -> str:
    """ORIGIN-LAUNCH-: from where a start goes on, and what all its restarts have in common."""
    origin = {"auto": "new", "never": "never"}.get(config.train.resume)
    if origin is None:  # by its address: the run may have removed it since
        named = config.train.resume
        origin = _short(named if is_store(named) else str(Path(named).resolve()))
    return f"{origin}-{_short(environment.launch())}-"


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def read_latest(config: Config) -> tuple[str, Lineage | None]:
    """(name or absolute path of the newest checkpoint, or 'none'; its lineage), as the file `latest` says; ''
    and None where that has no meaning."""
    try:
        with (folder(config) / LATEST).open("rb") as file:
            return parse_latest(file.read(1 << 16))
    except OSError:
        return "", None


def parse_latest(data: bytes) -> tuple[str, Lineage | None]:
    """`read_latest`, of what the file holds."""
    try:
        text = data.decode()
        first, *rest, crc = text.splitlines()
        if int(crc, 16) != zlib.crc32(text[:text.rindex(crc)].encode()):
            return "", None
        named, name = first.rsplit(maxsplit=1)
        ancestors = tuple((ancestor, int(last)) for last, ancestor in (line.split() for line in rest))
    except ValueError:  # UnicodeDecodeError, too
        return "", None
    if not (is_name(named) or named == "none" or os.path.isabs(named)):
        return "", None
    return named, Lineage(name, ancestors)


def write_latest(config: Config, named: str, lineage: Lineage) -> None:
    folder(config).mkdir(parents=True, exist_ok=True)
    replace_text(folder(config) / LATEST, text_of_latest(named, lineage))
    sync(folder(config))


def text_of_latest(named: str, lineage: Lineage) -> str:
    lines = [f"{named} {lineage.name}", *(f"{last} {ancestor}" for ancestor, last in lineage.ancestors)]
    text = "\n".join(lines) + "\n"
    return f"{text}{zlib.crc32(text.encode()):08x}\n"


def owner(path: Path) -> str | None:
    """Whose lineage a checkpoint is of; None where its manifest cannot be used."""
    try:
        return unseal(path)["lineage"][0]
    except InputError:
        return None


def own(config: Config, lineage: Lineage, last: int, unknown: Callable[[Path, str], None] = lambda path,
        why: None) -> list[Path]:
    """The lineage's checkpoints of the folder up to step `last`, the newest first: what may be removed. One
    whose manifest cannot be read, or is of another format, is not among them: `unknown` is told why."""
    found = []
    for path in checkpoints(config):
        try:
            name = unseal(path)["lineage"][0] if step_of(path) <= last else None
        except InputError as error:
            unknown(path, str(error))
            continue
        if lineage.has(name, step_of(path)):
            found.append(path)
    return found

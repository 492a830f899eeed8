"""Lineage: one run as its owner sees it. It begins with a start from nothing or from a named checkpoint, and
includes all automatic restarts. A folder may hold checkpoints of other lineages, even with higher steps: the
file `latest` names the lineage of the run.

    latest      step-00000012 new-0-5f2c7a10         the newest checkpoint (or its path in another folder, or
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
from typing import NamedTuple

from threed.base.address import is_store
from threed.base.errors import InputError
from threed.base.files import sync, write_whole
from threed.checkpoint.format import (
    LATEST,
    Manifest,
    checkpoints,
    checkpoints_in,
    folder,
    is_name,
    step_of,
)
from threed.checkpoint.manifest import unseal
from threed.comm import environment
from threed.schema import Config


class Lineage(NamedTuple):
    name: str  # ORIGIN-LAUNCH-NUMBER
    ancestors: tuple[tuple[str, int], ...] = ()  # lineages that it went on from, each with their last step

    def has(self, name: str | None, step: int) -> bool:
        """Whether a checkpoint of lineage `name` and this step is in the run's past. Not where its name is
        unknown: a checkpoint that may be another run's is never removed."""
        return name == self.name or any(name == ancestor and step <= last
                                        for ancestor, last in self.ancestors)

    def may_have(self, name: str | None, step: int) -> bool:
        """As `has`, to choose a checkpoint: one of unknown lineage is tried, and refused with its reason."""
        return name is None or self.has(name, step)

    @classmethod
    def of(cls, manifest: Manifest) -> Lineage:
        return cls(manifest.lineage, manifest.ancestors)

    @classmethod
    def new(cls, config: Config, manifest: Manifest | None = None) -> Lineage:
        """A lineage that begins now, from nothing or from a checkpoint. Later checkpoints of the older
        lineage are not part of it."""
        parent = ()
        if manifest is not None:
            before = cls.of(manifest)
            parent = (*before.ancestors, (before.name, manifest.step))
        return cls(f"{_start(config)}{uuid.uuid4().hex[:8]}", parent)

    def goes_on(self, config: Config) -> bool:
        """Whether this is an automatic restart of the start that began the lineage."""
        return environment.restarted() and self.name.startswith(_start(config))


def _start(config: Config) -> str:
    """ORIGIN-LAUNCH-: what a start resumes from, and an identity that all its restarts share."""
    origin = {"auto": "new", "never": "never"}.get(config.train.resume)
    if origin is None:  # the address, not its content: the run may have removed that since
        named = config.train.resume
        origin = _short(named if is_store(named) else str(Path(named).resolve()))
    return f"{origin}-{_short(environment.launch())}-"


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def read_latest(config: Config) -> tuple[str, Lineage | None]:
    """(name or absolute path of the newest checkpoint, or 'none'; its lineage), from the file `latest`;
    ('', None) where that is missing or malformed."""
    return latest_in(folder(config))


def latest_in(checkpoints: Path) -> tuple[str, Lineage | None]:
    """`read_latest` of a run's folder of checkpoints."""
    try:
        with (checkpoints / LATEST).open("rb") as file:
            return parse_latest(file.read(1 << 16))
    except OSError:
        return "", None


def newest(place: Path) -> Path | None:
    """The newest checkpoint in a folder of checkpoints: what `latest` names, else that of the highest
    step."""
    named, _ = latest_in(place)
    found = checkpoints_in(place)
    return next((path for path in found if path.name == named), next(iter(found), None))


def parse_latest(data: bytes) -> tuple[str, Lineage | None]:
    """`read_latest` of the file's content."""
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
    write_whole(folder(config) / LATEST, text_of_latest(named, lineage), lasting=True)
    sync(folder(config))


def text_of_latest(named: str, lineage: Lineage) -> str:
    lines = [f"{named} {lineage.name}", *(f"{last} {ancestor}" for ancestor, last in lineage.ancestors)]
    text = "\n".join(lines) + "\n"
    return f"{text}{zlib.crc32(text.encode()):08x}\n"


def owner(path: Path) -> str | None:
    """The name of a checkpoint's lineage; None where its manifest cannot be used."""
    try:
        return unseal(path).lineage
    except InputError:
        return None


def own(config: Config, lineage: Lineage, last: int,
        unknown: Callable[[Path, str], None] = lambda path, why: None) -> list[Path]:
    """The lineage's checkpoints in the folder up to step `last`, the newest first: those that may be removed.
    A checkpoint whose manifest cannot be read, or has another format, is left out: `unknown` is told why."""
    paths = []
    for path in checkpoints(config):
        try:
            name = unseal(path).lineage if step_of(path) <= last else None
        except InputError as error:
            unknown(path, str(error))
            continue
        if lineage.has(name, step_of(path)):
            paths.append(path)
    return paths

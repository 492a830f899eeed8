"""The format: what a checkpoint is on disk, and how its descriptions are read and written.

    run.dir/checkpoints/
        step-00000100/              written as step-00000100.ATTEMPT.tmp, then renamed
            manifest.json           step, counters, mesh, config, identity of the data; for each file its size
                                    and the checksum of its header; for each parameter the place of its line
                                    in the index and the checksums of its whole tensors; the manifest's own
                                    checksum
            index.jsonl             one line per parameter: the file and first byte of each of its boxes
            rank-00000.safetensors  tensors 'param:NAME@ROW,COLUMN', the same for each buffer of the
                                    optimizer, all fp32
        latest                      name and lineage (lineage.py) of the newest checkpoint; written last

`param` is the fp32 master weight. (`waiting` in manifests of earlier versions: gradients that the next step
was to apply.) A checkpoint whose manifest says `weights_only` has `param` alone: an import, after which an
optimizer begins fresh. Where several ranks hold the same values, one of them writes. A rank that
loads reads the manifest, the index lines of its own parameters, and from the files the bytes of the boxes
that it needs: the amount does not grow with the number of ranks that wrote. """

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from threed.base.errors import InputError
from threed.schema import Config

PATIENCE_S = 30.0  # how long a network file system may take to show what another host has written
POLL_S = 0.1  # between two exchanges while some ranks still read or write
REPLACED = ".replaced.tmp"  # suffix of an older checkpoint or copy that a new one replaces
MANIFEST, INDEX, LATEST = "manifest.json", "index.jsonl", "latest"
_NAME = re.compile(r"step-\d{8,}")
T = TypeVar("T")
_OTHER = "resume from another one with train.resume=PATH"


class Unusable(InputError):
    """A checkpoint is damaged or incomplete: `train.resume=auto` takes the one before it."""

    def __init__(self, path: Path | str, what: str):
        super().__init__(f"checkpoint {path} {what}; {_OTHER}")
        self.what = what


class IndexEntry(NamedTuple):
    """Where a parameter is in a checkpoint, by its manifest."""

    at: int  # first byte of its line in the index
    size: int  # bytes of the line
    crc: int  # CRC-32 of the line
    sums: dict[str, str]  # kind -> checksum of the whole tensor, 16 hexadecimal digits


class FileEntry(NamedTuple):
    """A rank's file, by a manifest."""

    size: int  # bytes
    header: int  # bytes of its header
    crc: int  # CRC-32 of the header


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself (`manifest.unseal` reads and checks it). A run that begins without one
    has the defaults."""

    step: int = 0
    updates: int = 0  # steps that were not skipped
    samples: int = 0  # of the training split, so far
    tokens: int | None = None  # of them; None: an older version has not counted them
    skipped: int = 0
    loss_scaler: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, float] | None = None  # of earlier versions: gradients that the next step was to apply
    data: dict[str, Any] | None = None  # identity of the data (data/identity); None: not known
    made_for: dict[str, int | None] | None = None  # of an import: `tokens` of a sequence, and a `window`
    wandb_id: str | None = None
    weights_only: bool = False  # an import: an optimizer begins fresh
    lineage: str = ""  # its name
    ancestors: tuple[tuple[str, int], ...] = ()  # lineages that it went on from, each with their last step
    mesh: dict[str, Any] = field(default_factory=dict)  # axis -> ranks along it; `order`: of the axes
    config: dict[str, dict[str, Any]] = field(default_factory=dict)  # section -> its keys
    parameters: dict[str, IndexEntry] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)
    checksum: str = ""  # of the file

    @property
    def tokenizer(self) -> str | None:
        """The digest of the tokenizer with which it was trained; None: not known, or none."""
        return (self.data or {}).get("tokenizer")

    @property
    def bytes(self) -> int:
        """Of all files of ranks."""
        return sum(entry.size for entry in self.files.values())


class Stored(NamedTuple):
    """A box in a checkpoint."""

    rank: int  # the box is in this rank's file
    offset: tuple[int, ...]  # in the whole parameter
    shape: tuple[int, ...]
    pieces: dict[str, tuple[int, int]]  # kind -> first byte in the file, CRC-32


@dataclass
class Report:
    """What a rank reports about the file that it wrote. Boxes are JSON already: rank 0 only joins them."""

    size: int = 0  # bytes; 0: the rank had nothing to write
    header: tuple[int, int] = (0, 0)  # bytes, and their CRC-32
    boxes: dict[str, list[str]] = field(default_factory=dict)  # by parameter
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of whole parameters
    # parameter -> kind -> checksum of this rank's boxes
    sums: dict[str, dict[str, int]] = field(default_factory=dict)


def folder(config: Config) -> Path:
    return folder_in(Path(config.run.dir))


def folder_in(run: Path) -> Path:
    """The checkpoints of the run in a folder."""
    return run / "checkpoints"


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-")) if _NAME.fullmatch(path.name) else -1


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def rank_of(name: str) -> int:
    """The rank whose file has this name; -1 for any other name."""
    digits = name.removeprefix("rank-").removesuffix(".safetensors")
    return int(digits) if digits.isascii() and digits.isdigit() and file_name(int(digits)) == name else -1


def foreign(path: Path) -> list[str]:
    """What is at a checkpoint's name, or in its folder, and not written by a save."""
    if not path.is_dir():
        return [path.name] if path.exists() else []
    return sorted(name for name in os.listdir(path) if name not in (MANIFEST, INDEX) and rank_of(name) < 0)


def checkpoints(config: Config) -> list[Path]:
    """`checkpoints_in` the folder of a run."""
    return checkpoints_in(folder(config))


def checkpoints_in(place: Path) -> list[Path]:
    """Folders that look like complete checkpoints, the newest first. A folder that cannot be opened is among
    them: reading it gives an error with the reason. OSError where `place` cannot be listed."""
    try:
        names = os.listdir(place)
    except (FileNotFoundError, NotADirectoryError):
        return []
    paths = (place / name for name in names if is_name(name))
    return sorted(filter(_has_manifest, paths), key=step_of, reverse=True)


def _has_manifest(path: Path) -> bool:
    try:
        (path / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def patiently(read: Callable[[], T]) -> T:
    """The result of `read`, tried again for PATIENCE_S while a file is missing or stale: a network file
    system may show this host only after a while what rank 0 sees already."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return read()
        except (InputError, OSError) as error:
            late = isinstance(error, InputError) or error.errno in (errno.ENOENT, errno.ESTALE)
            if not late or time.monotonic() > until:
                raise
        time.sleep(0.5)


# ---------------------------------------------------------------- the index and the manifest


def index_of(reports: list[Report]) -> tuple[bytes, dict[str, IndexEntry]]:
    """The index's content, and the manifest's entry for each parameter."""
    shapes: dict[str, tuple[int, ...]] = {}
    boxes: dict[str, list[str]] = {}
    sums: dict[str, dict[str, int]] = {}
    for report in reports:
        shapes |= report.shapes
        for name, some in report.boxes.items():
            boxes.setdefault(name, []).extend(some)
        for name, kinds in report.sums.items():
            total = sums.setdefault(name, {})
            for kind, value in kinds.items():
                total[kind] = (total.get(kind, 0) + value) % 2**64
    lines, parameters, at = [], {}, 0
    for name in sorted(boxes):
        parts = ", ".join(boxes[name])
        text = f'"name": {json.dumps(name)}, "shape": {list(shapes[name])}, "boxes": [{parts}]'
        line = f"{{{text}}}\n".encode()
        parameters[name] = IndexEntry(at, len(line), zlib.crc32(line), {
            kind: f"{value:016x}" for kind, value in sorted(sums[name].items())})
        lines.append(line)
        at += len(line)
    return b"".join(lines), parameters


def read_line(path: Path, manifest: Manifest, name: str) -> list[Stored]:
    """The boxes of a parameter."""
    entry = manifest.parameters.get(name)
    if entry is None:
        raise Unusable(path, f"is incomplete: it has no parameter {name}")
    try:
        with patiently(lambda: regular(path / INDEX).open("rb")) as file:
            line = os.pread(file.fileno(), entry.size, entry.at)
    except OSError as error:
        raise Unusable(path, f"cannot be read: {INDEX}: {error.strerror}") from None
    if zlib.crc32(line) != entry.crc:
        raise Unusable(path,
                       f"is damaged: {INDEX}, the line of {name}, does not have the checksum of its manifest")
    return [Stored(rank, tuple(offset), tuple(shape), {kind: (at, crc) for kind, (at, crc) in pieces.items()})
            for rank, offset, shape, pieces in json.loads(line)["boxes"]]


def regular(path: Path) -> Path:
    """The path, if it is a regular file: to open a pipe could block for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return path

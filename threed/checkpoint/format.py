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

import contextlib
import errno
import hashlib
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

FORMAT = 2
PATIENCE_S = 30.0  # how long a network file system may take to show what another host has written
MANIFEST, INDEX, LATEST = "manifest.json", "index.jsonl", "latest"
_NAME = re.compile(r"step-\d{8,}")
T = TypeVar("T")
_OTHER = "resume from another one with train.resume=PATH"


class Unusable(InputError):
    """A checkpoint is damaged or incomplete: `train.resume=auto` takes the one before it."""

    def __init__(self, path: Path | str, what: str):
        super().__init__(f"checkpoint {path} {what}; {_OTHER}")
        self.what = what


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


def index_of(reports: list[Report]) -> tuple[bytes, dict[str, Any]]:
    """The index's content, and the manifest's entry for each parameter: the place and the CRC-32 of its line,
    and its checksums by kind."""
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
        parameters[name] = {"at": at, "size": len(line), "crc": zlib.crc32(line),
                            "sums": {kind: f"{value:016x}" for kind, value in sorted(sums[name].items())}}
        lines.append(line)
        at += len(line)
    return b"".join(lines), parameters


def read_line(path: Path, manifest: dict[str, Any], name: str) -> list[Stored]:
    """The boxes of a parameter."""
    entry = manifest["parameters"].get(name)
    if entry is None:
        raise Unusable(path, f"is incomplete: it has no parameter {name}")
    try:
        with patiently(lambda: _regular(path / INDEX).open("rb")) as file:
            line = os.pread(file.fileno(), entry["size"], entry["at"])
    except OSError as error:
        raise Unusable(path, f"cannot be read: {INDEX}: {error.strerror}") from None
    if zlib.crc32(line) != entry["crc"]:
        raise Unusable(path,
                       f"is damaged: {INDEX}, the line of {name}, does not have the checksum of its manifest")
    return [Stored(rank, tuple(offset), tuple(shape), {kind: (at, crc) for kind, (at, crc) in pieces.items()})
            for rank, offset, shape, pieces in json.loads(line)["boxes"]]


def seal(manifest: dict[str, Any]) -> str:
    """The manifest's text, with its checksum as the last key."""
    return json.dumps({**manifest, "checksum": _digest(manifest)}, indent=1)


def unseal(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint. Unusable where it is not as it was written; InputError for another
    format."""
    try:
        data = _regular(path / MANIFEST).read_bytes()
    except OSError as error:
        raise Unusable(path, f"cannot be used: {MANIFEST} cannot be read ({error.strerror})") from None
    return unseal_data(path, data)


def unseal_data(path: Path | str, data: bytes) -> dict[str, Any]:
    """`unseal` of the file's content. `path`: the checkpoint, for messages."""
    try:
        manifest = json.loads(data)
        if not isinstance(manifest, dict):
            raise ValueError("it is not a JSON object")
        checksum = manifest.pop("checksum", None)
    except (ValueError, RecursionError) as error:
        raise Unusable(path, f"is damaged: {MANIFEST} cannot be read ({error})") from None
    whole = checksum == _digest(manifest)
    if manifest.get("format") != FORMAT and (whole or checksum is None):  # format 1 had no checksum
        raise InputError(f"checkpoint {path} has format {manifest.get('format')}; this version of threed "
                         f"reads format {FORMAT}: go on with the version that wrote it")
    if not whole:
        raise Unusable(path, f"is damaged: {MANIFEST} does not have its own checksum: it was changed after "
                             "it was written")
    if strange := [key for key, fits in _KEYS.items() if not fits(manifest.get(key))]:
        raise Unusable(path,
                       f"cannot be used: {MANIFEST} has no {', '.join(strange)} that this version knows")
    return {**manifest, "checksum": checksum}


def weights_only(manifest: dict[str, Any]) -> bool:
    """Whether a checkpoint has weights and no state of an optimizer, which then begins fresh: an import."""
    return manifest.get("weights_only") is True


def _count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float)


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _has(**fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A check for an object that has at least these keys, with values that fit."""
    return lambda value: isinstance(value, dict) and all(key in value and fits_value(value[key])
                                                         for key, fits_value in fits.items())


def _each(fits: Callable[[Any], bool],
          named: Callable[[str], bool] = lambda name: True) -> Callable[[Any], bool]:
    """A check for an object of which all names and values fit."""
    return lambda value: isinstance(value, dict) and all(named(key) and fits(each)
                                                         for key, each in value.items())


def _lineage(value: Any) -> bool:
    return (isinstance(value, list) and [type(each) for each in value] == [str, list]
            and all(isinstance(each, list) and [type(part) for part in each] == [str, int]
                    for each in value[1]))


def _mesh(value: Any) -> bool:
    """Axis -> number of ranks along it, for one axis at least, and the order of the axes."""
    sizes = [size for axis, size in value.items() if axis != "order"] if isinstance(value, dict) else []
    return bool(sizes) and all(_count(size) and size > 0 for size in sizes)


_WAITING = _has(loss=_number, grad_norm=_number, scale=_number, finite=_number, loss_scale=_number)

# What a manifest must hold, whoever wrote it. A file must have a rank's name, so that no file outside the
# checkpoint's folder is read.
_KEYS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("step", "updates", "samples", "skipped"), _count),
    "loss_scaler": lambda value: value == {} or _has(scale=_number, good=_number, left=_number)(value),
    "waiting": lambda value: value is None or (_WAITING(value) and len(value) == 5),
    "lineage": _lineage,
    "mesh": _mesh,
    "data": lambda value: value is None or _object(value),  # older checkpoints do not know it
    "config": lambda value: _has(model=_object)(value) and _each(_object)(value),
    "parameters": _each(_has(at=_count, size=_count, crc=_count, sums=_object)),
    "files": _each(lambda value: isinstance(value, list) and len(value) == 3 and all(map(_count, value)),
                   named=lambda name: rank_of(name) >= 0),
}


def _regular(path: Path) -> Path:
    """The path, if it is a regular file: to open a pipe could block for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")
    return path


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest).encode(), digest_size=16).hexdigest()


# ---------------------------------------------------------------- files


def replace_text(path: Path, text: str) -> None:
    """Write a file in one piece: after a crash it has the old text or the new one."""
    aside = path.with_name(path.name + ".tmp")
    try:
        aside.write_text(text)
        sync(aside)
        os.replace(aside, path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Manifest: the text of a checkpoint's manifest.json, which has its own checksum, and what it must hold.
(`format.Manifest` is what is read.)"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from threed.base.errors import InputError
from threed.checkpoint.format import MANIFEST, FileEntry, IndexEntry, Manifest, Unusable, rank_of, regular

FORMAT = 2


def seal(values: Mapping[str, Any]) -> str:
    """The text of a manifest with these values, with its checksum as the last key."""
    return json.dumps({**values, "checksum": _digest(values)}, indent=1)


def unseal(path: Path) -> Manifest:
    """The manifest of a checkpoint. Unusable where it is not as it was written; InputError for another
    format."""
    try:
        data = regular(path / MANIFEST).read_bytes()
    except OSError as error:
        raise Unusable(path, f"cannot be used: {MANIFEST} cannot be read ({error.strerror})") from None
    return unseal_data(path, data)


def unseal_data(path: Path | str, data: bytes) -> Manifest:
    """`unseal` of the file's content. `path`: the checkpoint, for messages."""
    try:
        values = json.loads(data)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        checksum = values.pop("checksum", None)
    except (ValueError, RecursionError) as error:
        raise Unusable(path, f"is damaged: {MANIFEST} cannot be read ({error})") from None
    whole = checksum == _digest(values)
    if values.get("format") != FORMAT and (whole or checksum is None):  # format 1 had no checksum
        raise InputError(f"checkpoint {path} has format {values.get('format')}; this version of threed "
                         f"reads format {FORMAT}: go on with the version that wrote it")
    if not whole:
        raise Unusable(path, f"is damaged: {MANIFEST} does not have its own checksum: it was changed after "
                             "it was written")
    if strange := [key for key, fits in _KEYS.items() if not fits(values.get(key))]:
        raise Unusable(path,
                       f"cannot be used: {MANIFEST} has no {', '.join(strange)} that this version knows")
    name, ancestors = values["lineage"]
    read = {"lineage": name, "ancestors": tuple((ancestor, last) for ancestor, last in ancestors),
            "parameters": {key: IndexEntry(entry["at"], entry["size"], entry["crc"], entry["sums"])
                           for key, entry in values["parameters"].items()},
            "files": {key: FileEntry(*entry) for key, entry in values["files"].items()},
            "weights_only": values.get("weights_only") is True, "checksum": checksum}
    return Manifest(**{each.name: values[each.name] for each in fields(Manifest) if each.name in values}
                    | read)


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


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()

"""Read a checkpoint without threed: its tensors, whole, by name; which are there, and which is the newest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64,
          "I32": np.int32,
          "U8": np.uint8}


def checkpoints(run_dir: Path) -> list[Path]:
    """The published checkpoints, oldest first."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return sorted(path for path in folders if re.fullmatch(r"step-\d{8}", path.name)
                  and (path / "manifest.json").is_file())


def newest(run_dir: Path) -> Path | None:
    return next(reversed(checkpoints(run_dir)), None)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def read(path: Path) -> dict[str, np.ndarray]:
    """Whole tensors of a checkpoint by 'kind:NAME'. An element that is in several files must be equal in all;
    one that is in none is not a number."""
    boxes: dict[str, list[tuple[tuple[int, ...], np.ndarray]]] = {}
    for file in sorted(path.glob("*.safetensors")):
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for key, entry in json.loads(content[8:start]).items():
            if key == "__metadata__":
                continue
            name, _, place = key.rpartition("@")
            begin, end = (start + offset for offset in entry["data_offsets"])
            values = np.frombuffer(content[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
            boxes.setdefault(name or key, []).append((tuple(int(word) for word in place.split(",")), values))
    return {name: _whole(name, parts) for name, parts in boxes.items()}


def _whole(name: str, parts: list[tuple[tuple[int, ...], np.ndarray]]) -> np.ndarray:
    shape = [max(offset[axis] + values.shape[axis] for offset, values in parts)
             for axis in range(parts[0][1].ndim)]
    whole, filled = np.full(shape, np.nan, parts[0][1].dtype), np.zeros(shape, bool)
    for offset, values in parts:
        where = tuple(slice(start, start + size) for start, size in zip(offset, values.shape))
        assert np.array_equal(whole[where][filled[where]],
                              values[filled[where]]), f"{name} is in two files with other values"
        whole[where], filled[where] = values, True
    return whole


def differences(path: Path, wanted: Path) -> list[str]:
    """Names of tensors that are not equal to the bit, and of counters that differ."""
    mine, theirs = read(path), read(wanted)
    names = [name for name in sorted(mine.keys() | theirs.keys())
             if name not in mine or name not in theirs or mine[name].tobytes() != theirs[name].tobytes()]
    here, undisturbed = (json.loads((folder / "manifest.json").read_text()) for folder in (path, wanted))
    return names + [key for key in ("step", "updates", "samples", "skipped", "loss_scaler")
                    if here.get(key) != undisturbed.get(key)]

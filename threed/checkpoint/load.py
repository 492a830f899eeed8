"""Load: find the newest complete checkpoint, see that it fits, and read the boxes that this rank needs.

Nothing in a checkpoint is run: a manifest is JSON, tensors are safetensors. Any mesh can read what any mesh wrote.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from threed.checkpoint.boxes import Box, boxes, overlap
from threed.checkpoint.save import FORMAT, checksum, folder, kept
from threed.errors import InputError
from threed.schema import Config
from threed.zero.run import Clipped, ZeroRun

_OTHER = "resume from another one with train.resume=PATH"


def find(config: Config) -> Path | None:
    """The checkpoint to resume from, by `train.resume`: None to start afresh."""
    if config.train.resume == "never":
        return None
    if config.train.resume != "auto":
        path = Path(config.train.resume)
        if not (path / "manifest.json").is_file():
            raise InputError(f"train.resume={path}: there is no complete checkpoint here (no manifest.json); give a folder "
                             "such as runs/NAME/checkpoints/step-00000100, or auto")
        return path
    path = folder(config) / _latest(config)
    if (path / "manifest.json").is_file():
        return path
    complete = sorted(path.parent for path in folder(config).glob("step-*/manifest.json") if path.parent.suffix != ".tmp")
    return complete[-1] if complete else None


def _latest(config: Config) -> str:
    """The name in the file `latest`; 'none' where it cannot be read."""
    try:
        return (folder(config) / "latest").read_text().strip() or "none"
    except (OSError, UnicodeDecodeError):
        return "none"


def notes(path: Path, manifest: dict[str, Any], config: Config) -> list[str]:
    """What a resumed run does otherwise than the one that saved, or than one would think."""
    lines = []
    latest = _latest(config)
    if config.train.resume == "auto" and latest not in ("none", path.name):
        lines.append(f"the newest checkpoint, {latest}, is not there whole: going on from {path.name}")
    mine, theirs = config.to_dict(), manifest["config"]
    for key in ("train.seed", "train.global_batch_size", "data.source", "data.tokenizer", "data.append_eod",
                "data.validation_fraction", "optimizer.name", "precision.dtype"):
        section, name = key.split(".")
        before = theirs.get(section, {}).get(name)
        if before != mine[section][name]:
            lines.append(f"{key} was {before} in {path.name} and is {mine[section][name]} from here on")
    return lines


def read_manifest(path: Path, config: Config) -> dict[str, Any]:
    """The manifest, once all files are there whole and the model is the config's."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        files, model = dict(manifest["files"]), dict(manifest["config"]["model"])
        counters = [manifest[key] for key in ("step", "updates", "samples", "skipped")]
        scaler = manifest.get("loss_scaler") or {"scale": 1, "good": 0, "left": 0}
        counters += [int(scaler["good"]), int(scaler["left"]), int(float(scaler["scale"]) > 0)]
        waiting = Clipped(**manifest["waiting"]) if manifest.get("waiting") else None
        if not all(isinstance(count, int) for count in counters) or len(manifest["crc32"]) != len(files):
            raise ValueError("its counters are not numbers")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"checkpoint {path}: manifest.json cannot be read ({error}); {_OTHER}") from None
    if manifest.get("format") != FORMAT:
        raise InputError(f"checkpoint {path} has format {manifest.get('format')}; this version reads format {FORMAT}")
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            raise InputError(f"checkpoint {path} is incomplete: {name} is missing; {_OTHER}")
        if file.stat().st_size != size:
            raise InputError(f"checkpoint {path} is damaged: {name} has {file.stat().st_size} bytes, not {size}; {_OTHER}")
    if waiting and not config.offload.delayed_update:
        raise InputError(f"checkpoint {path} holds gradients that its next step was to apply; go on with "
                         "offload.delayed_update=true as it was made, or resume from one that was saved before the first delayed "
                         "step, or after the last")
    mine = config.to_dict()["model"]
    free = {"name", "dropout", "attention_dropout", "init_std", "tile_linears"}  # do not change what the weights mean
    different = [f"model.{key}={model.get(key)} there, {mine[key]} here" for key in mine
                 if key not in free and model.get(key) != mine[key]]
    if different:
        raise InputError(f"checkpoint {path} is of another model: {'; '.join(different)}")
    return manifest


def load(path: Path, manifest: dict[str, Any], zero: ZeroRun) -> None:
    """Fill this rank's master weights and moments, and set the counters."""
    comm = zero.comm
    zero.waiting = Clipped(**manifest["waiting"]) if manifest.get("waiting") else None
    checksums = dict(zip(sorted(manifest["files"]), manifest["crc32"], strict=True))
    reader = _Reader(path, sorted(manifest["files"], key=lambda name: abs(_rank(name) - comm.rank)), checksums)
    for state in zero.states.values():
        for box in boxes(state.layout, comm.here.tp, *state.owned):
            where = slice(box.start - state.owned[0], box.stop - state.owned[0])
            for kind, whole in kept(state, zero.waiting is not None).items():
                reader.read(kind, box, whole[where].view(box.shape))
        state.publish()
    zero.step_number, zero.updates = manifest["step"], manifest["updates"]
    zero.scaler.restore(manifest.get("loss_scaler", {}))


def _rank(name: str) -> int:
    return int(name.removeprefix("rank-").split(".")[0])


class _Reader:
    """Reads boxes from the files of a checkpoint, opening the nearest ranks' first and no more than are needed."""

    def __init__(self, path: Path, files: list[str], checksums: dict[str, int]):
        self._path, self._unread, self._checksums = path, files, checksums
        self._stored: dict[tuple[str, str], list[tuple[tuple[int, ...], tuple[int, ...], str, Any]]] = {}

    def read(self, kind: str, box: Box, into: torch.Tensor) -> None:
        missing = math.prod(box.shape)
        used = 0
        while True:
            stored = self._stored.get((kind, box.name), [])
            for offset, shape, key, file in stored[used:]:
                target = overlap(box.offset, box.shape, offset, shape)
                if target is None:
                    continue
                source = overlap(offset, shape, box.offset, box.shape)
                part = self._slice(file, key, source)
                with torch.no_grad():
                    into[target] = part.to(into.device)
                missing -= part.numel()
            used = len(stored)
            if missing <= 0:
                return
            if not self._unread:
                raise InputError(f"checkpoint {self._path} is incomplete: {missing} elements of {kind} {box.name} are in no "
                                 "file")
            self._open(self._unread.pop(0))

    def _slice(self, file: Any, key: str, source: Any) -> torch.Tensor:
        try:
            return file.get_slice(key)[source]
        except (OSError, SafetensorError) as error:
            raise InputError(f"checkpoint {self._path} is damaged: {key}: {error}") from None

    def _open(self, name: str) -> None:
        if checksum(self._path / name) != self._checksums[name]:
            raise InputError(f"checkpoint {self._path} is damaged: {name} does not have the checksum of its manifest; {_OTHER}")
        try:
            file = safe_open(self._path / name, framework="pt")
            for key in file.keys():  # noqa: SIM118 (not a dict)
                kind, _, rest = key.partition(":")
                parameter, _, place = rest.rpartition("@")
                offset = tuple(map(int, place.split(",")))
                shape = tuple(file.get_slice(key).get_shape())
                self._stored.setdefault((kind, parameter), []).append((offset, shape, key, file))
        except (OSError, SafetensorError, ValueError) as error:
            raise InputError(f"checkpoint {self._path} is damaged: {name}: {error}; {_OTHER}") from None

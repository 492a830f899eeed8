"""A run's newest checkpoint, or a named one, as what is exported; and the folder that an export writes."""

from __future__ import annotations

import math
import operator
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from threed.base.errors import InputError
from threed.checkpoint.box_reader import BoxReader
from threed.checkpoint.format import MANIFEST, Unusable, checkpoints, folder, is_name
from threed.checkpoint.lineage import read_latest
from threed.checkpoint.manifest import unseal
from threed.checkpoint.proof import MASK, checksum
from threed.config import load as configs
from threed.data.run_tokenizer import kept_for
from threed.features.zero.boxes import Box
from threed.interop.hf import sidecar as kept
from threed.interop.hf.places import located
from threed.interop.hf.slices import blocks
from threed.interop.hf.tensors import PIECE
from threed.monitor.folders import as_run
from threed.schema import Config, RunConfig
from threed.spec.parameter import Parameter


class Exported(NamedTuple):
    """What an export has written."""

    family: str
    step: int
    folder: Path
    files: list[str]
    bytes: int
    notes: list[str]


class Trained:
    """A checkpoint that is exported. `like`: the folder of a model whose config.json and files are followed;
    None: what the import kept."""

    def __init__(self, run: Path, like: Path | None):
        self.path = newest(run)
        self.manifest = unseal(self.path)
        # the folder of the run, or the one in it that has the tokenizer of this checkpoint
        self.home = kept_for(run if self.path != run else run.parent.parent, self.manifest.tokenizer)
        self.config = configs.of_values({"model": _known(self.manifest.config["model"]),
                                         "data": self.manifest.config.get("data", {})},
                                        f"the config of {self.path}")
        self.kept = _kept(run, self.path, like)
        self._reader = BoxReader(self.path, self.manifest)
        # parameter of which parts were read -> elements that were not, and the checksum of those that were
        self._unread: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def read(self, parameter: Parameter, part: tuple[tuple[int, ...], tuple[int, ...]] | None = None
             ) -> torch.Tensor:
        """A parameter, or a part of it, (offset, shape); read in pieces, so that nothing else of its size is
        in memory. It is checked once all of its parts were read."""
        stored, name = parameter.stored, parameter.name
        first, size = part or (tuple(0 for _ in stored), stored)
        values = torch.empty(size)
        for offset, shape in blocks(size, PIECE // 4):
            here = tuple(slice(at, at + length) for at, length in zip(offset, shape, strict=True))
            place = tuple(map(operator.add, first, offset))
            self._reader.read("param", Box(name, place, shape, stored, 0, parameter.axes), values[here])
        left, total = self._unread.pop(name, (math.prod(stored), 0))
        left -= values.numel()
        total += checksum(values.view(-1), Box(name, first, size, stored, 0, parameter.axes))
        if left:
            self._unread[name] = left, total
        elif f"{total & MASK:016x}" != self.manifest.parameters[name].sums.get("param"):
            raise Unusable(self.path, f"is damaged: param {name} does not have the checksum of its manifest")
        return values

    @contextmanager
    def written(self, output: Path) -> Iterator[Path]:
        """A folder to write into, which becomes `output` at the end. InputError where that is there already,
        or cannot be written."""
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise InputError(f"{output} is there already: give a folder that is not")
        aside = output.with_name(output.name + ".tmp")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
            yield aside
            if output.is_dir():
                output.rmdir()
            os.replace(aside, output)
        except OSError as error:
            raise InputError(f"{output} cannot be written: {error.strerror or error}") from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def exported(self, family: str, output: Path, notes: list[str]) -> Exported:
        return Exported(family, self.manifest.step, output, sorted(each.name for each in output.iterdir()),
                        sum(each.stat().st_size for each in output.iterdir()), notes)


def newest(run: Path) -> Path:
    """The newest checkpoint of a run, by its file `latest`; or the folder itself, if it is a checkpoint."""
    if (run / MANIFEST).is_file():
        return run
    config = Config(run=RunConfig(dir=str(as_run(run))))
    named, _ = read_latest(config)
    if is_name(named) and (folder(config) / named / MANIFEST).is_file():
        return folder(config) / named
    try:
        found = checkpoints(config)
    except OSError as error:
        raise InputError(f"{folder(config)} cannot be listed: {error.strerror}") from None
    if not found:
        raise InputError(f"{run} has no complete checkpoint; give the run.dir of a run, or a checkpoint "
                         f"such as {run}/checkpoints/step-00000100")
    return found[0]


def _known(model: dict[str, Any]) -> dict[str, Any]:
    """The keys of a model that do not ask for a mesh."""
    return {key: value for key, value in model.items() if key not in ("tile_linears", "name")}


def _kept(run: Path, path: Path, like: Path | None) -> Path | None:
    """The folder whose config.json and files are followed."""
    if like is not None:
        try:
            return located(like)[0]
        except InputError as error:
            raise InputError(f"--like {like}: {error}") from None
    places = [run / kept.FOLDER, path.parent / kept.FOLDER, path.parent.parent / kept.FOLDER]
    return next((place for place in places if (place / kept.CONFIG).is_file()), None)

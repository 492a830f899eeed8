"""Choose: which checkpoint a run goes on from, by `train.resume`, and what is said of it.

`auto` takes the newest of the run's own lineage; where a start named a checkpoint, what came after that one in
an older lineage is left behind. A checkpoint in a store is fetched into run.dir first; so is the newest of checkpoint.copy_to
where run.dir has nothing at all, as after the loss of its disk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from threed.address import is_store
from threed.checkpoint.copy import fetch
from threed.checkpoint.format import Unusable, checkpoints, folder, is_name, step_of, unseal
from threed.checkpoint.lineage import Lineage, read_latest, write_latest
from threed.errors import InputError, RunError
from threed.schema import Config


def candidates(config: Config, say: Callable[[str], None]) -> Iterator[tuple[Path, Lineage]]:
    """Checkpoints to try, the best first, each with the lineage that goes on from it. `say` is told what is fetched."""
    (named, lineage), place = read_latest(config), config.checkpoint.copy_to
    if config.train.resume == "auto" and place is not None and lineage is None and not checkpoints(config):
        if (path := fetch(place, folder(config), say)) is not None:
            yield path, Lineage.of(unseal(path))
    elif config.train.resume == "auto" or (lineage is not None and lineage.goes_on(config)):
        yield from _of_lineage(config, named, lineage)
    elif is_store(config.train.resume):
        if (path := fetch(config.train.resume, folder(config), say)) is None:
            raise InputError(f"train.resume={config.train.resume}: there is no complete checkpoint; give a folder of copies, "
                             "or one of them, such as s3://BUCKET/RUN/step-00000100")
        yield path, Lineage.new(config, path)
    elif config.train.resume != "never":
        yield Path(config.train.resume), Lineage.new(config)


def _of_lineage(config: Config, named: str, lineage: Lineage | None) -> Iterator[tuple[Path, Lineage]]:
    """The lineage's checkpoints, and the one elsewhere from which it began; without a `latest`, all that there are."""
    complete = checkpoints(config)
    if lineage is None:
        for path in complete:
            with contextlib.suppress(InputError):
                lineage = Lineage.of(unseal(path))
            yield path, lineage or Lineage.new(config)
        return
    if is_name(named) and folder(config) / named not in complete:  # it was there: that it is not is said
        complete = sorted([*complete, folder(config) / named], key=step_of, reverse=True)
    yield from ((path, lineage) for path in complete if lineage.holds(path))
    if os.path.isabs(named):
        yield Path(named), lineage


def is_free(config: Config) -> bool:
    """Whether an older checkpoint will do where the newest is damaged."""
    _, lineage = read_latest(config)
    return config.train.resume == "auto" or (lineage is not None and lineage.goes_on(config))


def begin_lineage(config: Config, path: Path | None, lineage: Lineage) -> None:
    """On rank 0, before the first step: a start that was asked for by name leaves newer checkpoints of the folder behind."""
    if read_latest(config)[1] == lineage:
        return
    own = path is not None and is_name(path.name) and path.resolve().parent == folder(config).resolve()
    name = "none" if path is None else path.name if own else str(path.resolve())
    try:
        write_latest(config, name, lineage)
    except OSError as error:
        raise RunError(f"run.dir={config.run.dir} cannot be written: {error}; checkpoints would have no place") from None


def read_manifest(path: Path, config: Config) -> dict[str, Any]:
    """The manifest, once all files are there whole and the model is the config's."""
    if not path.is_dir() and str(path) == config.train.resume:
        raise InputError(f"train.resume={path}: there is no checkpoint here; give a folder such as "
                         "runs/NAME/checkpoints/step-00000100, or auto")
    manifest = unseal(path)
    for name, (size, *_) in manifest["files"].items():
        try:
            there = (path / name).stat().st_size
        except OSError as error:
            raise Unusable(path, f"is incomplete: {name} cannot be read ({error.strerror})") from None
        if there != size:
            raise Unusable(path, f"is damaged: {name} has {there} bytes, not {size}")
    if manifest["waiting"] and not config.offload.delayed_update:
        raise InputError(f"checkpoint {path} holds gradients that its next step was to apply; go on with "
                         "offload.delayed_update=true as it was made, or resume from one that was saved before the first delayed "
                         "step, or after the last")
    mine, model = config.to_dict()["model"], manifest["config"]["model"]
    free = {"name", "dropout", "attention_dropout", "init_std", "tile_linears"}  # do not change what the weights mean
    different = [f"model.{key}={model.get(key)} there, {mine[key]} here" for key in mine
                 if key not in free and model.get(key) != mine[key]]
    if different:
        raise InputError(f"checkpoint {path} is of another model: {'; '.join(different)}")
    return manifest


def notes(path: Path, manifest: dict[str, Any], config: Config) -> list[str]:
    """What a resumed run does otherwise than the one that saved."""
    lines = []
    mine, theirs = config.to_dict(), manifest["config"]
    for key in ("train.seed", "train.global_batch_size", "data.source", "data.tokenizer", "data.append_eod",
                "data.validation_fraction", "optimizer.name", "precision.dtype"):
        section, name = key.split(".")
        before = theirs.get(section, {}).get(name)
        if before != mine[section][name]:
            lines.append(f"{key} was {before} in {path.name} and is {mine[section][name]} from here on")
    before, now = manifest["mesh"], {"pp": config.parallel.pp, "dp": config.dp, "tp": config.parallel.tp}
    if any(before[axis] != size for axis, size in now.items()):
        lines.append(f"{path.name} was saved by {_mesh(before)}, and goes on on {_mesh(now)}; the global batch is "
                     f"{config.train.global_batch_size} sequences")
    return lines


def _mesh(sizes: dict[str, Any]) -> str:
    return f"{sizes['pp'] * sizes['dp'] * sizes['tp']} ranks (pp {sizes['pp']} x dp {sizes['dp']} x tp {sizes['tp']})"

"""Choose: which checkpoint a run goes on from, by `train.resume`, and what is said of it.

`auto` takes the newest of the run's own lineage (`format`); where a start named a checkpoint, what came after that one in
an older lineage is left behind.
"""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from typing import Any

from threed import environment
from threed.checkpoint.format import Unusable, checkpoints, folder, read_latest, step_of, unseal, write_latest
from threed.errors import InputError
from threed.schema import Config


def candidates(config: Config) -> list[tuple[Path, str]]:
    """Checkpoints to try, the best first, each with the lineage that goes on from it."""
    named, lineage = read_latest(config)
    if config.train.resume == "auto":
        return [(path, lineage or new_lineage(config)) for path in _of_lineage(config, named, lineage)]
    own = new_lineage(config)
    origin, _, _ = own.rpartition("-")
    if environment.restarted() and lineage.startswith(f"{origin}-"):  # it has gone on from there before
        return [(path, lineage) for path in _of_lineage(config, named, lineage)]
    return [(Path(config.train.resume), own)] if config.train.resume != "never" else []


def _of_lineage(config: Config, named: str, lineage: str) -> list[Path]:
    """The newest of the lineage, then what `latest` names, then all before that."""
    complete = checkpoints(config)
    if not named:
        return complete
    last = -1 if named == "none" else step_of(Path(named))
    if len(Path(named).parts) > 1:  # the lineage begins at a checkpoint elsewhere
        return [*(path for path in complete if _belongs(path, lineage)), Path(named)]
    if last >= 0 and folder(config) / named not in complete:  # it was there: that it is not is said
        complete = sorted([*complete, folder(config) / named], key=step_of, reverse=True)
    newer = [path for path in complete if step_of(path) > last and _belongs(path, lineage)]
    return [*newer, *(path for path in complete if step_of(path) <= last)]


def _belongs(path: Path, lineage: str) -> bool:
    try:
        return unseal(path)["lineage"] == lineage
    except InputError:
        return True  # it is tried, and refused with its reason


def is_free(config: Config) -> bool:
    return config.train.resume == "auto" or environment.restarted()


def new_lineage(config: Config) -> str:
    """ORIGIN-NUMBER: the origin says from where it went on, so that a restart knows its own."""
    origin = {"auto": "new", "never": "never"}.get(config.train.resume)
    if origin is None:  # by its address: the run may have removed it since
        origin = hashlib.blake2b(str(Path(config.train.resume).resolve()).encode(), digest_size=4).hexdigest()
    return f"{origin}-{uuid.uuid4().hex[:8]}"


def begin_lineage(config: Config, path: Path | None, lineage: str) -> None:
    """On rank 0, before the first step: a start that was asked for by name leaves newer checkpoints of the folder behind."""
    if read_latest(config)[1] == lineage:
        return
    own = path is not None and step_of(path) >= 0 and path.resolve().parent == folder(config).resolve()
    name = "none" if path is None else path.name if own else str(path.resolve())
    try:
        write_latest(config, name, lineage)
    except OSError as error:
        raise InputError(f"run.dir={config.run.dir} cannot be written: {error}; checkpoints would have no place") from None


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

"""Named: the checkpoint that `train.resume` names: by its folder, by its name or its step in run.dir, or by
the folder of a run, of its checkpoints or of their copies, of which the newest is meant."""

from __future__ import annotations

from pathlib import Path

from threed.base.errors import InputError
from threed.checkpoint.format import (
    INDEX,
    LATEST,
    MANIFEST,
    folder,
    folder_in,
    is_name,
    name_of,
    rank_of,
)
from threed.checkpoint.lineage import newest
from threed.schema import Config

# What other programs leave in the folder of a checkpoint.
_FOREIGN = ("*.pt", "*.pth", "*.ckpt", "*.distcp", "latest_checkpointed_iteration.txt", "global_step*",
            "mp_rank_*", "iter_*", "checkpoint-*")


def named(config: Config) -> Path:
    """The folder of the checkpoint. InputError where there is none."""
    path = Path(config.train.resume)
    if not path.exists():
        name = name_of(int(path.name)) if config.train.resume.isdecimal() else config.train.resume
        path = folder(config) / name if is_name(name) else path
    if path.is_file() and (path.name in (MANIFEST, INDEX, LATEST) or rank_of(path.name) >= 0):
        path = path.parent
    if (path / MANIFEST).exists() or (path.is_dir() and is_name(path.name)):
        return _as_in_folder(config, path)
    found = newest(path) or newest(folder_in(path))
    if found is None:
        raise InputError(f"train.resume={config.train.resume}: {_why_not(path)}")
    return _as_in_folder(config, found)


def _as_in_folder(config: Config, path: Path) -> Path:
    """The path of a checkpoint; for a checkpoint of this run's folder, its path by that folder's name."""
    same = folder(config) / path.name
    return same if is_name(path.name) and path.resolve() == same.resolve() else path


def _why_not(path: Path) -> str:
    """Why a path names no checkpoint, and what to give."""
    give = "give a folder such as runs/NAME/checkpoints/step-00000100, that of a run, or auto"
    if not path.exists():
        return f"there is no checkpoint here; {give}"
    if folder_in(path).is_dir() or (path / LATEST).is_file():
        return f"this run has saved no complete checkpoint yet; {give}"
    if runs := sorted(path.glob("*/checkpoints")):
        return f"this folder holds runs; give one of them, such as {runs[0].parent}"
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return (f"this is a model of transformers; threed import {path} -o RUN makes the folder of a run of "
                "it, and threed train RUN goes on there")
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin") or any(any(path.glob(each)) for each in _FOREIGN):
        return ("this is a checkpoint of another program: bring it into the format of transformers with that "
                "program, then use threed import")
    return f"there is no checkpoint in it; {give}"

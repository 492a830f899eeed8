"""Folders: what a command is given where it wants a config, or the folder of a run, and what it says where it
gets the other one. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from threed.base.errors import InputError
from threed.base.shipped import find_file
from threed.checkpoint.format import MANIFEST, is_name
from threed.config import load as configs
from threed.config.load import overrides_of
from threed.data.sampling import IMPORTED
from threed.planner.from_config import CONFIG

IMPORT = "config.yaml"  # which threed import writes
_OWN = (CONFIG, "metrics.jsonl", "state.json", "checkpoints", "trace", IMPORTED)  # of a run


def to_train(given: str | Path, overrides: Sequence[str] | None) -> tuple[Path, list[str]]:
    """The config file to train by, and overrides. Where the folder of a run is given, the run goes on there
    (train.resume=auto) with the config of its last start, or, if it was imported and has not been trained,
    with that of the import. InputError where there is neither."""
    overrides_of(overrides)  # raises for bad ones
    path, own = Path(given), list(overrides or [])
    if not path.is_dir():
        return find_file(path), own
    file = next((path / name for name in (CONFIG, IMPORT) if (path / name).is_file()), None)
    if file is None or not _is_run(path):
        raise no_run(path, "a YAML config, or the folder of a run", f", and train.resume={path}")
    return file, [f"run.dir={json.dumps(str(path).replace('$', '$$'))}", "train.resume=auto", *own]


def as_run(given: str | Path) -> Path:
    """The folder of a run. InputError where something else was given."""
    path = Path(given)
    if path.is_dir() and (_is_run(path) or not _below(path)):
        if not (path / MANIFEST).is_file():
            return path
    raise no_run(path, "the folder that run.dir named")


def no_run(path: Path, give: str, begins: str = "") -> InputError:
    """The error for a path that is no run. `give`: what is wanted. `begins`: how to begin with the path, if
    it is a checkpoint."""
    if path.is_dir():
        if (path / MANIFEST).is_file():
            inside = is_name(path.name) and path.parent.name == "checkpoints"
            run = path.parents[1] if inside else "RUN"
            return InputError(f"{path} is a checkpoint; give {give}, such as {run}{begins}")
        if below := _below(path):
            return InputError(f"{path} holds runs, and is none itself; give {give}, such as {below[0]}; "
                              f"threed runs {path} lists them")
        return InputError(f"{path} is a folder and no run: it has no {CONFIG}; give {give}")
    if not path.exists():
        return InputError(f"{path}: there is no such run; give {give}")
    if path.name in _OWN or (path.name == IMPORT and _is_run(path.parent)):
        return InputError(f"{path} is a file of a run; give {give}: {path.parent}")
    try:
        folder = configs.load(path).run.dir
    except (InputError, ValueError):
        return InputError(f"{path} is a file; give {give}")
    return InputError(f"{path} is a config; give {give}: its run.dir is {folder}"
                      + ("" if Path(folder).is_dir() else ", which is not there yet"))


def _is_run(path: Path) -> bool:
    return any((path / name).exists() for name in _OWN)


def _below(path: Path) -> list[Path]:
    """Runs in a folder."""
    try:
        return sorted(file.parent for file in path.glob(f"*/{CONFIG}"))
    except OSError:
        return []

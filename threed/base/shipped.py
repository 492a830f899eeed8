"""Shipped: files that come with threed beside its code: configs, launch scripts, examples. They are in the
repository, and in the package that is installed from a wheel."""

from __future__ import annotations

from pathlib import Path

from threed.base.errors import InputError

HERE = Path(__file__).parents[1]
FOLDERS = ("configs", "examples", "launch")


def names() -> list[str]:
    """All of them, such as launch/slurm.sbatch."""
    files = (file for folder in FOLDERS for file in (HERE / folder).rglob("*"))
    return sorted(file.relative_to(HERE).as_posix() for file in files
                  if file.is_file() and file.name != "__init__.py" and "__pycache__" not in file.parts)


def path_of(name: str) -> Path:
    """Where a file, or one of FOLDERS, is on this machine. InputError where there is none."""
    path = HERE / name
    if name.partition("/")[0] not in FOLDERS or ".." in path.parts or not path.exists():
        raise InputError(f"threed comes with no file {name}; it comes with\n  " + "\n  ".join(names()))
    return path.resolve()


def find_file(path: str | Path) -> Path:
    """The file itself, or else the one that ships with the package under configs/."""
    path = Path(path)
    if path.is_file():
        return path
    if path.exists():
        inside = [path / name for name in ("config.json", "config.yaml") if (path / name).is_file()]
        kind = "the folder of a run" if inside else "not a file"
        raise InputError(f"{path} is {kind}; give a YAML config such as "
                         f"{[*inside, 'configs/toy.yaml'][0]}")
    shipped = HERE / "configs"
    inside = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    if not path.is_absolute() and (shipped / inside).is_file():
        return shipped / inside
    if "=" in path.name:
        raise InputError(f"there is no config file before the override {path}: give one, as in CONFIG {path}")
    from threed.base.words import nearest

    known = sorted(f"configs/{file.name}" for file in shipped.glob("*.yaml"))
    names = {Path(name).stem: name for name in known}
    near = nearest(path.stem, names)
    listed = "".join(f"\n  {name}" for name in known)
    raise InputError(f"no config file {path}{f'; did you mean {names[near]}?' if near else ''}\n"
                     f"threed ships{listed}\nand threed init writes one for your model and devices")

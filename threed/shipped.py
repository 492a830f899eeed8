"""Shipped: files that come with threed beside its code: configs, launch scripts, examples. They are in the
repository, and in the package that is installed from a wheel."""

from __future__ import annotations

from pathlib import Path

from threed.errors import InputError

HERE = Path(__file__).parent
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

"""What runs from the command line have in common: something to read, and disks of a size."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.running import Run


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Overrides for a small corpus, which the first run prepares for all."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").mkdir()
    for name in ("argparse", "ast", "datetime", "decimal", "inspect", "typing"):
        shutil.copy(Path(os.__file__).parent / f"{name}.py", folder / "text")
    return [f"data.source={folder / 'text'}", f"data.cache={folder / 'cache'}"]


@pytest.fixture
def mount(tmp_path):
    """mount(options) -> a small file system in memory. Only root may mount one: others skip the test."""
    mounted = []

    def make(options: str) -> Path:
        folder = tmp_path / f"mounted-{len(mounted)}"
        folder.mkdir()
        if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder],
                                               capture_output=True).returncode:
            pytest.skip("needs the right to mount a small file system")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def begin(tmp_path, cache):
    """begin(arguments, *overrides) -> a run in tmp_path/run, or in another folder; what still runs at the end
    is killed."""
    runs = []

    def run(arguments: list[str], *overrides: str, name: str = "run",
            env: dict[str, str] | None = None) -> Run:
        runs.append(Run(tmp_path, *arguments, *cache, f"run.dir={tmp_path / name}", *overrides, env=env))
        return runs[-1]

    yield run
    for each in runs:
        each.kill()

"""What is published: versions, the text for a package index, and what people are told to install."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from threed.base import shipped
from threed.base.errors import InputError

ROOT = Path(__file__).parents[2]
REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)==([^;\s]+)", re.MULTILINE)


def same(name: str) -> str:
    """A package's name as an index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lock_has_the_versions_of_the_constraints():
    """`uv sync` and `make install` install the same."""
    wanted: dict[str, set[str]] = {}
    for name, version in REQUIREMENT.findall((ROOT / "constraints.txt").read_text()):
        wanted.setdefault(same(name), set()).add(version)
    locked: dict[str, set[str]] = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        locked.setdefault(package["name"], set()).add(package.get("version", "of this repository"))
    missing = wanted.keys() - locked.keys()
    differs = {name: (sorted(locked[name]), sorted(wanted[name])) for name in wanted.keys() & locked.keys()
               if not wanted[name] <= locked[name]}
    assert not missing and not differs, "run `make lock`"
    # The rest of the lock: packages of CUDA builds, and of other versions of Python.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {same(re.split(r"[\[<>=;, ]", text)[0]) for text in project["dependencies"]}
    assert needed - {"triton"} <= wanted.keys()


@pytest.fixture(scope="module")
def text() -> str:
    """The long description, as setup.py gives it to a package index."""
    done = subprocess.run([sys.executable, "setup.py", "--quiet", "--long-description"], cwd=ROOT, text=True,
                          capture_output=True, check=True)
    return done.stdout


def test_an_index_page_has_no_dead_links(text):
    """A relative link leads nowhere from an index page; the name of the file stays."""
    assert text.startswith("# threed") and "threed check CONFIG" in text
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert targets and all(target.startswith("https://") for target in targets)
    assert "![" not in text and "`docs/search.md`" in text


def test_files_that_come_with_it():
    """Of a wheel a user finds the launch scripts and examples by a command."""
    assert {"launch/torchrun.sh", "launch/kubernetes.yaml", "examples/vit.py", "configs/toy.yaml"} <= set(
        shipped.names())
    assert shipped.path_of("launch/slurm.sbatch") == ROOT / "launch" / "slurm.sbatch"
    for name in ("launch/none.sh", "extend.py", "launch/../extend.py"):
        with pytest.raises(InputError, match="comes with no file"):
            shipped.path_of(name)


def test_nobody_is_sent_to_another_project():
    """On the package index the name threed is another project's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "threed-train"
    told = re.compile(r"(?:pip|uv|pipx)\s+(?:add|install)\s+(?:-\S+\s+)*['\"]?threed(?![\w./-])")
    assert told.search("pip install 'threed[data]'") and told.search("uv add threed")
    here = Path(__file__)
    for folder in ("threed", "models", "docs", "tests", "bench", "launch", "examples", "configs", "."):
        pattern = "*" if folder == "." else "**/*"
        for file in (ROOT / folder).glob(pattern):
            if file.suffix in (".py", ".md", ".yaml", ".sh") and file != here:
                assert not told.search(file.read_text(encoding="utf-8")), file

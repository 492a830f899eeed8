"""The documents say what the commands print."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from threed.cli import app
from threed.config import known_keys, load
from threed.schema import Config

ROOT = Path(__file__).parents[2]


def run(line: str) -> str:
    """The output of `threed ...`, with `| tail -n N` taken literally."""
    command, _, tail = line.partition(" | tail -n ")
    words = shlex.split(command)
    assert words[0] == "threed"
    output = io.StringIO()
    with redirect_stdout(output):
        app(words[1:], standalone_mode=False)
    lines = output.getvalue().splitlines()
    return "\n".join(lines[-int(tail):] if tail else lines)


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md"])
def test_console_blocks(name, monkeypatch):
    """Each ```console block is a command and exactly what it prints."""
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```console\n\$ (.*?)\n(.*?)\n```", (ROOT / name).read_text(), re.DOTALL)
    assert blocks
    for command, expected in blocks:
        assert run(command) == expected, command


def test_named_files_exist():
    """Paths in the documents are there."""
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"):
        for path in re.findall(r"`((?:threed|models|configs|launch|tests)/[\w/.-]+\.\w+)`", (ROOT / name).read_text()):
            assert (ROOT / path).exists(), f"{name}: {path}"


def test_reference_config():
    """configs/reference.yaml holds every key with its default."""
    given = OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / "reference.yaml"))
    assert isinstance(given, dict)
    assert [f"{section}.{key}" for section, values in given.items() for key in values] == known_keys()
    default = Config().to_dict()
    assert given == default


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load(path):
    assert load(path).world_size >= 1

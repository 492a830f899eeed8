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
from threed.pipeline.orders import SCHEDULES
from threed.predict.bare import predict_bare
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


def test_pictures(tmp_path, monkeypatch):
    """Each picture in README is what the command under it draws."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"`(threed show .*?) --svg (docs/schedules/[\w-]+\.svg)`", text)
    assert {path for _, path in commands} == set(re.findall(r"\]\((docs/schedules/[\w-]+\.svg)\)", text))
    for command, path in commands:
        run(f"{command} --svg {tmp_path / 'drawn.svg'}")
        assert (tmp_path / "drawn.svg").read_text() == (ROOT / path).read_text(), command


def test_rates():
    """The schedules' rates in README are those that `threed predict` gives."""
    rows = re.findall(r"\| `([\w-]+)` \| .* \| (0\.\d{3}) \|", (ROOT / "README.md").read_text())
    assert len(rows) == len(SCHEDULES)
    for name, rate in rows:
        found = predict_bare(name, 8, 24, {"f": 1.0, "b": 1.0, "w": 1.0, "comm": 0.0})
        assert f"{found['bubble_rate']:.3f}" == rate, name


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

"""Prepared data on this machine: what there is, what is in use, what is removed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from threed.base.errors import InputError
from threed.cli import main as cli
from threed.data import cache
from threed.data.cache import cache_root
from threed.data.samples import Tokens
from threed.data.tokens import prepare
from threed.schema import DataConfig, ModelConfig

DAY_S = 86400.0


def prepared(tmp_path, name: str, age_s: float = 0.0):
    (tmp_path / name).write_text(f"{name} " * 99)
    made = prepare(DataConfig(str(tmp_path / name), cache=str(tmp_path / "cache")), ModelConfig(vocab=300))
    then = time.time() - age_s
    os.utime(made.prefix.with_name("meta.json"), (then, then))
    return made


def test_what_is_old_and_not_in_use_is_removed(tmp_path):
    root = tmp_path / "cache"
    old, used, new = (prepared(tmp_path, name, age_s) for name, age_s in
                      (("old.txt", 40 * DAY_S), ("used.txt", 0.0), ("new.txt", DAY_S)))
    tokens = Tokens(used.prefix)  # as a run has them
    then = time.time() - 50 * DAY_S
    os.utime(used.prefix.with_name("meta.json"), (then, then))
    (root / "mine").mkdir()  # of somebody else
    found = cache.entries(root)
    assert [entry.source.split("/")[-1] for entry in found] == ["new.txt", "old.txt", "used.txt"]
    assert [entry.in_use for entry in found] == [False, False, True]
    assert found[1].size == sum(path.stat().st_size for path in old.prefix.parent.iterdir())
    shown = cache.show(root, found).splitlines()
    assert len(shown) == 5 and "40d" in shown[2] and "in use" in shown[3] and "in all" in shown[4]
    removed, kept = cache.clean(root, 30 * DAY_S)
    assert [entry.folder for entry in removed] == [old.prefix.parent]
    assert [entry.folder for entry in kept] == [used.prefix.parent]
    assert sorted(path.name for path in root.iterdir()) == sorted(
        ["mine", used.prefix.parent.name, new.prefix.parent.name])
    tokens.check(0, tokens.num_tokens)
    assert tokens._use is not None
    tokens._use.close()
    assert len(cache.clean(root, 0.0)[0]) == 2 and cache.entries(root) == []
    assert cache.entries(tmp_path / "none") == []


def test_using_prepared_data_makes_them_new(tmp_path):
    made = prepared(tmp_path, "a.txt", 40 * DAY_S)
    prepared(tmp_path, "a.txt")
    assert cache.entries(tmp_path / "cache")[0].age_s < DAY_S
    (made.prefix.with_name("meta.json")).write_text("{")
    (entry,) = cache.entries(tmp_path / "cache")
    assert entry.source == "? (damaged)"


@pytest.mark.parametrize("text, age_s", [
    ("30d", 30 * DAY_S), ("1.5h", 5400.0), ("2w", 14 * DAY_S), ("0", 0.0)])
def test_ages(text, age_s):
    assert cache.parse_age(text) == age_s


@pytest.mark.parametrize("text", ["", "d", "30", "3x", "-1d", "1d2h"])
def test_what_is_no_age(text):
    with pytest.raises(InputError, match=r"is not an age; write for example 30d"):
        cache.parse_age(text)


def test_the_verb(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "_OLD_S", 0.0)
    run = CliRunner().invoke
    assert run(cli.app, ["data", "--list"]).output == f"{tmp_path}/threed holds no prepared data\n"
    (tmp_path / "threed").mkdir()
    (tmp_path / "cache").symlink_to("threed")
    made = prepared(tmp_path, "a.txt", DAY_S)
    (listed,) = json.loads(run(cli.app, ["data", "--list", "--json"]).output)
    assert listed["folder"] == str(tmp_path / "threed" / made.prefix.parent.name) and not listed["in_use"]
    assert "nothing that old" in run(cli.app, ["data", "--clean", "2d"]).output
    done = json.loads(run(cli.app, ["data", "--clean", "12h", "--json"]).output)
    assert [len(done["removed"]), done["in_use"]] == [1, []] and not made.prefix.parent.exists()
    for given, says in ((["--list", "--clean", "0"], "exclude each other"), ([], "give the CONFIG")):
        assert says in str(run(cli.app, ["data", *given]).exception)


def test_no_home_folder(monkeypatch):
    """As in a container whose user is a number."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def nobody(number: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", nobody)
    with pytest.raises(InputError, match=r"no home folder, and HOME is not set: set data.cache"):
        cache_root(DataConfig())
    assert cache_root(DataConfig(cache="/data/cache")) == Path("/data/cache")

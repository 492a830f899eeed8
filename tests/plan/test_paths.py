"""`~` and variables in paths: the same in every key, from a file and from an override."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest

from threed.base import paths
from threed.base.errors import ConfigError, InputError
from threed.config import load as configs
from threed.config.load import known_keys, load
from threed.config.values import PATHS, expand, get
from threed.schema import Config

HOME = os.path.expanduser("~")
# key -> a value with a place for a path, and other keys that it needs
FORMS = {"data.mix": ('["0.25 {}","0.75 {}"]', []), "parallel.schedule": ("file:{}", ["parallel.pp=1"])}
# keys whose value names a place of something, but is no path: of wandb, of a registry, of texts
NO_PATHS = {"model.name", "monitor.name", "monitor.project", "monitor.group"}


@pytest.fixture(autouse=True)
def scratch(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.delenv("NOWHERE", raising=False)


def given(key: str, path: str) -> str:
    return FORMS.get(key, ("{}", []))[0].replace("{}", path)


def values_of(key: str, texts: list[str], tmp_path: Path) -> list[object]:
    """What a key holds, given as an override and in a file."""
    if key == "model.family":
        return []
    file = tmp_path / "config.yaml"
    section, name = key.split(".")
    found = []
    for text in texts:
        file.write_text(f"{section}: {{{name}: {text if text.startswith('[') else repr(text)}}}\n")
        for path, overrides in ((None, [f"{key}={text}"]), (file, [])):
            source = configs.ConfigSource.read(path, overrides)
            expanded, problems = expand({**source.values, **source.others})
            assert not problems
            found.append(expanded[key])
    return found


@pytest.mark.parametrize("key", [key for key in PATHS if key != "model.family"])
def test_every_key(key, tmp_path):
    for path, expected in (("~/x", f"{HOME}/x"), ("$SCRATCH/x", "/scratch/me/x"),
                           ("${SCRATCH}/x/", "/scratch/me/x/"), ("${oc.env:SCRATCH}/y", "/scratch/me/y"),
                           ("a/../b~c", "a/../b~c"), ("/x/$SCRATCH", "/x//scratch/me"), ("x$5", "x$5")):
        wanted = given(key, expected)
        for value in values_of(key, [given(key, path)], tmp_path):
            shown = str(value).replace("'", '"').replace(", ", ",") if isinstance(value, list) else value
            assert shown == wanted, (key, path)


def test_the_table_has_every_key_that_holds_a_path():
    """A new key with a path that is not in the table would be the one that does not know ~."""
    words = ("path", "folder", "file", "dir", "source", "tokenizer", "template", "cache", "resume", "copy_to",
             "costs", "mix", "family")
    named = {key for key in known_keys() if any(word in key.split(".")[1] for word in words)}
    assert named - NO_PATHS <= set(PATHS), named - set(PATHS)
    assert set(PATHS) <= set(known_keys())


@pytest.mark.parametrize("key", list(PATHS))
def test_what_the_environment_has_not(key, tmp_path):
    """An error names the key and the variable, and no folder `$NOWHERE` is made."""
    value = f"{{}}{'/m.py:FAMILY' if key == 'model.family' else ''}"
    for path, says in (("$NOWHERE/x", "the environment has no variable NOWHERE"),
                       ("${NOWHERE}/x", "the environment has no variable NOWHERE"),
                       ("~nobody-here/x", "there is no user nobody-here")):
        text = given(key, value.replace("{}", path)) if key != "model.family" else value.replace("{}", path)
        with pytest.raises(ConfigError) as error:
            load(None, [f"{key}={text}"])
        assert any(each.key == key and says in each.text for each in error.value.problems), error.value


def test_addresses_and_names_stay():
    config = load(None, ["checkpoint.copy_to=s3://bucket/~x/$SCRATCH", "data.tokenizer=bpe",
                         "train.resume=never", "parallel.schedule=gpipe"])
    assert config.checkpoint.copy_to == "s3://bucket/~x/$SCRATCH" and config.train.resume == "never"
    assert (config.data.tokenizer, config.parallel.schedule) == ("bpe", "gpipe")


def test_a_config_of_a_script_and_of_a_file(tmp_path):
    """threed.train(Config(...)) goes another way than a file."""
    config = Config()
    config.run.dir, config.data.mix = "~/x", ["1 $SCRATCH/a", "2 b"]
    config.parallel.dp = 1
    own = configs.checked(config)
    assert own.run.dir == f"{HOME}/x" and own.data.mix == ["1 /scratch/me/a", "2 b"]
    assert config.run.dir == "~/x", "the script's own is left alone"
    file = tmp_path / "c.yaml"
    file.write_text("run.dir: ${SCRATCH}/r\nmodel: {family: '$SCRATCH/m.py:F'}\n")
    with pytest.raises((InputError, ConfigError), match=r"/scratch/me/m\.py"):
        load(file, [])
    assert get(load(None, ["run.dir=$SCRATCH/r"]), "run.dir") == "/scratch/me/r"


def test_interpolation_of_keys(tmp_path):
    """OmegaConf's own: a value of another key."""
    file = tmp_path / "c.yaml"
    file.write_text("run: {dir: /r}\ncheckpoint: {copy_to: '${run.dir}/copies'}\n")
    assert load(file).checkpoint.copy_to == "/r/copies"


def test_arguments_of_commands():
    """Words in quotes, and behind `=`, which no shell expands; a prompt is a text."""
    words = ["generate", "~/run", "--prompt=~/x", "--prompt", "~", "--tokenizer=~/t.json", "--checkpoint",
             "$SCRATCH/c", "parallel.tp=2", "--data=s3://x/~"]
    assert paths.arguments(words) == ["generate", f"{HOME}/run", "--prompt=~/x", "--prompt", "~",
                                      f"--tokenizer={HOME}/t.json", "--checkpoint", "/scratch/me/c",
                                      "parallel.tp=2", "--data=s3://x/~"]
    assert paths.arguments(["train", "run.dir=~/x"]) == ["train", "run.dir=~/x"]
    with pytest.raises(InputError, match="the environment has no variable NOWHERE"):
        paths.arguments(["report", "$NOWHERE/x"])


def test_every_option_that_takes_a_path():
    from threed.cli.main import app

    for command in app.registered_commands:
        for name, hint in get_type_hints(command.callback, include_extras=True).items():
            if get_origin(hint) is not Annotated or "Path" not in str(get_args(hint)[0]):
                continue
            info = get_args(hint)[1]
            if type(info).__name__ == "OptionInfo":
                given = info.param_decls or (info.default,) if info.default is not ... else info.param_decls
                names = [word for word in given or () if isinstance(word, str)] or [f"--{name}"]
                assert set(names) <= set(paths.OPTIONS), (command.name, names)


@pytest.mark.parametrize("override", ["data.source=[a.jsonl,b.jsonl]", "run.dir=[x]", "train.resume=[a]"])
def test_a_list_in_place_of_a_path_is_a_problem(override):
    with pytest.raises(ConfigError, match="must be one text, not a list"):
        load(None, [override])


@pytest.mark.parametrize(("overrides", "key"), [
    (["data.source=TEXT", "run.dir=TEXT/run"], "run.dir"), (["data.source=TEXT", "run.dir=TEXT"], "run.dir"),
    (["data.source=TEXT", "data.cache=TEXT/sub/cache"], "data.cache"),
    (["data.source=LINK", "run.dir=TEXT/run"], "run.dir"),
    (['data.mix=["0.5 OTHER","0.5 TEXT"]', "run.dir=TEXT/run"], "run.dir"),
    (["data.source=TEXT/*.txt", "run.dir=TEXT/run"], None),
    (["data.source=TEXT/a.txt", "run.dir=TEXT/run"], None),
    (["data.source=TEXT", "run.dir=TEXT2/run", "data.cache=OTHER"], None)])
def test_a_run_does_not_write_among_its_data(overrides, key, tmp_path):
    """Its log, and the tokenizer in a cache, would be data of the next start."""
    for name in ("TEXT", "TEXT2", "OTHER"):
        (tmp_path / name).mkdir()
    (tmp_path / "TEXT/a.txt").write_text("a text")
    (tmp_path / "LINK").symlink_to(tmp_path / "TEXT")
    given = [text.replace("TEXT", f"{tmp_path}/TEXT").replace("OTHER", f"{tmp_path}/OTHER").replace(
        "LINK", f"{tmp_path}/LINK") for text in overrides]
    if key is None:
        load(None, given)
        return
    with pytest.raises(ConfigError, match=f"{key}=.* is within .*, all of whose files are data"):
        load(None, given)

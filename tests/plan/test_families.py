"""A user's family: what it gets wrong is a message that names family, layer and line."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import threed
from threed.base.errors import ConfigError, InputError, line_of
from threed.extend import F, Family, ModelConfig, family_of, gpt
from threed.models.families.registry import FAMILIES

ROOT = Path(__file__).parents[2]
HANDING = "model.family=tests/families/handing.py:HANDING"
HEAD = """from dataclasses import dataclass
from threed.models.families import gpt
from threed.models.families.base import Family
from threed.models.layers.attention import Attention
from threed.models.layers.base import Layer
from threed.models.layers.block import Block, Branch
from threed.models.layers.embedding import Embedding
from threed.models.layers.head import Head
from threed.models.layers.mlp import Mlp
from threed.models.layers.residual import Norm
from threed.schema import ModelConfig

def blocks(model):
    return [gpt.block(model, index) for index in range(model.layers)]

"""


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Lines of a family's file -> the message about it, without its first words."""
    monkeypatch.chdir(tmp_path)

    def call(text: str, *overrides: str) -> str:
        Path("mine.py").write_text(HEAD + text)
        family_of.cache_clear()
        with pytest.raises(InputError) as caught:
            threed.load("configs/toy.yaml", ["model.family=mine.py:MINE", *overrides])
        error = caught.value
        lines = list(map(str, error.problems)) if isinstance(error, ConfigError) else [str(error)]
        assert len(lines) == 1 and caught.value.status == 2, lines
        start = "model.family=mine.py:MINE: "
        assert lines[0].startswith(start)
        return lines[0].removeprefix(start)

    yield call
    family_of.cache_clear()


def of(expression: str) -> str:
    return f"MINE = Family(lambda model: {expression})\n"


# ---------------------------------------------------------------- layers


def test_names_of_parameters(refused):
    """Two parameters under one name: one of them is in no checkpoint."""
    blocks = "*(gpt.block(model, index % 4) for index in range(8))"
    said = refused(of(f"[Embedding(model), {blocks}, Head(model)]"))
    assert said.startswith("layers 1 ('blocks.0') and 5 ('blocks.0') both have a parameter named "
                           "'blocks.0.attention_norm.weight': ")


def test_names_in_a_layer(refused):
    """Two bodies of a branch with one name."""
    branch = "Branch('b', Norm(model, 'n'), Mlp(model, 'm'), Mlp(model, 'm'))"
    said = refused(of(f"[Embedding(model), Block('both', {branch}), Head(model)]"), "model.bias=false")
    assert said.startswith("layer 1 ('both') has twice a parameter named 'm.up.weight'")


@pytest.mark.parametrize("layers, said", [
    ("[Embedding(model), *blocks(model)]",
     r"the last layer, 'blocks\.7' \(a Block\), has no loss: end with Head\(model\), or .* loss = True"),
    ("[*blocks(model), Head(model)]",
     r"the first layer, 'blocks\.0' \(a Block\), does not embed tokens: begin with Embedding\(model\), or "),
    ("[Embedding(model), Block('b', Branch('a', Attention(model, 'a'), Mlp(model, 'm'))), Head(model)]",
     r"branch 'a' of 'b' has a Attention as its norm: it must be Branch\(name, norm, body, \.\.\.\)"),
    ("[Embedding(model), Block('b', Branch('a', Norm(model, 'n'))), Head(model)]",
     "branch 'a' of 'b' has no body: it must be "),
    ("[Embedding(model), Block('b', Branch('a', Norm(model, 'n'), None)), Head(model)]",
     "branch 'a' of 'b' has None as a body: it must be "),
    ("[Embedding(model), Block('b', None), Head(model)]", "block 'b' has None where a Branch must be"),
    ("[Embedding(model), None, Head(model)]",
     r"layers\(\) has None at index 1, which must be a Layer; does the function .* without return\?"),
    ("[Embedding(model), Attention(model, 'a'), Head(model)]",
     r"layers\(\) has a Attention at index 1, which must be a Layer$"),
    ("[Embedding(model), Layer(), Head(model)]", r"layers\(\) has a Layer without a name at index 1"),
    ("[Head(model)]", r"layers\(\) has 1 layers: it must have at least one that embeds"),
    ("None", r"layers\(\) returned None: it must return the list of layers, first to last"),
    ("(layer for layer in gpt.layers(model))", r"layers\(\) returned a generator: it must return the list"),
])
def test_layers_that_cannot_run(refused, layers, said):
    """What a plan can be made of, and no model: it fails at the first step, or it trains nothing."""
    assert re.match(said, refused(of(layers)))


@pytest.mark.parametrize("layers, said", [
    ("[Embedding()]", r"layers\(\) failed: TypeError: .*missing .*'model' \(.*mine\.py, line 16\)$"),
    ("[Embedding(model), Mlp(model)]", r"layers\(\) failed: TypeError: .*'name' \(.*mine\.py, line 16\)$"),
    ("[Embedding(model), Branch('a', None)]", r"layers\(\) failed: AttributeError: .*mine\.py, line 16\)$"),
    ("threed", r"layers\(\) failed: NameError: name 'threed' is not defined \(.*mine\.py, line 16\)$"),
])
def test_layers_that_fail(refused, layers, said):
    """An error in the function ends in a traceback."""
    assert re.match(said, refused(of(layers)))


def test_functions_that_fail(refused):
    """The check and the parameters of a family are its own code, too; so is its import."""
    fails = "MINE = Family(gpt.layers, check=lambda model, ranks: [ranks['no']])\n"
    assert re.match(r"check\(\) failed: KeyError: 'no' \(.*mine\.py, line 16\)$", refused(fails))
    layer = ("class Mine(Layer):\n    name = 'mine'\n    def parameters(self):\n        return 1 / 0\n"
             + of("[Embedding(model), Mine(), Head(model)]"))
    assert re.match(r"parameters\(\) failed: ZeroDivisionError: .*mine\.py, line 19\)$", refused(layer))
    said = r"mine\.py cannot be imported: ZeroDivisionError: .*mine\.py, line 16\)$"
    assert re.match(said, refused("1 / 0"))


def test_an_error_of_threed_s_own_family_is_no_input(monkeypatch):
    """A defect of threed must not look like a user's mistake."""
    from threed.models.families import registry
    from threed.models.families.base import Family

    monkeypatch.setitem(registry.FAMILIES, "gpt", Family(lambda model: 1 / 0))  # pyright: ignore
    family_of.cache_clear()
    with pytest.raises(ZeroDivisionError):
        threed.load("configs/toy.yaml")
    family_of.cache_clear()


# ---------------------------------------------------------------- configurations


@pytest.mark.parametrize("text, said", [
    ("class Mine(ModelConfig):\n    window: int = 4\n",
     "Mine.window is ignored, because Mine is no dataclass: write @dataclass above the class"),
    ("class Mine(ModelConfig):\n    bias: bool = False\n",
     "Mine.bias is ignored, because Mine is no dataclass"),
    ("class Mine(ModelConfig):\n    bias = False\n", "Mine.bias is ignored, because Mine is no dataclass"),
    ("@dataclass\nclass Mine(ModelConfig):\n    bias = False\n",
     "Mine.bias is ignored, because it has no type: write 'bias: bool = ...'"),
    ("class Base(ModelConfig):\n    window: int = 4\n@dataclass\nclass Mine(Base):\n    width: int = 3\n",
     "Base.window is ignored, because Base is no dataclass"),
])
def test_keys_that_are_ignored(refused, text, said):
    """A key or a default that dataclasses do not see trains another model than its author wrote."""
    assert refused(f"{text}MINE = Family(gpt.layers, Mine)\n").startswith(said)


@pytest.mark.parametrize("text", [
    "@dataclass\nclass Mine(ModelConfig):\n    bias: bool = False\n    window: int = 4\n",
    "class Mine(ModelConfig):\n    def wide(self):\n        return 3\n",
    "from typing import ClassVar\n@dataclass\nclass Mine(ModelConfig):\n    most: ClassVar[int] = 4\n"])
def test_sound_configurations(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(f"{HEAD}{text}MINE = Family(gpt.layers, Mine)\n")
    family_of.cache_clear()
    assert threed.load("configs/toy.yaml", ["model.family=mine.py:MINE"]).model.layers == 8
    family_of.cache_clear()


def test_config_of_a_run(tmp_path, monkeypatch):
    """A key of the family's own, in the config of a run."""
    from threed.planner.from_config import save_config

    monkeypatch.chdir(ROOT)
    config = threed.load("configs/toy.yaml", [HANDING, "model.penalty=0.5", f"run.dir={tmp_path}"])
    assert save_config(config) == []
    again = threed.Run(tmp_path).config
    assert again == config and vars(again.model)["penalty"] == 0.5 and type(again.model) is type(config.model)


@pytest.mark.parametrize("text, said", [
    ('{"model": {"layers": 2', "config.json cannot be read: "),
    ("[1]", "config.json cannot be read: it has a list"),
    ('{"model": {"penalty": 1}}', "config.json:\n  - model.penalty: unknown key"),
    ('{"parallel": 3}', "config.json:\n  - parallel=3: parallel is a section")])
def test_damaged_config_of_a_run(tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError) as caught:
        _ = threed.Run(tmp_path).config
    assert said in str(caught.value)


def test_shipped_configs_of_runs(tmp_path):
    """What a run writes is read back as it was."""
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        config = threed.load(file)
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
        assert threed.Run(tmp_path).config == config, file.name


@pytest.mark.parametrize("call", [
    lambda: F.relu("x"),  # pyright: ignore[reportArgumentType]
    lambda: json.loads("{"), lambda: threed.load(None, ["="])])
def test_line_of(call):
    """The line that is named is the author's, not the one in torch, Python or threed that it has reached."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert re.fullmatch(rf" \({re.escape(__file__)}, line \d+\)", line_of(caught.value))
    assert line_of(ValueError("never raised")) == ""


# ---------------------------------------------------------------- config classes

def test_two_classes_of_one_name(tmp_path, monkeypatch):
    """Each family's config is of its own class, whatever was read before."""
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "mine.py").write_text(f"{HEAD}@dataclass\nclass Mine(ModelConfig):\n"
                                           f"    only_{folder}: int = 1\n\nMINE = Family(gpt.layers, Mine)\n")
    for folder in ("a", "b", "a"):
        config = threed.load("configs/toy.yaml", [f"model.family={folder}/mine.py:MINE",
                                                  f"model.only_{folder}=2"])
        assert getattr(config.model, f"only_{folder}") == 2
        assert type(config.model) is family_of(f"{folder}/mine.py:MINE").config
    family_of.cache_clear()


def test_a_class_in_a_function(monkeypatch):
    @dataclass
    class Mine(ModelConfig):
        mine: int = 1

    monkeypatch.setitem(FAMILIES, "mine", Family(gpt.layers, Mine))
    family_of.cache_clear()
    config = threed.load("configs/toy.yaml", ["model.family=mine", "model.mine=3"])
    assert type(config.model) is Mine and config.model.mine == 3
    family_of.cache_clear()

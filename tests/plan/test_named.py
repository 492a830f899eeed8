"""A name that stands for many keys: on the command line it wins over the file's; a key that stays
against it is a line."""

from __future__ import annotations

from pathlib import Path

import pytest

import threed
from threed.base.errors import ConfigError
from threed.config.named import joined
from threed.config.validate import warnings
from threed.models.families.registry import FAMILIES, sizes
from threed.schema import Config

FILES = [f"configs/{name}.yaml" for name in ("toy", "toy-moe", "llama-toy", "llama3-8b")]
# A mesh that every size divides over.
MESH = ["parallel.dp=8", "parallel.tp=1", "parallel.pp=1", "parallel.ep=1",
        "parallel.sequence_parallel=false"]


def _load(tmp_path: Path, text: str, *overrides: str) -> Config:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    return threed.load(file, list(overrides))


@pytest.mark.parametrize("file", FILES)
def test_a_name_on_the_command_line_is_that_model(file: str):
    for name, family in sizes().items():
        config = threed.load(file, [*MESH, f"model.name={name}"])
        own = FAMILIES[family].config(**{"family": family, "name": name, **FAMILIES[family].sizes[name]})
        own.init_std, own.fused = config.model.init_std, config.model.fused  # how it is trained and computed
        assert config.model == own
        assert not [line for line in warnings(config) if "model.name" in line]


def test_keys_behind_the_name_win_and_are_a_line():
    config = threed.load("configs/toy.yaml", ["model.name=gpt2-small", "model.layers=4"])
    assert (config.model.layers, config.model.hidden) == (4, 768)
    assert "model.name=gpt2-small, but with layers=4 (12)" in warnings(config)


def test_keys_beside_a_name_in_the_file_are_a_line(tmp_path: Path):
    text = "model: {name: llama3-8b, layers: 4, seq_len: 2048, norm: layernorm, dropout: 0.1}"
    assert ("model.name=llama3-8b, but with layers=4 (32), norm=layernorm (rmsnorm)"
            in warnings(_load(tmp_path, text)))
    again = _load(tmp_path, text, "model.name=llama3-8b")  # the later word
    assert (again.model.layers, again.model.seq_len, again.model.norm) == (32, 8192, "rmsnorm")
    assert again.model.dropout == 0.1


def test_a_name_keeps_how_the_file_trains_and_computes(tmp_path: Path):
    text = "model: {layers: 2, dropout: 0.2, tile_linears: 64MiB, loss_chunk: 512, vocab_multiple: 64}"
    model = _load(tmp_path, text, "model.name=llama3-8b").model
    assert (model.tile_linears, model.loss_chunk, model.vocab_multiple) == ("64MiB", 512, 64)
    assert (model.dropout, model.layers) == (0.2, 32)


def test_a_family_on_the_command_line_brings_its_own_norms_and_activation(tmp_path: Path):
    text = "model: {layers: 2, norm: layernorm, activation: gelu, bias: true, tie_embeddings: true}"
    model = _load(tmp_path, text, "model.family=llama").model
    assert (model.norm, model.activation) == ("rmsnorm", "swiglu")
    assert not model.bias and not model.tie_embeddings
    assert model.layers == 2
    assert _load(tmp_path, text, "model.family=gpt").model.activation == "gelu"
    mixed = _load(tmp_path, f"{text[:-1]}, family: llama}}")  # one who writes both in a file means both
    assert mixed.model.activation == "gelu"


def test_a_family_without_the_size_of_the_file_is_refused():
    with pytest.raises(ConfigError, match=r"a size of model\.family=llama, not of gpt"):
        threed.load("configs/llama3-8b.yaml", ["model.family=gpt"])


def test_no_name_is_no_name(tmp_path: Path):
    assert _load(tmp_path, "model: {name: llama3-8b}", "model.name=custom").model.layers == 8
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, "model: {layers: 2}", "model.name=null")
    assert str(caught.value).count("model.name") == 1 and "must have a value" in str(caught.value)


def test_one_source_of_data_takes_the_place_of_several(tmp_path: Path):
    mixed, single = "data: {mix: ['1 a.txt', '2 b.txt']}", "data: {source: a.txt}"
    data = _load(tmp_path, mixed, "data.source=c.txt").data
    assert (data.source, data.mix) == ("c.txt", None)
    data = _load(tmp_path, single, "data.mix=['1 b.txt']").data
    assert (data.source, data.mix) == ("python-stdlib", ["1 b.txt"])
    assert joined({"data.source": "a.txt"}, {"data.mix": None}) == {"data.source": "a.txt", "data.mix": None}
    with pytest.raises(ConfigError, match="one of them names the data"):
        _load(tmp_path, single, "data.source=c.txt", "data.mix=['1 b.txt']")


@pytest.mark.parametrize("given, key", [
    ("{schedule: cosine, wsd_decay_steps: 5}", "wsd_decay_steps=5"),
    ("{schedule: constant, decay_steps: 5}", "decay_steps=5"),
])
def test_a_member_of_another_schedule_is_a_line(tmp_path: Path, given: str, key: str):
    config = _load(tmp_path, f"optimizer: {given}")
    assert any(line.startswith(f"optimizer.{key} does nothing here: ") for line in warnings(config))

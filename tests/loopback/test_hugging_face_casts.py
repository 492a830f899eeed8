"""Models of transformers in and out, without transformers: casts that overflow, numbers that are not finite,
the dtype that is written, and what an override answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.loopback.test_hugging_face_files import GPT2, LLAMA, change, folder, refused
from threed.base.errors import InputError
from threed.cli.main import app
from threed.config.load import load
from threed.interop.hf import exporting
from threed.interop.hf.exporting import export_model
from threed.interop.hf.importing import import_model

NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate_proj.weight"


def values(path: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def described(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


@pytest.mark.core
def test_a_cast_that_overflows(tmp_path):
    """It is refused with the parameters and their largest values, and nothing is written."""
    source = folder(tmp_path / "theirs", LLAMA)
    gate = torch.zeros(24, 16)
    gate[3, 4], gate[5, 6] = -7e4, 65504.0
    change(source, **{NORM: torch.full((16,), 1e6), GATE: gate})
    import_model(source, tmp_path / "run")
    with pytest.raises(InputError) as error:
        export_model(tmp_path / "run", tmp_path / "out", "fp16")
    for words in ("--dtype fp16", "take bf16 or fp32", f"{NORM}: up to 1e+06, and float16 ends at 6.55e+04",
                  f"{GATE}: up to 7e+04"):
        assert words in str(error.value), error.value
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "theirs"]
    export_model(tmp_path / "run", tmp_path / "out", "bf16")
    assert torch.equal(values(tmp_path / "out")[GATE], gate.bfloat16())


@pytest.mark.parametrize("largest, fits", [(65504.0, True), (65519.0, True), (65520.0, False)])
def test_what_rounds_to_the_largest_number_fits(largest, fits, tmp_path):
    source = folder(tmp_path / "theirs", LLAMA)
    change(source, **{NORM: torch.full((16,), largest)})
    import_model(source, tmp_path / "run")
    if fits:
        export_model(tmp_path / "run", tmp_path / "out", "fp16")
        assert float(values(tmp_path / "out")[NORM].max()) == 65504.0
    else:
        with pytest.raises(InputError, match="float16 ends at"):
            export_model(tmp_path / "run", tmp_path / "out", "fp16")


def test_casts_that_are_not_asked_for_by_an_option(tmp_path):
    """bf16 ends below fp32; the dtype of an import; and the dtype in which a run would compute."""
    source = folder(tmp_path / "theirs", LLAMA)
    change(source, **{NORM: torch.full((16,), 3.4e38)})
    import_model(source, tmp_path / "run")
    with pytest.raises(InputError, match=r"take fp32:\s+- model.norm.weight: up to 3.4e\+38, and bfloat16"):
        export_model(tmp_path / "run", tmp_path / "out", "bf16")
    with pytest.raises(InputError, match=r"precision.dtype=fp16: .*\s+- model.norm.weight"):
        import_model(source, tmp_path / "half", ["precision.dtype=fp16"])
    assert not list((tmp_path / "half").rglob("*.*"))
    many = {name: torch.full_like(value, 1e5) for name, value in values(source).items()}
    save_file(many, source / "model.safetensors")
    import_model(source, tmp_path / "many")
    with pytest.raises(InputError, match=rf"and {len(many) - 5} more"):
        export_model(tmp_path / "many", tmp_path / "out", "fp16")


def test_numbers_that_are_not_finite_already(tmp_path, capsys):
    """They are said, and written as they are."""
    source = folder(tmp_path / "theirs", LLAMA)
    change(source, **{NORM: torch.tensor([torch.nan, torch.inf, *[1.0] * 14]),
                      GATE: torch.full((24, 16), -torch.inf)})
    app(["import", str(source), "-o", str(tmp_path / "run")], standalone_mode=False)
    app(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "fp16"], standalone_mode=False)
    said = [line for line in capsys.readouterr().err.splitlines() if "not finite" in line]
    assert len(said) == 2 and all("and of 1 more are not finite (NaN or infinite)" in line for line in said)
    assert int(values(tmp_path / "out")[NORM].isnan().sum()) == 1
    assert bool(values(tmp_path / "out")[GATE].isinf().all())


def test_numbers_that_become_zero_are_said(tmp_path, capsys):
    source = folder(tmp_path / "theirs", LLAMA)
    change(source, **{NORM: torch.tensor([1e-9] * 4 + [1.0] * 4 + [0.0] * 8)})
    import_model(source, tmp_path / "run")
    app(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "fp16"], standalone_mode=False)
    assert "note: 50% of the numbers of model.norm.weight become 0 in float16" in capsys.readouterr().err
    app(["export", str(tmp_path / "run"), str(tmp_path / "bf16"), "--dtype", "bf16"], standalone_mode=False)
    assert "note" not in capsys.readouterr().err


@pytest.mark.parametrize("was", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype, word", [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
@pytest.mark.parametrize("names", [("torch_dtype",), ("dtype",), ("dtype", "torch_dtype"), ()])
def test_the_dtype_asked_is_the_dtype_written(was, dtype, word, names, tmp_path):
    """In each tensor and in config.json, whatever that said before, in files of the import or of our own."""
    bare = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    source = folder(tmp_path / "theirs", {**bare, **dict.fromkeys(names, "float64")}, was)
    import_model(source, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "out", dtype)
    assert {value.dtype for value in values(tmp_path / "out").values()} == {getattr(torch, word)}
    assert {described(tmp_path / "out")[name] for name in names or ["torch_dtype"]} == {word}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("base", [LLAMA, GPT2])
def test_the_index_is_that_of_the_files(base, tied, tmp_path, monkeypatch):
    """Each tensor is in the file that the index names, and the sizes add up; the import's index is not kept
    where the files are others."""
    monkeypatch.setattr(exporting, "SHARD", 3000)
    source = folder(tmp_path / "theirs", {**base, "tie_word_embeddings": tied})
    (source / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    import_model(source, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "same")
    assert sorted(path.name for path in (tmp_path / "same").glob("model*")) == ["model.safetensors"]
    export_model(tmp_path / "run", tmp_path / "out", "bf16")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = (tmp_path / "out").glob("*.safetensors")
    places = {name: file.name for file in files for name in load_file(file)}
    assert index["weight_map"] == places and ("lm_head.weight" in places) == (not tied)
    there = values(tmp_path / "out").values()
    assert index["metadata"] == {"total_size": sum(each.nbytes for each in there),
                                 "total_parameters": sum(each.numel() for each in there)}


# ---------------------------------------------------------------- what an override answers


@pytest.mark.parametrize("base, changes, override, key, now", [
    (GPT2, {"resid_pdrop": 0.0, "embd_pdrop": 0.1}, "dropout=0.0", "embd_pdrop", 0.0),
    (GPT2, {"resid_pdrop": 0.0}, "dropout=0.2", "resid_pdrop", 0.2),
    (GPT2, {"embd_pdrop": 0.0}, "dropout=0.0", "resid_pdrop", 0.0),
    (GPT2, {"activation_function": "gelu"}, "activation=gelu", "activation_function", "gelu_new"),
    (LLAMA, {"hidden_act": "gelu"}, "activation=swiglu", "hidden_act", "silu"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling=null", "rope_scaling", None),
    (LLAMA, {"rope_scaling": {"type": "llama3", "factor": 8}}, "rope_scaling=null", "rope_scaling", None),
    (LLAMA, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}}, "rope_scaling=null",
     "rope_parameters", {"rope_theta": 1e6, "rope_type": "default"}),
    (LLAMA, {"num_hidden_layers": None}, "layers=2", "num_hidden_layers", 2),
    (LLAMA, {"num_hidden_layers": "2"}, "layers=2", "num_hidden_layers", 2),
    (LLAMA, {"attention_dropout": None}, "attention_dropout=0.0", "attention_dropout", 0.0),
    (LLAMA, {"max_position_embeddings": None}, "seq_len=64", "max_position_embeddings", 64),
    (LLAMA, {"vocab_size": 51}, "vocab=50", "vocab_size", 50)])
def test_an_override_answers(base, changes, override, key, now, tmp_path):
    """What config.json leaves out or contradicts is refused with the key that answers it; with that key the
    model comes in, and goes out with a config.json that says so and comes in without it."""
    source = folder(tmp_path / "theirs", base)
    (source / "config.json").write_text(json.dumps({**base, **changes}))
    refused(source, tmp_path / "no", f"give model.{override.partition('=')[0]}=")
    import_model(source, tmp_path / "run", [f"model.{override}"])
    name, _, value = override.partition("=")
    assert getattr(load(tmp_path / "run" / "config.yaml").model, name) == yaml.safe_load(value)
    export_model(tmp_path / "run", tmp_path / "out")
    assert described(tmp_path / "out")[key] == now
    import_model(tmp_path / "out", tmp_path / "again")
    one, other = (load(tmp_path / each / "config.yaml").model for each in ("run", "again"))
    assert getattr(one, name) == getattr(other, name)


def test_learned_positions_have_a_length(tmp_path):
    source = folder(tmp_path / "theirs", GPT2)
    for length in (4, 16):
        with pytest.raises(InputError, match=r"the learned positions are 8: give model.seq_len=8"):
            import_model(source, tmp_path / "run", [f"model.seq_len={length}"])
    import_model(source, tmp_path / "run", ["model.seq_len=8"])


def test_overrides_that_are_no_answer(tmp_path):
    source = folder(tmp_path / "theirs", LLAMA)
    (source / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": None, "hidden_size": None}))
    for overrides, words in ((["model.layers=two", "model.hidden=16"], "num_hidden_layers='two' is not"),
                             (["model.layers=2"], "hidden_size is missing")):
        with pytest.raises(InputError, match=words):
            import_model(source, tmp_path / "run", overrides)
    with pytest.raises(InputError, match=r"a llama of transformers has no blocks.0.attention.q_norm.weight"):
        import_model(folder(tmp_path / "other", LLAMA), tmp_path / "run", ["model.qk_norm=true"])


def test_a_head_of_its_own_or_not(tmp_path):
    """What config.json says of the head, and the files do not."""
    source = folder(tmp_path / "theirs", LLAMA)
    (source / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": True}))
    refused(source, tmp_path / "no", "give model.tie_embeddings=false")
    import_model(source, tmp_path / "two", ["model.tie_embeddings=false"])
    export_model(tmp_path / "two", tmp_path / "out")
    assert described(tmp_path / "out")["tie_word_embeddings"] is False
    assert "lm_head.weight" in values(tmp_path / "out")
    (source / "config.json").write_text(json.dumps(LLAMA))
    change(source, **{"lm_head.weight": None})
    refused(source, tmp_path / "no", "lm_head.weight is missing; if", "give model.tie_embeddings=true")
    import_model(source, tmp_path / "one", ["model.tie_embeddings=true"])
    export_model(tmp_path / "one", tmp_path / "tied")
    assert described(tmp_path / "tied")["tie_word_embeddings"] is True


def test_the_config_of_an_import_trains_as_one_that_goes_on(tmp_path):
    source = folder(tmp_path / "theirs", LLAMA)
    import_model(source, tmp_path / "run")
    import_model(source, tmp_path / "lora", ["model.lora_rank=2"])
    import_model(source, tmp_path / "mine", ["optimizer.lr=3e-3", "optimizer.warmup_steps=0"])
    optimizers = [load(tmp_path / name / "config.yaml").optimizer for name in ("run", "lora", "mine")]
    assert [(each.lr, each.warmup_steps) for each in optimizers] == [(1e-5, 10), (2e-4, 10), (3e-3, 0)]
    assert "# For a model that is trained already" in (tmp_path / "run" / "config.yaml").read_text()

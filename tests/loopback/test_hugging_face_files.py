"""Folders of models, without transformers: what is refused by name, what is damaged, what comes back, and
what is in memory meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.loopback.test_checkpoint import at, manifest, on_ranks, saved_after, step
from threed.base.errors import InputError
from threed.checkpoint.load import resume
from threed.checkpoint.manifest import seal
from threed.cli.main import app
from threed.comm.group import Comm
from threed.config.load import load
from threed.engine.engine import Engine
from threed.features.zero.boxes import boxes
from threed.interop.hf import exporting, tensors
from threed.interop.hf import source as trained
from threed.interop.hf.config import family_of, model_of, values_of, written
from threed.interop.hf.exporting import export_model
from threed.interop.hf.fitting import unfit
from threed.interop.hf.importing import import_model
from threed.interop.hf.names import FAMILIES
from threed.interop.hf.slices import blocks
from threed.models.model import parameters

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
         "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2,
         "vocab_size": 50, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
         "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": 2}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4,
        "n_positions": 8, "vocab_size": 50, "activation_function": "gelu_new"}
HERE = Path("config.json")


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that a config asks for."""
    family = family_of(config, HERE)
    model = model_of(values_of(family, config, HERE)[0])
    rows = family.rows(model)
    return {name: shape for each in parameters(model) for row in rows[each.name]
            for name, shape in row.shapes(each.stored, model).items()}


def folder(path: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    """The folder of a model of random weights, in one file."""
    path.mkdir()
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(shape, generator=generator).to(dtype)
              for name, shape in shapes_of(config).items()}
    save_file(values, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=2))
    return path


def refused(source: Path, output: Path, *words: str) -> None:
    """Importing is refused with these words, and leaves nothing."""
    with pytest.raises(InputError) as error:
        import_model(source, output)
    for word in words:
        assert word in str(error.value), error.value
    assert not output.exists() or not [path for path in output.rglob("*") if path.is_file()]


def same(one: Path, other: Path) -> None:
    assert sorted(os.listdir(one)) == sorted(os.listdir(other))
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize("changes, words", [
    ({"model_type": "gpt_oss"}, "model_type=gpt_oss is a model that threed does not have"),
    ({"model_type": ["llama"]}, "is a model that threed does not have"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "threed has LlamaForCausalLM of llama alone"),
    ({"hidden_act": "gelu"}, "hidden_act=gelu: threed has silu"),
    ({"attention_bias": True}, "attention_bias=True: threed has False alone"),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type linear: threed has llama3"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters of type yarn"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks a number"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers='2' is not a number"),
    ({"max_position_embeddings": "long"}, "max_position_embeddings=long"),
    ({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 512,
      "asked": 1024}, "sliding_window=512"),
    ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 512, "asked": 1024,
      "use_sliding_window": True, "max_window_layers": 1}, "sliding_window=512"),
    ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "sliding_window": 512, "asked": 1024,
      "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
     "sliding_window=512"),
])
def test_what_threed_has_not_is_refused_by_name(changes, words):
    config = {**LLAMA, **changes}
    asked = config.pop("asked", None)
    with pytest.raises(InputError, match=words.replace("[", r"\[")):
        values_of(family_of(config, HERE), config, HERE, {"seq_len": asked} if asked else None)


@pytest.mark.parametrize("changes, words", [
    ({"activation_function": "relu"}, "activation_function=relu"),
    ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ({"embd_pdrop": 0.0}, "embd_pdrop=0.0 differs from resid_pdrop=0.1")])
def test_refused_of_gpt2(changes, words):
    config = {**GPT2, **changes}
    with pytest.raises(InputError, match=words):
        values_of(FAMILIES["gpt2"], config, HERE)


def test_all_problems_at_once_and_strange_keys():
    config = {**LLAMA, "hidden_act": "relu", "mlp_bias": True}
    with pytest.raises(InputError, match=r"relu[\s\S]*mlp_bias"):
        values_of(FAMILIES["llama"], config, HERE)
    _, notes = values_of(FAMILIES["llama"], {**LLAMA, "logit_softcap": 30.0}, HERE)
    assert any("does not follow: logit_softcap" in note for note in notes)


@pytest.mark.parametrize("kind", FAMILIES)
def test_keys_in_both_directions(kind):
    """config.json -> keys -> config.json -> keys, from nothing; and a family holds what it says."""
    family = FAMILIES[kind]
    base = GPT2 if kind == "gpt2" else LLAMA
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}
    more = {} if kind == "gpt2" else {"head_dim": 6, "rope_scaling": scaling}
    if kind == "dots1":
        more |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                 "n_shared_experts": 1}
    config = {**base, **more, "model_type": kind, "architectures": [family.architecture],
              "tie_word_embeddings": True}
    values, _ = values_of(family, config, HERE)
    model = model_of(values)
    assert not unfit(family, model)
    again, _ = values_of(family, written(family, model, None, "float32"), HERE, {"seq_len": model.seq_len})
    resolved = {**values, "kv_heads": model.num_kv_heads, "ffn_hidden": model.num_ffn_hidden}
    if kind == "gpt2":
        resolved["kv_heads"] = None
    assert again == resolved
    assert written(family, model, config, None) == config
    others = [each for each in FAMILIES.values() if each is not family and not unfit(each, model)]
    assert {each.model_type for each in others} <= {"llama", "mistral"} - {kind}


# ---------------------------------------------------------------- tensors


def test_to_the_bit_in_16_bits_and_in_files_of_any_order(tmp_path):
    """bf16, two files whose names and tensors have no order, an index with other metadata."""
    source = folder(tmp_path / "theirs", LLAMA, torch.bfloat16)
    values = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    halves = [dict(list(values.items())[first::2]) for first in (0, 1)]
    files = dict(zip(("b.safetensors", "a.safetensors"), halves))
    for name, each in files.items():
        save_file(each, source / name, {"made": "by hand"})
    places = {key: file for file, each in files.items() for key in each}
    index = {"metadata": {"total_size": 3}, "weight_map": places}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "generation_config.json").write_text("{}")
    import_model(source, tmp_path / "run", ["model.seq_len=16"])
    export_model(tmp_path / "run", tmp_path / "back")
    same(source, tmp_path / "back")


def test_names_without_a_prefix_and_tensors_that_are_no_weights(tmp_path):
    """GPT-2 as it is published: no `transformer.`, and masks among the tensors."""
    source = folder(tmp_path / "theirs", GPT2)
    values = {name.removeprefix("transformer."): value
              for name, value in load_file(source / "model.safetensors").items()}
    save_file({**values, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, source / "model.safetensors")
    notes = import_model(source, tmp_path / "run").notes
    assert any("h.0.attn.bias" in note for note in notes)
    export_model(tmp_path / "run", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[f"transformer.{name}"], value) for name, value in values.items())
    save_file(values, source / "model.safetensors")
    import_model(source, tmp_path / "bare")
    export_model(tmp_path / "bare", tmp_path / "bare back")
    same(source, tmp_path / "bare back")


def test_a_tied_head_that_is_in_the_files(tmp_path):
    source = folder(tmp_path / "theirs", {**LLAMA, "tie_word_embeddings": True})
    values = load_file(source / "model.safetensors")
    save_file({**values, "lm_head.weight": values["model.embed_tokens.weight"].clone()},
              source / "model.safetensors")
    import_model(source, tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "back")
    same(source, tmp_path / "back")
    other = values["model.embed_tokens.weight"] + 1
    save_file({**values, "lm_head.weight": other}, source / "model.safetensors")
    refused(source, tmp_path / "other", "tie_word_embeddings is true, and lm_head.weight is not")


def change(source: Path, **values: torch.Tensor | None) -> None:
    given = {**load_file(source / "model.safetensors"), **values}
    kept = {name: value for name, value in given.items() if value is not None}
    save_file(kept, source / "model.safetensors")


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize("changes, words", [
    ({NORM: None}, f"{NORM} is missing"),
    ({NORM: torch.zeros(17)}, f"{NORM} has the shape [17], not [16]"),
    ({"model.layers.0.self_attn.o_proj.bias": torch.zeros(16)}, "o_proj.bias has no place in a llama"),
    ({"model.layers.0.mlp.experts.3.w1.weight": torch.zeros(2)}, "experts.3.w1.weight has no place"),
    ({NORM: torch.zeros(16, dtype=torch.int8)}, "is of type I8; threed reads F32")])
def test_tensors_that_are_not_those_of_the_config(changes, words, tmp_path):
    source = folder(tmp_path / "theirs", LLAMA)
    change(source, **changes)
    refused(source, tmp_path / "run", words)


def test_files_that_are_damaged_or_missing(tmp_path):
    source = folder(tmp_path / "theirs", LLAMA)
    file = source / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    refused(source, tmp_path / "run", "not a whole safetensors file")
    file.write_bytes(b"\xff" * 64)
    refused(source, tmp_path / "run", "is not a safetensors file")
    file.unlink()
    refused(source, tmp_path / "run", "has no safetensors file")
    (source / "pytorch_model.bin").write_bytes(b"")
    refused(source, tmp_path / "run", "pytorch_model.bin", "load and save it with transformers")
    (source / "model.safetensors.index.json").write_text("[]")
    refused(source, tmp_path / "run", "is not an index")
    (source / "config.json").write_text("[]")
    refused(source, tmp_path / "run", "must be a JSON object")
    refused(tmp_path, tmp_path / "run", "has no config.json; did you mean a folder in it", str(source))


def test_no_folder_is_overwritten(tmp_path):
    source = folder(tmp_path / "theirs", LLAMA)
    import_model(source, tmp_path / "run")
    with pytest.raises(InputError, match="has checkpoints already"):
        import_model(source, tmp_path / "run")
    with pytest.raises(InputError, match="is there already: give another --config"):
        import_model(source, tmp_path / "other", yaml_file=tmp_path / "run" / "config.yaml")
    with pytest.raises(InputError, match="it is what -o says"):
        import_model(source, tmp_path / "other", ["run.dir=elsewhere"])
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        import_model(source, tmp_path / "theirs" / "config.json" / "run")
    assert not (tmp_path / "other").exists()
    with pytest.raises(InputError, match="is there already"):
        export_model(tmp_path / "run", source)
    with pytest.raises(InputError, match="there is no such run"):
        export_model(tmp_path / "nowhere", tmp_path / "back")


def test_a_checkpoint_alone_another_dtype_and_another_config(tmp_path):
    """-o CHECKPOINT, --dtype and --like; a config that has changed since."""
    source = folder(tmp_path / "theirs", LLAMA)
    done = import_model(source, tmp_path / "some" / "step-00000000", yaml_file=tmp_path / "mine.yaml")
    assert done.checkpoint == tmp_path / "some" / "step-00000000"
    assert (tmp_path / "mine.yaml").is_file()
    export_model(tmp_path / "some" / "step-00000000", tmp_path / "half", "bf16")
    was, now = (load_file(path / "model.safetensors") for path in (source, tmp_path / "half"))
    assert all(torch.equal(value.bfloat16(), now[name]) for name, value in was.items())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    other = {**LLAMA, "rope_theta": 1.0, "initializer_range": 0.5}
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "config.json").write_text(json.dumps(other))
    export_model(tmp_path / "some" / "step-00000000", tmp_path / "back", like=tmp_path / "like")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (back["rope_theta"], back["initializer_range"], back["eos_token_id"]) == (5e5, 0.02, 2)
    with pytest.raises(InputError, match="--dtype int8"):
        export_model(tmp_path / "some" / "step-00000000", tmp_path / "no", "int8")


@pytest.mark.parametrize("mesh", [[], ["parallel.dp=2", "parallel.tp=2", "zero.stage=3"],
                                  ["parallel.pp=2", "precision.dtype=bf16", "offload.optimizer=cpu"]])
def test_an_optimizer_begins_fresh(mesh, tmp_path):
    """What another checkpoint left in an optimizer's state, and a state that is missing."""
    import_model(folder(tmp_path / "theirs", LLAMA), tmp_path / "run", ["model.seq_len=8"])
    config = load(tmp_path / "run" / "config.yaml", ["train.global_batch_size=4", "train.steps=8", *mesh])

    def kept(engine: Engine, comm: Comm) -> Iterator[tuple[str, torch.Tensor]]:
        """(kind, values) of all that a rank keeps, without padding."""
        for state in engine.states.values():
            for box in boxes(state.part.layout, comm.here.on, *state.part.owned):
                part = slice(box.start - state.part.owned[0], box.stop - state.part.owned[0])
                yield from ((kind, values[part]) for kind, values in state.kept().items())

    def work(engine: Engine, comm: Comm) -> list[float]:
        for kind, values in kept(engine, comm):
            values.fill_(3.0 if kind != "param" else torch.nan)
        resumed = resume(config, engine.zero)
        assert resumed.path is not None and resumed.manifest.step == 0
        assert not any((values.isnan() if kind == "param" else values).any()
                       for kind, values in kept(engine, comm))
        losses = step(engine, comm, 2)
        engine.close()
        return losses

    (first, second), *rest = on_ranks(config, work)
    assert second != first and all(each == [first, second] for each in rest)


def test_a_checkpoint_without_a_state_is_no_import(tmp_path):
    """Weights alone are enough only where the manifest says that there is no more."""
    path = import_model(folder(tmp_path / "theirs", LLAMA), tmp_path / "run").checkpoint
    values = json.loads((path / "manifest.json").read_text())
    del values["checksum"], values["weights_only"]
    (path / "manifest.json").write_text(seal(values))
    config = load(tmp_path / "run" / "config.yaml")
    with pytest.raises(InputError, match="exp_avg"):
        on_ranks(config, lambda engine, comm: resume(config, engine.zero))


def test_the_commands(tmp_path, capsys):
    source, run, back = folder(tmp_path / "theirs", LLAMA), tmp_path / "run", tmp_path / "back"
    app(["import", str(source), "-o", str(run), "model.seq_len=64", "parallel.tp=2"], standalone_mode=False)
    assert f"go on with: threed train {run}/config.yaml" in capsys.readouterr().out
    assert load(run / "config.yaml").parallel.tp == 2
    app(["export", str(run), str(back)], standalone_mode=False)
    assert f"wrote {back}: a llama of step 0" in capsys.readouterr().out
    same(source, back)
    for wrong, words in ((["import", str(source)], "give -o RUN"),
                         (["import", str(source), "-o", str(run / "x"), "model.hiden=3"], "model.hidden"),
                         (["export", str(run), str(tmp_path / "y"), "--like", str(run)], "no config.json")):
        with pytest.raises(InputError, match=words):
            app(wrong, standalone_mode=False)


RUNS = {"gpt2": ["model.position=learned", "model.tie_embeddings=false"],
        "llama": ["model.family=llama", "model.ffn_hidden=24", "model.kv_heads=2"],
        "qwen2": ["model.family=llama", "model.qkv_bias=true"],
        "qwen3": ["model.family=llama", "model.qk_norm=true", "model.head_dim=6"]}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_that_began_here(kind, tmp_path, monkeypatch):
    """A run without an import, saved by four ranks: exported in shards, and imported again with the same
    bits."""
    monkeypatch.setattr(exporting, "SHARD", 5000)
    config = at(tmp_path / "run", "parallel.tp=2", "parallel.dp=2", "zero.stage=3", *RUNS[kind],
                "data.source=/nowhere")
    path = saved_after(config, 1)
    done = export_model(tmp_path / "run", tmp_path / "theirs")
    assert done.family == kind and done.step == 1
    assert sum(name.endswith(".safetensors") for name in done.files) > 2
    assert "model.safetensors.index.json" in done.files
    again = import_model(tmp_path / "theirs", tmp_path / "again", ["model.vocab_multiple=16"]).checkpoint
    sums = [{name: entry["sums"]["param"] for name, entry in manifest(Path(each))["parameters"].items()}
            for each in (path, again)]
    assert sums[0] == sums[1]


def test_what_no_family_can_hold(tmp_path):
    saved_after(at(tmp_path / "run", "model.activation=swiglu"), 1)
    with pytest.raises(InputError, match=r"no model of transformers .*A gpt2 is the nearest[\s\S]*"
                                         r"model.position=learned, not rotary\n  - model.activation=gelu, "):
        export_model(tmp_path / "run", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    source = folder(tmp_path / "theirs", LLAMA)
    path = import_model(source, tmp_path / "run").checkpoint / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="is damaged"):
        export_model(tmp_path / "run", tmp_path / "back")
    assert not (tmp_path / "back").exists() and not (tmp_path / "back.tmp").exists()


def test_the_tokenizer_goes_along(tmp_path):
    source = folder(tmp_path / "theirs", LLAMA)
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for name in names:
        (source / name).write_text(f'{{"name": "{name}"}}')
    import_model(source, tmp_path / "run")
    text = (tmp_path / "run" / "config.yaml").read_text()
    assert str(tmp_path / "run" / "huggingface" / "tokenizer.json") in text
    export_model(tmp_path / "run", tmp_path / "back")
    same(source, tmp_path / "back")
    shutil.rmtree(tmp_path / "run" / "huggingface")
    export_model(tmp_path / "run", tmp_path / "without")
    assert not (tmp_path / "without" / "chat_template.jinja").exists()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (1, 1, 9), (4, 1, 2, 3)])
@pytest.mark.parametrize("limit", [1, 2, 5, 12, 100])
def test_blocks(shape, limit):
    """Blocks that overlap, leave something out, are too large, or are not contiguous."""
    seen = torch.full(shape, -1)
    at = 0
    for offset, size in blocks(shape, limit):
        where = tuple(slice(first, first + length) for first, length in zip(offset, size))
        count = seen[where].numel()
        assert count <= limit and (seen[where] == -1).all()
        seen[where] = torch.arange(at, at + count).view(size)
        at += count
    assert torch.equal(seen.view(-1), torch.arange(seen.numel()))


def test_pieces_are_small(tmp_path, monkeypatch):
    """Whatever the size of a tensor, a piece of it is in memory beside our parameter."""
    monkeypatch.setattr(tensors, "PIECE", 256)
    monkeypatch.setattr(trained, "PIECE", 256)
    seen: list[int] = []
    usual = torch.frombuffer
    monkeypatch.setattr(torch, "frombuffer",
                        lambda data, **kw: (seen.append(len(data)), usual(data, **kw))[1])
    source = folder(tmp_path / "theirs", {**GPT2, "tie_word_embeddings": False})
    import_model(source, tmp_path / "run")
    assert seen and max(seen) <= 256
    export_model(tmp_path / "run", tmp_path / "back")
    same(source, tmp_path / "back")


def test_sigterm_leaves_nothing_half_done(tmp_path, monkeypatch):
    source = folder(tmp_path / "theirs", LLAMA)
    monkeypatch.setattr(tensors.Files, "read", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        app(["import", str(source), "-o", str(tmp_path / "run")], standalone_mode=False)
    assert ended.value.code == 143
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]

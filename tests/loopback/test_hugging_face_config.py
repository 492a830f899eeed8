"""config.json in and out: what is left out is what transformers takes, rotary positions of every form,
lengths and windows, auxiliary losses; and by which keys a model has no way out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loopback.test_checkpoint import saved_after
from tests.loopback.test_hugging_face_experts import described as with_experts
from tests.loopback.test_hugging_face_files import GPT2, HERE, LLAMA, folder
from threed.base.errors import InputError
from threed.checkpoint.choose import read_manifest
from threed.checkpoint.format import Manifest
from threed.config.load import load
from threed.interop.hf.config import family_of, model_of, values_of, written
from threed.interop.hf.exporting import export_model
from threed.interop.hf.fitting import family_for
from threed.interop.hf.importing import import_model
from threed.interop.hf.names import FAMILIES
from threed.schema import ModelConfig

# Of each class of configs, sizes that are none of its defaults.
SIZES = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 32,
         "num_key_value_heads": 16, "vocab_size": 300, "max_position_embeddings": 9999, "rms_norm_eps": 1e-3,
         "initializer_range": 0.3, "attention_dropout": 0.25, "tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 123.0}, "head_dim": 6}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
AUXILIARY = {"router_aux_loss_coef": 0.5, "output_router_logits": True}
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 99, "vocab_size": 300,
                      "n_inner": 77, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.3,
                      "layer_norm_epsilon": 1e-3, "initializer_range": 0.3, "tie_word_embeddings": False}),
    "llama": ("Llama", SIZES), "mistral": ("Mistral", {**SIZES, "sliding_window": 5000}),
    "qwen2": ("Qwen2", {**SIZES, "head_dim": 2}), "qwen3": ("Qwen3", SIZES),
    "mixtral": ("Mixtral", {**SIZES, **AUXILIARY, "num_local_experts": 4, "num_experts_per_tok": 3}),
    "qwen3_moe": ("Qwen3Moe", {**SIZES, **AUXILIARY, **EXPERTS, "num_experts": 4}),
    "dots1": ("Dots1", {**SIZES, **EXPERTS, "n_routed_experts": 8, "n_shared_experts": 2,
                        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "sliding_window": None})}
OLD = {"rope_theta": 123.0, "rope_scaling": None}  # in place of rope_parameters


def taken(config: dict[str, Any], seq_len: int) -> ModelConfig | None:
    """The model that threed imports; None where it refuses."""
    try:
        return model_of(values_of(family_of(config, HERE), config, HERE, {"seq_len": seq_len})[0])
    except InputError:
        return None


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes(kind):
    """Each key of each class of configs left out, and null: as threed reads the config that transformers
    completes; a refusal is no wrong number."""
    transformers = pytest.importorskip("transformers", reason="the peer: pip install -e '.[dev]'")
    from huggingface_hub.errors import StrictDataclassError

    name, values = CLASSES[kind]
    whole = json.loads(json.dumps(getattr(transformers, f"{name}Config")(**values).to_dict()))
    whole["architectures"] = [FAMILIES[kind].architecture]
    forms = [whole] + ([{**{key: value for key, value in whole.items() if key != "rope_parameters"}, **OLD}]
                       if "rope_parameters" in whole else [])
    compared = 0
    for form in forms:
        assert taken(form, 64) is not None
        for key in form.keys() - {"model_type", "architectures"}:
            for config in ({each: value for each, value in form.items() if each != key}, {**form, key: None}):
                try:
                    completed = transformers.AutoConfig.for_model(**json.loads(json.dumps(config))).to_dict()
                except StrictDataclassError:  # transformers refuses it
                    continue
                completed["architectures"] = whole["architectures"]
                for length in (64, 4096, 4500, 9000):
                    mine, theirs = taken(config, length), taken(completed, length)
                    if mine is not None:
                        assert theirs is not None, (key, length)
                        kv_heads = (mine.num_kv_heads, theirs.num_kv_heads)
                        mine.kv_heads = theirs.kv_heads = None
                        assert mine == theirs and kv_heads[0] == kv_heads[1], (key, length)
                        compared += 1
    assert compared > 100


def test_other_names_of_keys():
    """As transformers maps them."""
    named = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
             "max_position_embeddings": 8}
    config = {key: value for key, value in GPT2.items() if key not in ("n_embd", "n_layer", "n_head",
                                                                       "n_positions")} | named
    mine, notes = values_of(family_of(config, HERE), config, HERE)
    assert mine == values_of(family_of(GPT2, HERE), GPT2, HERE)[0] and not notes
    dots = with_experts("dots1")
    dots["num_local_experts"] = dots.pop("n_routed_experts")
    assert values_of(family_of(dots, HERE), dots, HERE)[0]["experts"] == 4


# ---------------------------------------------------------------- rotary positions


FULL, SLIDING = ({"rope_type": "default", "rope_theta": theta} for theta in (1e6, 1e4))
ANSWERS = {"rope_theta": 1e6, "rope_scaling": None}


QWEN2 = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
         "layer_types": ["full_attention"] * 2}


@pytest.mark.parametrize("base", [LLAMA, QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("table", [
    {"full_attention": FULL, "sliding_attention": SLIDING}, {"full_attention": FULL},
    {"full_attention": FULL, "sliding_attention": FULL}, {"full_attention": FULL, "sliding_attention": None},
    {"sliding_attention": SLIDING, "rope_theta": 1e4}, {"main": FULL, "compress": SLIDING}])
def test_tables_of_kinds_of_layers(table, key, base):
    """Refused with the keys that answer them, whatever transformers makes of them; an export says the
    answer."""
    config = {name: value for name, value in base.items() if not name.startswith("rope_")} | {key: table}
    family = family_of(config, HERE)
    with pytest.raises(InputError, match=rf"{key} has a table for each kind of layer \({next(iter(table))}"):
        values_of(family, config, HERE)
    with pytest.raises(InputError, match=r"model\.rope_scaling"):
        values_of(family, config, HERE, {"rope_theta": 1e6})
    values, _ = values_of(family, config, HERE, ANSWERS)
    model = model_of({**values, **ANSWERS})
    again, _ = values_of(family, written(family, model, config, None), HERE)
    assert (again["rope_theta"], again["rope_scaling"]) == (1e6, None)


@pytest.mark.parametrize("changes, words", [
    ({"rope_theta": None}, "rope_theta=None is not a number; give model.rope_theta=..."),
    ({"rope_theta": "1e6"}, "rope_theta='1e6' is not a number"),
    ({"rope_parameters": [1e4]}, "rope_parameters is no JSON object"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
     "partial_rotary_factor=0.5"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
     "without, for the 2048 tokens of original_max_position_embeddings"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}}, "of type longrope"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "of type dynamic"),
    ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "of type proportional")])
def test_rotary_positions_that_are_refused(changes, words):
    config = {**LLAMA, **changes}
    with pytest.raises(InputError, match=re.escape(words)):
        values_of(family_of(config, HERE), config, HERE)


# ---------------------------------------------------------------- lengths


def manifest_of(source: Path, run: Path, *overrides: str) -> tuple[Path, list[str]]:
    done = import_model(source, run, list(overrides))
    return done.checkpoint, done.notes


def started(run: Path, path: Path, *overrides: str) -> Manifest:
    return read_manifest(path, load(run / "config.yaml", list(overrides)))


YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}


@pytest.mark.parametrize("changes, given, length, most", [
    ({}, [], 8192, None), ({}, [], 8200, 8192), (YARN, ["model.rope_scaling=null"], 2048, None),
    (YARN, ["model.rope_scaling=null"], 4096, 2048), (YARN, ["model.rope_scaling=[4,1,4,2048]"], 8192, None)])
def test_sequences_longer_than_the_model_is_made_for(changes, given, length, most, tmp_path):
    """It is said by the import and by the run, and the export says how long they were."""
    source = folder(tmp_path / "theirs", LLAMA)
    (source / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    path, notes = manifest_of(source, tmp_path / "run", *given, f"model.seq_len={length}")
    said = f"model.seq_len={length} is more than the {most} tokens for which the imported model is made"
    assert any(said in note for note in notes) == (most is not None)
    if most is None:
        assert load(tmp_path / "run" / "config.yaml").model.seq_len == length
    assert export_model(tmp_path / "run", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    least = 2048 if given == ["model.rope_scaling=null"] else 8192
    assert config["max_position_embeddings"] == max(least, length)
    manifest = started(tmp_path / "run", path)
    assert manifest.made_for == {"tokens": least, "window": None}


def test_a_usual_length_without_the_scaling(tmp_path):
    source = folder(tmp_path / "theirs", LLAMA)
    (source / "config.json").write_text(json.dumps({**LLAMA, **YARN}))
    import_model(source, tmp_path / "run", ["model.rope_scaling=null"])
    assert load(tmp_path / "run" / "config.yaml").model.seq_len == 2048


MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}


def test_a_run_beyond_the_sliding_window(tmp_path):
    """Its import, the run, and a run that goes on refuse it."""
    source = folder(tmp_path / "theirs", MISTRAL)
    with pytest.raises(InputError, match="sliding_window=64: attention is whole in threed"):
        import_model(source, tmp_path / "no", ["model.seq_len=128"])
    path, _ = manifest_of(source, tmp_path / "run")
    started(tmp_path / "run", path, "data.source=x", "data.tokenizer=x")
    with pytest.raises(InputError, match=r"model.seq_len=128: the layers .* have a sliding_window=64"):
        started(tmp_path / "run", path, "model.seq_len=128", "data.source=x", "data.tokenizer=x")


@pytest.mark.parametrize("kind, changes, window", [
    ("mistral", {}, 4096), ("mistral", {"sliding_window": None}, None), ("mixtral", {}, None),
    ("mistral", {"use_sliding_window": False}, 4096),  # a key that transformers does not read there
    ("qwen2", {}, None), ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, 4096),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, None),
    ("qwen3", {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, None),
    ("qwen3_moe", {"use_sliding_window": True, "max_window_layers": 48}, 4096),  # of all layers
    ("dots1", {}, None), ("dots1", {"max_window_layers": 1}, 4096),
    ("dots1", {"layer_types": ["full_attention", "sliding_attention"]}, 4096)])
def test_windows_are_those_of_the_family(kind, changes, window):
    base = with_experts(kind) if kind in ("mixtral", "qwen3_moe", "dots1") else LLAMA
    config = {**base, "model_type": kind, "architectures": [FAMILIES[kind].architecture], **changes}
    assert (taken(config, 8192) is None) == (window is not None)
    assert taken(config, 4096) is not None


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_other_kinds_of_layers(kind):
    config = {**LLAMA, "model_type": kind, "architectures": [FAMILIES[kind].architecture],
              "layer_types": ["full_attention", "linear_attention"]}
    with pytest.raises(InputError, match="layer_types has linear_attention: threed's layers"):
        values_of(family_of(config, HERE), config, HERE)


def test_an_export_has_no_window_that_the_run_had_not():
    model = load(None, ["model.name=mistral-7b-v0.3", "model.seq_len=8192"]).model
    family = FAMILIES["mistral"]
    assert written(family, model, None, "float32")["sliding_window"] is None
    config = {**written(family, model, None, "float32"), "sliding_window": 4096}
    assert written(family, model, config, None)["sliding_window"] is None


# ---------------------------------------------------------------- experts


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_the_weight_of_the_auxiliary_loss(kind):
    config = {**with_experts(kind), "router_aux_loss_coef": 0.02, "output_router_logits": True}
    family = family_of(config, HERE)
    values, notes = values_of(family, config, HERE)
    # 2 experts of a token, 2 layers
    assert (values["balance"], values["balance_weight"]) == ("sequence", 0.02)
    assert any("router_aux_loss_coef=0.02" in note and "model.balance_weight=0.02" in note for note in notes)
    values, _ = values_of(family, {**config, "num_experts_per_tok": 1, "num_hidden_layers": 4}, HERE)
    assert values["balance_weight"] == 0.005
    for off in ({"output_router_logits": False}, {"output_router_logits": None}):
        values, notes = values_of(family, {**config, **off}, HERE)
        assert values["balance"] == "none" and any("balance_weight=0.02 adds it" in note for note in notes)
    _, notes = values_of(family, config, HERE, {"balance": "none"})
    assert not any("aux" in note for note in notes)


def test_what_trains_otherwise_is_said():
    """Noise of a router, losses that a family does not read, biases that move here and not there."""
    for kind, changes, words in (("mixtral", {"router_jitter_noise": 0.1}, "follow: router_jitter_noise"),
                                 ("mixtral", {"router_jitter_noise": 0.0}, None),
                                 ("dots1", {"aux_loss_alpha": 0.1}, "follow: aux_loss_alpha"),
                                 ("dots1", {}, "optimizer.balance_rate=0 leaves them")):
        config = {**with_experts(kind), **changes}
        _, notes = values_of(family_of(config, HERE), config, HERE)
        assert any(words in note for note in notes) if words else "follow" not in str(notes)


# ---------------------------------------------------------------- the way out


LLAMA_OF_OURS = ["model.family=llama", "model.layers=2", "model.hidden=16", "model.heads=4",
                 "model.seq_len=8", "model.vocab=30", "model.vocab_multiple=16"]
MOE = [*LLAMA_OF_OURS[1:], "model.family=moe", "model.experts=4", "model.expert_ffn_hidden=24"]
GPT = [*LLAMA_OF_OURS[1:], "model.family=gpt", "model.position=learned"]
KEPT_IN = {
    "llama": (LLAMA_OF_OURS, ["norm=layernorm", "activation=gelu", "bias=true", "position=learned",
                              "qkv_bias=true model.qk_norm=true", "norm=layernorm model.bias=true"]),
    "gpt": (GPT, ["position=rotary", "norm=rmsnorm", "activation=swiglu", "bias=false", "qkv_bias=false",
                  "qk_norm=true", "kv_heads=2", "head_dim=6",
                  "position=rotary model.rope_scaling=[8,1,4,16]"]),
    "moe": (MOE, ["balance=bias", "qkv_bias=true", "router_score=sigmoid", "normalize_top_k=false",
                  "routed_scale=2.0", "shared_expert_ffn=24", "first_dense=1", "moe_every=2",
                  "moe_route=balanced", "expert_groups=2", "norm=layernorm",
                  "balance=bias model.router_score=sigmoid model.qk_norm=true",
                  "balance=bias model.router_score=sigmoid model.qk_norm=true model.shared_expert_ffn=30"])}


@pytest.mark.parametrize("base, changes", [(base, each) for base, (_, every) in KEPT_IN.items()
                                           for each in every])
def test_the_message_says_which_keys_keep_a_model_in(base, changes):
    """With the values that it asks for, the model has a way out."""
    words = [*KEPT_IN[base][0], *f"model.{changes}".split()]
    model = load(None, words).model
    with pytest.raises(InputError, match=r"no model of transformers .*\n  - model\.") as error:
        family_for(model, None)
    asked = dict(re.findall(r"- (model\.\w+)=([\w.]+)", str(error.value)))
    if " " not in changes:  # of several keys, others may be nearer
        assert f"model.{changes.partition('=')[0]}" in asked
    assert "Train a model" not in str(error.value)
    family_for(load(None, [*words, *(f"{key}={value}" for key, value in asked.items())]).model, None)


def test_the_experts_that_ship():
    with pytest.raises(InputError, match=r"A mixtral is the nearest, .*new run:\n  - model.balance=none or "
                                         r"sequence, not bias$"):
        family_for(load("configs/toy-moe.yaml").model, None)
    family_for(load("configs/toy-moe.yaml", ["model.balance=sequence"]).model, None)


def test_a_family_of_your_own_is_not_exported_as_another():
    """Its parameters have the names of a family here, and compute otherwise."""
    model = load(None, [*GPT, "model.family=tests/families/parallel_block.py:PARALLEL"]).model
    with pytest.raises(InputError, match="is a family of your own, which transformers does not know"):
        family_for(model, None)


ODD = {
    "mixtral": [*MOE, "model.ffn_hidden=32"],  # experts of another size than its dense MLPs would have
    "qwen3_moe": [*MOE, "model.ffn_hidden=40", "model.qk_norm=true", "model.normalize_top_k=false",
                  "model.head_dim=6", "model.kv_heads=1", "model.vocab=29"],
    "dots1": [*MOE, "model.qk_norm=true", "model.router_score=sigmoid", "model.balance=bias",
              "model.first_dense=1", "model.shared_expert_ffn=48", "model.routed_scale=2.5",
              "model.ffn_hidden=33"],
    "llama": [*LLAMA_OF_OURS, "model.kv_heads=2", "model.ffn_hidden=33", "model.vocab=31",
              "model.tie_embeddings=true", "model.rope_scaling=[8,1,4,16]"],
    "mistral": [*LLAMA_OF_OURS, "model.hidden=18", "model.head_dim=6"],  # no whole heads, which a Llama needs
    "qwen2": [*LLAMA_OF_OURS, "model.qkv_bias=true", "model.kv_heads=1", "model.head_dim=8"],
    "qwen3": [*LLAMA_OF_OURS, "model.qk_norm=true", "model.hidden=18", "model.head_dim=10"],
    "gpt2": [*GPT, "model.ffn_hidden=33", "model.tie_embeddings=false", "model.vocab=29"]}


@pytest.mark.parametrize("kind", ODD)
def test_odd_sizes_load_strictly(kind, tmp_path):
    """transformers makes a model with these tensors of the config.json of an export, of any size."""
    transformers = pytest.importorskip("transformers", reason="the peer: pip install -e '.[dev]'")
    few = ["train.global_batch_size=2", "train.micro_batch_size=2", f"run.dir={tmp_path / 'run'}",
           "data.source=/nowhere", "run.device=cpu"]
    saved_after(load(None, [*ODD[kind], *few]), 1)
    assert export_model(tmp_path / "run", tmp_path / "out").family == kind
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True)
    assert not any(found.values()), found
    import_model(tmp_path / "out", tmp_path / "again")
    assert isinstance(model, torch.nn.Module) and model.config.vocab_size == load(None, ODD[kind]).model.vocab

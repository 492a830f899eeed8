"""Options and keys of experts of DeepSpeed, Megatron-DeepSpeed and torchtitan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from threed.base.errors import InputError
from threed.config.synonyms import ours
from threed.interop import convert as subject
from threed.models.layers.experts import ExpertsConfig

BLOCK = {"autoep_size": 4, "top_k": 2}


def deepspeed(tmp_path: Path, section: dict[str, Any], **more: Any) -> subject.Converted:
    values = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "expert_parallel": section, **more}
    (tmp_path / "ds.json").write_text(json.dumps(values))
    return subject.deepspeed(tmp_path / "ds.json", [], 8)


def model_of(done: subject.Converted) -> ExpertsConfig:
    assert isinstance(done.config.model, ExpertsConfig)
    return done.config.model


def test_the_section_of_experts(tmp_path):
    """All that a section has an effect with, and as the model has it where it says nothing."""
    done = deepspeed(tmp_path, {
        "enabled": True, **BLOCK, "score_func": "sigmoid", "route_norm": False, "routed_scaling_factor": 2.5,
        "num_expert_groups": 4, "num_limited_groups": 2, "score_apply": "post", "preset_model": "mixtral",
        "load_balance_coeff": None, "expert_tensor_parallel_size": 1, "use_grouped_mm": True},
        use_data_before_expert_parallelism=True)
    assert not done.refused
    assert {key: value for key, value in done.values.items() if key.startswith("model.")} == {
        "model.family": "moe", "model.experts_per_token": 2, "model.router_score": "sigmoid",
        "model.normalize_top_k": False, "model.routed_scale": 2.5, "model.expert_groups": 4,
        "model.groups_per_token": 2}
    assert (done.config.parallel.ep, done.config.dp) == (4, 8)
    assert {"expert_parallel.preset_model", "expert_parallel.score_apply", "expert_parallel.use_grouped_mm",
            "use_data_before_expert_parallelism"} == set(done.dropped)


@pytest.mark.parametrize("key, value", [
    ("expert_tensor_parallel_size", 2), ("score_apply", "pre"), ("load_balance_coeff", 1e-3),
    ("shared_experts_gate_pattern", "gate"), ("novelty", 3)])
def test_settings_of_experts_that_are_refused(key, value, tmp_path):
    done = deepspeed(tmp_path, {"enabled": True, **BLOCK, key: value})
    assert set(done.refused) == {f"expert_parallel.{key}"}


@pytest.mark.parametrize("section, key, words", [
    ({"enabled": True, "top_k": "auto"}, "expert_parallel.top_k", "or from the model: set"),
    ({"enabled": True, "route_norm": None}, "expert_parallel.route_norm", "as the model has it"),
    ({"enabled": True, "route_scale": 2.0, "routed_scaling_factor": 2.5}, "expert_parallel.route_scale",
     "routed_scaling_factor replaces it"),
    *((BLOCK | {key: value}, f"expert_parallel.{key}", "without expert_parallel.enabled it has no effect")
      for key, value in (("autoep_size", 4), ("expert_tensor_parallel_size", 2), ("novelty", 3)))])
def test_settings_of_experts_without_an_effect(section, key, words, tmp_path):
    done = deepspeed(tmp_path, section)
    assert words in done.dropped[key] and not done.refused


@pytest.mark.parametrize("batch", [
    {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, {"train_batch_size": "auto"},
    {"train_micro_batch_size_per_gpu": 2}], ids=str)
def test_experts_on_ranks_that_nobody_has_counted(batch, tmp_path):
    """The file does not say how many there are; what says it is asked for."""
    file, experts = tmp_path / "ds.json", {"expert_parallel": {"enabled": True, **BLOCK}}
    file.write_text(json.dumps({**batch, **experts}))
    with pytest.raises(InputError, match=r"^expert_parallel\.autoep_size=4: .* --devices N, or parallel\.dp"):
        subject.deepspeed(file, [])
    assert subject.deepspeed(file, ["parallel.dp=8", "train.global_batch_size=16"]).config.parallel.ep == 4
    assert subject.deepspeed(file, ["parallel.ep=1"]).config.parallel.ep == 1
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    file.write_text(json.dumps({**sizes, **experts}))
    assert subject.deepspeed(file, []).config.dp == 4  # the three sizes say it


def test_a_section_of_experts_that_is_off(tmp_path):
    done = deepspeed(tmp_path, {"enabled": False, **BLOCK, "novelty": 3})
    assert not done.refused and not [key for key in done.values if key.startswith("model.")]


MEGATRON = ("--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --num-experts 8 "
            "--swiglu --disable-bias-linear --deepspeed")
EXACT = "--disable-moe-token-dropping --moe-loss-coeff 0"


def test_experts_of_megatron_deepspeed():
    text = f"{MEGATRON} {EXACT} --topk 2 --moe-expert-parallel-size 4 --expert-interval 1 " \
        "--disable-moe-top2-2nd-expert-sampling --mlp-type standard --moe-min-capacity 4"
    done = subject.megatron(text, [], 8)
    model = model_of(done)
    assert not done.refused
    assert (model.experts, model.experts_per_token, model.normalize_top_k) == (8, 2, True)
    assert (model.moe_every, model.first_dense, done.config.parallel.ep) == (1, 0, 4)
    assert {"--moe-loss-coeff", "--moe-min-capacity", "--disable-moe-token-dropping"} <= set(done.dropped)


def test_defaults_of_megatron_deepspeed():
    """One expert a token, whose score is not normalized; every second block, the first is dense; tokens are
    dropped, and an auxiliary loss is added."""
    done = subject.megatron(MEGATRON, [])
    model = model_of(done)
    assert (model.experts_per_token, model.normalize_top_k) == (1, False)
    assert [model.has_experts(block) for block in range(4)] == [False, True, False, True]
    assert set(done.refused) == {"--moe-train-capacity-factor", "--moe-loss-coeff"}
    assert model_of(subject.megatron(MEGATRON.removesuffix("--deepspeed"), [])).experts_per_token == 2


@pytest.mark.parametrize("text, refused", [
    ("--mlp-type residual", "--mlp-type"), ("--topk 2", "--moe-top2-2nd-expert-sampling"),
    ("--enable-expert-tensor-parallelism", "--enable-expert-tensor-parallelism")])
def test_refused_options_of_megatron_deepspeed(text, refused):
    assert set(subject.megatron(f"{MEGATRON} {EXACT} {text}", []).refused) == {refused}


def test_an_expert_that_megatron_cuts_over_tp():
    """It does so by default where tp is above 1, and here an expert is whole."""
    text = MEGATRON.replace("--deepspeed", "--sequence-parallel --micro-batch-size 1")
    said = [any("whole on its rank here, and cut over tp=2 there" in note
                for note in subject.megatron(f"{text} {more}", [], 8).notes)
            for more in ("--tensor-model-parallel-size 2", "", "--tensor-model-parallel-size 2 "
                         "--expert-tensor-parallel-size 1")]
    assert said == [True, False, False]


def test_options_of_experts_that_are_not_there():
    text = MEGATRON.replace("--num-experts 8", "--expert-tensor-parallel-size 2 --moe-router-topk 2")
    done = subject.megatron(text, [])
    assert not done.refused and done.config.model.family == "gpt"
    assert {done.dropped[f"--{name}"] for name in ("expert-tensor-parallel-size", "moe-router-topk")} == {
        "without --num-experts there are none"}


def test_other_numbers_of_experts_in_other_blocks():
    done, equal = (subject.megatron(MEGATRON.replace("--num-experts 8", f"--num-experts 8 {other}"), [])
                   for other in (16, 8))
    assert "give one number" in done.refused["--num-experts"] and done.config.model.family == "gpt"
    assert model_of(equal).experts == 8


@pytest.mark.parametrize("key, instead", [
    ("parallelism.expert_parallel_degree", "use parallel.ep"),
    ("parallelism.expert_tensor_parallel_degree", "there is nothing like it: threed does not cut an expert"),
    ("parallelism.expert_parallel_comm_backend", "there is no key: rows always travel by all-to-all"),
    ("debug.moe_force_load_balance", "use model.moe_route=balanced"),
    ("training.debug_moe_force_load_balance", "use model.moe_route=balanced"),
    ("expert_parallel.autoep_size", "for DeepSpeed's expert_parallel.autoep_size use parallel.ep"),
    ("parallel.moe_expert_parallel_size", "use parallel.ep")])
def test_what_a_key_is_here(key, instead):
    assert instead in (ours(key) or "")


def test_capacity_is_said_to_be_another():
    experts = "--num-experts 8 --swiglu --disable-bias-linear"
    done = subject.megatron(f"{experts} --moe-expert-capacity-factor 1.25", [])
    assert "here of each sequence" in done.why["model.moe_capacity"]
    without = subject.megatron(f"{experts} --moe-token-drop-policy position", [])
    assert "no token is dropped" in without.dropped["--moe-token-drop-policy"]

"""Sizes by name against the config.json of the published models, and against transformers' modelling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from threed.config.load import load
from threed.interop.hf.config import family_of, model_of, values_of, written
from threed.interop.hf.fitting import family_for
from threed.models.families.registry import sizes
from threed.models.model import parameters

# Of config.json, as it was published: the values of KEYS, and others.
SCALED = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
LLAMA31 = {"rope_scaling": {"factor": 8.0, **SCALED}, "attention_bias": False, "mlp_bias": False}
LLAMA32 = {"rope_scaling": {"factor": 32.0, **SCALED}, "attention_bias": False, "mlp_bias": False}
QWEN3 = {"head_dim": 128, "attention_bias": False, "sliding_window": None, "use_sliding_window": False}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
QWEN3_MOE = {**QWEN3, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
             "decoder_sparse_step": 1, "mlp_only_layers": []}
QWEN2 = {"sliding_window": 131072, "use_sliding_window": False}
PUBLISHED: dict[str, tuple[Any, ...]] = {
    "llama2-7b": ("llama", 32, 4096, 32, 32, 11008, 32000, 1e-5, False, 1e4, 4096, {}),
    "llama3-8b": ("llama", 32, 4096, 32, 8, 14336, 128256, 1e-5, False, 5e5, 8192, {}),
    "llama3-70b": ("llama", 80, 8192, 64, 8, 28672, 128256, 1e-5, False, 5e5, 8192, {}),
    "llama3.1-8b": ("llama", 32, 4096, 32, 8, 14336, 128256, 1e-5, False, 5e5, 131072, LLAMA31),
    "llama3.1-70b": ("llama", 80, 8192, 64, 8, 28672, 128256, 1e-5, False, 5e5, 131072, LLAMA31),
    "llama3.1-405b": ("llama", 126, 16384, 128, 8, 53248, 128256, 1e-5, False, 5e5, 131072, LLAMA31),
    "llama3.2-1b": ("llama", 16, 2048, 32, 8, 8192, 128256, 1e-5, True, 5e5, 131072,
                    {"head_dim": 64, **LLAMA32}),
    "llama3.2-3b": ("llama", 28, 3072, 24, 8, 8192, 128256, 1e-5, True, 5e5, 131072,
                    {"head_dim": 128, **LLAMA32}),
    "qwen2.5-0.5b": ("qwen2", 24, 896, 14, 2, 4864, 151936, 1e-6, True, 1e6, 32768, QWEN2),
    "qwen2.5-1.5b": ("qwen2", 28, 1536, 12, 2, 8960, 151936, 1e-6, True, 1e6, 131072, QWEN2),
    "qwen2.5-3b": ("qwen2", 36, 2048, 16, 2, 11008, 151936, 1e-6, True, 1e6, 32768, QWEN2),
    "qwen2.5-7b": ("qwen2", 28, 3584, 28, 4, 18944, 152064, 1e-6, False, 1e6, 131072, QWEN2),
    "qwen2.5-14b": ("qwen2", 48, 5120, 40, 8, 13824, 152064, 1e-5, False, 1e6, 131072, QWEN2),
    "qwen2.5-32b": ("qwen2", 64, 5120, 40, 8, 27648, 152064, 1e-5, False, 1e6, 131072, QWEN2),
    "qwen2.5-72b": ("qwen2", 80, 8192, 64, 8, 29568, 152064, 1e-5, False, 1e6, 131072, QWEN2),
    "qwen3-0.6b": ("qwen3", 28, 1024, 16, 8, 3072, 151936, 1e-6, True, 1e6, 40960, QWEN3),
    "qwen3-1.7b": ("qwen3", 28, 2048, 16, 8, 6144, 151936, 1e-6, True, 1e6, 40960, QWEN3),
    "qwen3-4b": ("qwen3", 36, 2560, 32, 8, 9728, 151936, 1e-6, True, 1e6, 40960, QWEN3),
    "qwen3-8b": ("qwen3", 36, 4096, 32, 8, 12288, 151936, 1e-6, False, 1e6, 40960, QWEN3),
    "qwen3-14b": ("qwen3", 40, 5120, 40, 8, 17408, 151936, 1e-6, False, 1e6, 40960, QWEN3),
    "qwen3-32b": ("qwen3", 64, 5120, 64, 8, 25600, 151936, 1e-6, False, 1e6, 40960, QWEN3),
    "mistral-7b-v0.3": ("mistral", 32, 4096, 32, 8, 14336, 32768, 1e-5, False, 1e6, 32768,
                        {"sliding_window": None}),
    "mixtral-8x7b": ("mixtral", 32, 4096, 32, 8, 14336, 32000, 1e-5, False, 1e6, 32768, MIXTRAL),
    "mixtral-8x22b": ("mixtral", 56, 6144, 48, 8, 16384, 32768, 1e-5, False, 1e6, 65536, MIXTRAL),
    "qwen3-30b-a3b": ("qwen3_moe", 48, 2048, 32, 4, 6144, 151936, 1e-6, False, 1e6, 40960,
                      {**QWEN3_MOE, "moe_intermediate_size": 768}),
    "qwen3-235b-a22b": ("qwen3_moe", 94, 4096, 64, 4, 12288, 151936, 1e-6, False, 1e6, 40960,
                        {**QWEN3_MOE, "moe_intermediate_size": 1536}),
    "dots.llm1": ("dots1", 62, 4096, 32, 32, 10944, 152064, 1e-5, False, 1e7, 32768, {
        "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1, "attention_bias": False,
        "sliding_window": None}),
}
KEYS = ("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
        "intermediate_size", "vocab_size", "rms_norm_eps", "tie_word_embeddings", "rope_theta",
        "max_position_embeddings")


def config_of(name: str) -> dict[str, Any]:
    *values, more = PUBLISHED[name]
    return {"hidden_act": "silu", "initializer_range": 0.02, "attention_dropout": 0.0, **more,
            **dict(zip(KEYS, values, strict=True))}


def test_all_names_are_here():
    assert PUBLISHED.keys() == {name for name in sizes() if not name.startswith(("gpt", "megatron"))}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_named_size_is_the_import_of_the_published_config(name):
    """In each key of `model`: theta, scaling, epsilon, biases, norms, heads, ties ..."""
    named, config = load(None, [f"model.name={name}"]).model, config_of(name)
    values, _ = values_of(family_of(config, Path("config.json")), config, Path("config.json"),
                          {"seq_len": named.seq_len})
    theirs = model_of(values)
    for key, value in vars(theirs).items():
        if key not in ("name", "head_dim", "qkv_bias", "balance", "balance_weight"):
            assert getattr(named, key) == value, key
    assert named.head_size == theirs.head_size and named.has_qkv_bias == theirs.has_qkv_bias


@pytest.mark.parametrize("name", ["llama3.2-1b", "qwen2.5-7b", "qwen3-0.6b", "mistral-7b-v0.3", "gpt2-small",
                                  "mixtral-8x22b", "qwen3-30b-a3b", "dots.llm1"])
def test_the_export_of_a_named_size_has_the_tensors_of_transformers(name):
    """Their model, made from the config.json that an export writes, has the same tensors."""
    transformers = pytest.importorskip("transformers", reason="the peer: pip install -e '.[dev]'")
    model = load(None, [f"model.name={name}"]).model
    family = family_for(model, {"model_type": "mistral"} if name.startswith("mistral") else None)
    values = written(family, model, None, "bfloat16")
    config = transformers.AutoConfig.for_model(**values)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    rows, ours = family.rows(model), dict[str, tuple[int, ...]]()
    for each in parameters(model):
        row = rows[each.name][0]  # of a mixture of experts: as transformers has it in memory
        ours |= {row.also: row.stack(each.stored)} if row.also else row.shapes(each.stored, model)
    has = {tensor: tuple(value.shape) for tensor, value in theirs.state_dict().items()}
    if model.tie_embeddings:
        del has["lm_head.weight"]
    assert has == ours
    if family.model_type != "gpt2":
        rope = config.rope_parameters
        assert rope["rope_theta"] == model.rope_theta and config.rms_norm_eps == model.norm_eps
        assert rope.get("factor") == (model.rope_scaling[0] if model.rope_scaling is not None else None)

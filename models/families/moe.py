"""Mixture of experts: Llama's blocks, of which some have experts (models/layers/experts.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from threed.models.families.base import Family
from threed.models.families.gpt import block as dense
from threed.models.families.llama import LlamaConfig
from threed.models.layers.base import Layer
from threed.models.layers.embedding import Embedding
from threed.models.layers.experts import ExpertsConfig, block
from threed.models.layers.head import Head


@dataclass
class MoeConfig(LlamaConfig, ExpertsConfig):
    family: str = "moe"


def layers(model: MoeConfig) -> list[Layer]:
    blocks = [layer for index in range(model.layers)
              for layer in (block(model, index) if model.has_experts(index) else [dense(model, index)])]
    return [Embedding(model), *blocks, Head(model)]


def check(model: MoeConfig, ranks: Mapping[str, int]) -> list[str]:
    return list(_problems(model, ranks))


def _problems(model: MoeConfig, ranks: Mapping[str, int]) -> Iterator[str]:
    experts, k, groups = model.experts, model.experts_per_token, model.expert_groups
    if experts % ranks.get("ep", 1):
        yield (f"parallel.ep={ranks['ep']} does not divide model.experts={experts}: take a divisor of "
               f"{experts}")
    if model.activation != "swiglu" or model.bias:
        yield ("experts have a gate and no biases: set model.activation=swiglu and model.bias=false "
               "(model.qkv_bias gives attention its own)")
    if model.first_dense >= model.layers:
        yield (f"model.first_dense={model.first_dense} leaves none of model.layers={model.layers} with "
               f"experts: take at most {model.layers - 1}, or model.family=llama")
    if k > experts:
        yield f"model.experts_per_token={k} is more than model.experts={experts}: take at most {experts}"
    if experts % groups:
        yield (f"model.expert_groups={groups} does not divide model.experts={experts}: take a divisor of "
               f"{experts}")
    elif groups == 1 and model.groups_per_token > 1:
        yield f"model.groups_per_token={model.groups_per_token} needs model.expert_groups above 1"
    elif groups > 1 and not (model.groups_per_token <= groups and k % model.groups_per_token == 0
                             and k // model.groups_per_token <= experts // groups):
        yield (f"model.groups_per_token={model.groups_per_token} of {groups} groups of {experts // groups} "
               f"experts cannot give model.experts_per_token={k}: it must divide it, and a group must have "
               "as many experts")


def _mixtral(layers: int, hidden: int, heads: int, ffn_hidden: int, vocab: int,
             seq_len: int) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8, "ffn_hidden": ffn_hidden,
            "vocab": vocab, "seq_len": seq_len, "rope_theta": 1e6, "experts": 8, "experts_per_token": 2,
            "balance": "sequence"}


def _qwen3(layers: int, hidden: int, heads: int, expert_ffn_hidden: int) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 4, "head_dim": 128,
            "ffn_hidden": 3 * hidden, "vocab": 151936, "seq_len": 4096, "rope_theta": 1e6, "norm_eps": 1e-6,
            "qk_norm": True,
            "experts": 128, "experts_per_token": 8, "expert_ffn_hidden": expert_ffn_hidden,
            "balance": "sequence"}


# As in the config.json of the published base models.
SIZES: dict[str, dict[str, Any]] = {
    # Jiang et al. 2024
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336, 32000, 32768),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, 32768, 65536),
    # Yang et al. 2025
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 768),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 1536),
    # Huo et al. 2025: the router, the shared experts and the first dense block of DeepSeek-V3
    "dots.llm1": {
        "layers": 62, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn_hidden": 10944, "vocab": 152064,
        "seq_len": 8192, "rope_theta": 1e7, "qk_norm": True, "experts": 128, "experts_per_token": 6,
        "expert_ffn_hidden": 1408, "shared_expert_ffn": 2816, "router_score": "sigmoid",
        "routed_scale": 2.5, "first_dense": 1, "balance": "bias"},
}
MOE = Family(layers, MoeConfig, SIZES, check)

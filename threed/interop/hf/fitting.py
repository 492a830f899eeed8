"""Fitting: as which family of transformers a model goes out, and the keys by which one cannot hold it. No
torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from threed.base.errors import InputError
from threed.interop.hf.names import FAMILIES, HFFamily
from threed.models.families.registry import FAMILIES as OURS
from threed.models.layers.experts import ExpertsConfig
from threed.models.model import parameters
from threed.schema import ModelConfig

GROUPS = ("expert_groups", "groups_per_token", "experts_per_token")
# Keys of `fixed` that `_needs` compares by what they mean, or that change nothing once a model is trained.
_OTHERWISE = ("family", "qkv_bias", "kv_heads", "head_dim", "balance", "shared_expert_ffn", "dropout")


def rated_by(family: HFFamily, values: Mapping[str, Any]) -> float:
    """How many of its best experts rate a group in threed: experts per token, over chosen groups. 0 where the
    family rates a group by as many, or no groups are chosen."""
    groups, chosen, k = (values.get(name, 1) for name in GROUPS)
    return k / chosen if family.best_of_group and groups > 1 and k != family.best_of_group * chosen else 0.0


def unfit(family: HFFamily, model: ModelConfig) -> dict[str, str]:
    """Keys of `model` -> the value, or values, with which a family could hold the model; empty if it can."""
    needs = dict(_needs(family, model))
    if not needs:
        has, needed = family.rows(model), {each.name: None for each in parameters(model)}
        strange = [name for name in needed if name not in has]
        strange += [name for name in has if name not in needed and name != "head.output.weight"]
        assert not strange, f"{family.model_type}: no key tells that {strange[0]} is not in both"
    return needs


def _needs(family: HFFamily, model: ModelConfig) -> Iterator[tuple[str, str]]:
    fixed, told = family.fixed, {key.ours for key in family.keys}
    experts = isinstance(model, ExpertsConfig)
    if model.family not in OURS or experts != (fixed["family"] == "moe"):
        yield "family", fixed["family"]
        return
    for key, value in fixed.items():
        if key not in (*_OTHERWISE, *told) and getattr(model, key, value) != value:
            yield key, _show(value)
    biased = fixed["bias"] if fixed["qkv_bias"] is None else fixed["qkv_bias"]
    if model.has_qkv_bias != biased and model.bias == fixed["bias"]:
        yield "qkv_bias", _show(biased)
    if family.model_type == "gpt2":
        if model.num_kv_heads != model.heads:
            yield "kv_heads", "null"
        if model.head_size * model.heads != model.hidden:
            yield "head_dim", "null"
    if family.whole_heads and model.hidden % model.heads:
        yield "heads", f"a divisor of model.hidden={model.hidden}"
    if isinstance(model, ExpertsConfig):
        yield from _of_experts(family, model)


def _of_experts(family: HFFamily, model: ExpertsConfig) -> Iterator[tuple[str, str]]:
    biased = family.fixed["balance"] == "bias"
    if (model.balance == "bias") != biased:
        yield "balance", "bias" if biased else "none or sequence"
    if family.shared and (model.shared_expert_ffn % model.inner or not model.shared_expert_ffn):
        yield "shared_expert_ffn", f"{model.inner}, the size of an expert, or a multiple of it"
    elif model.shared_expert_ffn and not family.shared:
        yield "shared_expert_ffn", "0"
    if rated_by(family, vars(model)):
        yield "groups_per_token", (f"a number of groups that have {family.best_of_group} experts of a token "
                                   "each")
    if model.moe_route != "learned":
        yield "moe_route", "learned"


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def family_for(model: ModelConfig, kept: Mapping[str, Any] | None) -> HFFamily:
    """The family as which a model is exported: that of `kept`, its config.json, or the first that can hold
    it. InputError where none can, with the keys by which the nearest would."""
    order = list(FAMILIES.values())
    if kept is not None and kept.get("model_type") in FAMILIES:
        order.sort(key=lambda family: family.model_type != kept["model_type"])
    needs = {family.model_type: unfit(family, model) for family in order}
    nearest = min(order, key=lambda family: ("family" in needs[family.model_type],
                                             len(needs[family.model_type])))
    asked = needs[nearest.model_type]
    if not asked:
        return nearest
    if "family" in asked:
        raise InputError(f"model.family={model.family} is a family of your own, which transformers does not "
                         "know: threed exports models of gpt, llama and moe")
    lines = "".join(f"\n  - model.{key}={value}, not {_show(getattr(model, key))}"
                    for key, value in asked.items())
    small = "" if isinstance(model, ExpertsConfig) else " (configs/llama-toy.yaml is a small model with them)"
    raise InputError(f"no model of transformers that threed knows can hold this one. A {nearest.model_type} "
                     f"is the nearest, and could with these keys in a new run{small}:{lines}")

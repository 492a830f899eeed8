"""What DeepSpeed's keys of experts are here: the section expert_parallel of its file (AutoEP), which makes
experts of a model of transformers. (Arguments of deepspeed.moe.layer.MoE stand in a script, not in the file;
options of Megatron-DeepSpeed that give them are in `megatron_experts`.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from threed.config.keys.table import NO_KEY, NOTHING, Dropped, Given, Key, Refused, where

_ON = "expert_parallel.enabled"
# How modules of a model are found, and how one backend does what threed does in one way
_NAMES = """
    preset_model moe_layer_pattern expert_pattern router_pattern expert_w1 expert_w2 expert_w3
    num_experts_attr top_k_attr has_shared_experts shared_experts_pattern
"""
_WAYS = """
    use_grouped_mm disable_triton_grouped_mm combine_impl validate_folding_routing async_split_plan
    row_weighting_impl gate_up_impl comm_backend comm_num_sm comm_qp_margin comm_max_tokens_per_rank
"""


def _off(given: Given) -> str:
    return "" if given.get(_ON) is True else f"without {_ON} it has no effect"


def _scale(value: Any, given: Given) -> Any:
    if "expert_parallel.routed_scaling_factor" in given:
        raise Dropped("routed_scaling_factor replaces it")
    return value


def _applied(value: Any, _: Given) -> Any:
    if value == "pre":
        raise Refused("threed weighs what an expert computes, not what it gets")
    raise Dropped("what an expert computes is weighed")


def _key(name: str, ours: str, take: Callable[[Any, Given], Any] | None = None,
         off: tuple[Any, ...] = ()) -> Key:
    """A key of the section. null is what the model says, which the file does not have."""
    row = Key(f"expert_parallel.{name}", ours, take, off)

    def taken(value: Any, given: Given) -> dict[str, Any]:
        if value is None and row.key is not None:
            raise Dropped("it is as the model has it, then")
        return row.taken(value, given)

    return where(_off, row._replace(take=taken))


KEYS = (
    Key(_ON, "model.family=moe (of model.experts experts)"),
    _key("autoep_size", "parallel.ep"),
    _key("expert_tensor_parallel_size", NOTHING + "threed does not cut an expert over tp", None, (1,)),
    _key("top_k", "model.experts_per_token"),
    _key("score_func", "model.router_score"),
    _key("route_norm", "model.normalize_top_k"),
    _key("route_scale", "model.routed_scale", _scale),
    _key("routed_scaling_factor", "model.routed_scale"),
    _key("num_expert_groups", "model.expert_groups"),
    _key("num_limited_groups", "model.groups_per_token"),
    _key("score_apply", NO_KEY + "what an expert computes is weighed (post)", _applied),
    _key("load_balance_coeff",
         NOTHING + "DeepSpeed takes no value of it; threed has model.balance=bias, optimizer.balance_rate"),
    _key("shared_experts_gate_pattern", NOTHING + "threed has no gate of the shared expert"),
    *(_key(name, NO_KEY + "model.* describes the model") for name in _NAMES.split()),
    *(_key(name, NO_KEY + "threed has one way to do it") for name in _WAYS.split()),
    _key("ep_size", NOTHING + "DeepSpeed reads autoep_size; here it is parallel.ep"),
    _key("num_experts", NOTHING + "DeepSpeed finds them in the model; here it is model.experts"),
    _key("*", NOTHING + "threed has no such setting of experts"),
    Key("moe.*", NOTHING + "DeepSpeed does not read it in training; experts are model.family=moe with "
        "model.experts and parallel.ep"),
    Key("use_data_before_expert_parallelism",
        NO_KEY + "runs of neighbouring ranks hold all experts, which changes no number"),
)

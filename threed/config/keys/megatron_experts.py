"""What Megatron-LM's and Megatron-DeepSpeed's options of experts are here. Without --num-experts they have no
effect."""

from __future__ import annotations

import ast
from math import prod
from typing import Any

from threed.base.errors import InputError
from threed.config.keys.table import NO_KEY, NOTHING, Dropped, Given, Key, Refused, where

_ONE, _NONE = (1,), (None, 1, [1])
_MOST = 100_000  # blocks
# How one backend or another does what threed does in one way
_WAYS = """
    moe_grouped_gemm moe_use_legacy_grouped_gemm moe_permute_fusion moe_router_fusion
    moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms
    moe_hybridep_num_sms moe_per_layer_logging moe_router_dtype moe_shared_expert_overlap
    moe_pad_expert_input_to_capacity moe_router_padding_for_fp8
    moe_router_padding_for_quantization create_moe_param_group
"""


def _has(given: Given) -> bool:
    """Whether a model has experts: Megatron-DeepSpeed takes a list, and 1 for none."""
    value = given.get("num_experts")
    several = set(value if isinstance(value, list) else [value])
    return len(several) == 1 and not several & {None, 1}


def _none(given: Given) -> str:
    return "" if _has(given) else "without --num-experts there are none"


def _experts(value: Any, given: Given) -> dict[str, Any]:
    """With what is Megatron-LM's default, and not that of the family."""
    norm = "rmsnorm" if given.get("normalization") == "RMSNorm" else "layernorm"
    if not _has(given):
        raise Refused("all blocks with experts have equally many: give one number")
    return {"model.family": "moe", "model.experts": value[0] if isinstance(value, list) else value,
            "model.norm": norm, "model.activation": "swiglu", "model.bias": False,
            "model.tie_embeddings": not given.get("untie_embeddings_and_output_weights")}


def gate(value: Any, given: Given) -> str:
    """megatron.core's activation_func, without a gate."""
    if _has(given):
        raise Refused("experts have a gate in threed, which --swiglu gives (model.activation=swiglu)")
    if str(value).rpartition(".")[2] != "gelu":
        raise Refused(f"threed has gelu and swiglu, and no {value}")
    return "gelu"


def biases(value: Any, given: Given) -> bool:
    """megatron.core's add_bias_linear."""
    if value and _has(given):
        raise Refused("experts have no biases here, as by --disable-bias-linear (model.bias=false)")
    return bool(value)


def _sum(text: str) -> Any:
    """What sums and products of whole numbers and lists come to; None where a text is none."""
    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(int(number)):
                return number
            case ast.List(parts):
                return [value(part) for part in parts]
            case ast.BinOp(left, ast.Add(), right):
                return value(left) + value(right)
            case ast.BinOp(left, ast.Mult(), right):
                pair = value(left), value(right)
                sizes = [each if isinstance(each, int) else len(each) for each in pair]
                return pair[0] * pair[1] if prod(sizes) <= _MOST else None
        raise TypeError

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError):
        return None


def _frequency(value: Any, given: Given) -> dict[str, Any]:
    """A number n: every n-th block, the first one, too. A list, which may be written as a sum of products of
    lists: 1 for a block with experts."""
    value = " ".join(map(str, value)) if isinstance(value, list) and "*" in value else _single(value, {})
    blocks = _sum(value) if isinstance(value, str) else value
    if isinstance(blocks, int) and blocks > 0:
        return {"model.moe_every": blocks}
    if not isinstance(blocks, list) or not all(each in (0, 1) for each in blocks):
        raise InputError(f"--moe-layer-freq {value}: must be a number, or a list of 0 and 1 for each block, "
                         "such as ([0]*1+[1]*3)")
    layers = given.get("num_layers")
    if isinstance(layers, int) and layers != len(blocks):
        raise InputError(f"--moe-layer-freq {value} is of {len(blocks)} blocks, and --num-layers is {layers}")
    places = [place for place, block in enumerate(blocks) if block]
    first, every = places[0] if places else 0, places[1] - places[0] if len(places) > 1 else len(blocks)
    if not places or places != list(range(first, len(blocks), every)):
        raise Refused(f"of {len(blocks)} blocks {', '.join(map(str, places)) or 'none'} would have experts; "
                      "here it is every model.moe_every-th from model.first_dense on")
    return {"model.moe_every": every, "model.first_dense": first}


def _score(value: Any, given: Given) -> dict[str, Any]:
    """(It does not normalize the one sigmoid of a token.)"""
    if value not in ("softmax", "sigmoid"):
        raise Refused(f"threed has no router's score like {value}")
    alone = value == "sigmoid" and given.get("moe_router_topk") == 1
    return {"model.router_score": value, **({"model.normalize_top_k": False} if alone else {})}


def _before_softmax(_: Any, given: Given) -> bool:
    if given.get("moe_router_score_function", "softmax") != "softmax":
        raise Dropped("it is about softmax")
    return False


def _single(value: Any, _: Given) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _balance(value: Any, given: Given) -> Any:
    kind = _single(value, given)
    if kind == "none":
        raise Dropped("there is none, then")
    if kind == "sinkhorn":
        raise Refused("threed has no routing by sinkhorn")
    coefficients = given.get("moe_aux_loss_coeff")
    if not any(coefficients if isinstance(coefficients, list) else [coefficients]):
        raise Dropped("without --moe-aux-loss-coeff it has no effect")
    if kind != "seq_aux_loss":
        raise Refused(f"{kind} is of micro-batches or of all ranks, so that its value depends on their size; "
                      "threed's is of each sequence: seq_aux_loss (model.balance=sequence)")
    if given.get("moe_router_enable_expert_bias"):
        raise Refused("threed has one of them: an auxiliary loss, or a bias")
    return "sequence"


def _weight(value: Any, given: Given) -> Any:
    """aux_loss is Megatron-LM's default."""
    if not any(value if isinstance(value, list) else [value]):
        raise Dropped("without a weight there is no auxiliary loss")
    kind = _single(given.get("moe_router_load_balancing_type", "aux_loss"), given)
    if kind != "seq_aux_loss":
        raise Refused(f"{kind} is not of each sequence, as threed's auxiliary loss is: seq_aux_loss (with "
                      "model.balance=sequence, it is model.balance_weight)")
    return _single(value, given)


def _capacity(value: Any, _: Given) -> Any:
    if value is None or value < 0:
        raise Dropped("no token is dropped")
    return value


def _drops(_: Any, given: Given) -> Any:
    _capacity(given.get("moe_expert_capacity_factor"), given)
    raise Refused("threed drops tokens by weight, not by position: moe_token_drop_policy=probs")


def _chosen(value: Any, _: Given) -> dict[str, Any]:
    """DeepSpeed normalizes the scores of several experts, and not that of one."""
    return {"model.experts_per_token": value, "model.normalize_top_k": value > 1}


def _interval(value: Any, _: Given) -> dict[str, Any]:
    """Blocks value - 1, 2 value - 1, ..."""
    return {"model.moe_every": value, "model.first_dense": value - 1}


def _of_a_rank(_: Any, given: Given) -> Any:
    if given.get("disable_moe_token_dropping"):
        raise Dropped("no token is dropped")
    raise Refused("DeepSpeed drops tokens of a rank's micro-batch; threed drops those of least weight in a "
                  "sequence (model.moe_capacity), or none, as with --disable-moe-token-dropping")


def _of_micro_batches(value: Any, _: Given) -> Any:
    if not value:
        raise Dropped("without a weight there is no auxiliary loss")
    raise Refused("it is of a rank's micro-batches; threed's auxiliary loss is of each sequence "
                  "(model.balance=sequence, with model.balance_weight)")


def _second(_: Any, given: Given) -> Any:
    if given.get("topk", 1) != 2:
        raise Dropped("it is about two experts a token")
    raise Refused("threed chooses the second expert by its score, without noise, as with "
                  "--disable-moe-top2-2nd-expert-sampling")


_CAPACITY = "threed's capacity is of each sequence (model.moe_capacity)"
OF_DEEPSPEED = (
    Key("moe_expert_parallel_size", "parallel.ep", None, _ONE),
    Key("enable_expert_tensor_parallelism", NOTHING + "threed does not cut an expert over tp"),
    Key("topk", "model.experts_per_token", _chosen),
    Key("expert_interval", "model.moe_every (with model.first_dense: the first block has no experts)",
        _interval),
    Key("mlp_type", NOTHING + "threed has no residual experts", None, ("standard",)),
    Key("moe_train_capacity_factor", NOTHING + _CAPACITY, _of_a_rank),
    Key("moe_eval_capacity_factor", NOTHING + _CAPACITY, _of_a_rank),
    Key("moe_min_capacity", NOTHING + _CAPACITY, _of_a_rank),
    Key("disable_moe_token_dropping", NO_KEY + "no token is dropped"),
    Key("moe_loss_coeff", NOTHING + "threed's auxiliary loss is of each sequence (model.balance=sequence)",
        _of_micro_batches),
    Key("moe_top2_2nd_expert_sampling", NOTHING + "experts are chosen without noise", _second),
    Key("disable_moe_top2_2nd_expert_sampling", NO_KEY + "experts are chosen without noise"),
)


def notes(given: Given) -> list[str]:
    """What Megatron-LM does by default with experts, and threed does not."""
    tp, size = given.get("tensor_model_parallel_size", 1), "expert_tensor_parallel_size"
    if not _has(given) or given.get("deepspeed") or size in given or tp == 1:
        return []
    return [f"an expert is whole on its rank here, and cut over tp={tp} there by default "
            f"(--{size.replace('_', '-')}): a larger parallel.ep, which takes ranks of tp, too, leaves less "
            "to each"]


def defaults_of_experts(given: Given) -> dict[str, Any]:
    """Values for the options of experts that are not given. Megatron-DeepSpeed has other defaults."""
    if not _has(given):
        return {}
    values: dict[str, Any] = {"activation_func": "gelu"} if not given.get("swiglu") else {}
    if not given.get("disable_bias_linear"):
        values["add_bias_linear"] = True
    if given.keys() & {"deepspeed", *(row.theirs for row in OF_DEEPSPEED)}:
        values |= {"topk": 1, "expert_interval": 2, "moe_loss_coeff": 0.1}
        if not given.get("disable_moe_token_dropping"):
            values["moe_train_capacity_factor"] = 1.0
        if not given.get("disable_moe_top2_2nd_expert_sampling"):
            values["moe_top2_2nd_expert_sampling"] = True
    return values


_ROWS = (
    *OF_DEEPSPEED,
    Key("num_experts", "model.experts (with model.family=moe)", _experts, _NONE),
    Key("expert_model_parallel_size", "parallel.ep", None, _ONE),
    Key("expert_tensor_parallel_size", NOTHING + "threed does not cut an expert over tp", None, _ONE),
    Key("moe_router_topk", "model.experts_per_token"),
    Key("moe_ffn_hidden_size", "model.expert_ffn_hidden"),
    Key("moe_layer_freq", "model.moe_every (a list that begins with 0: model.first_dense, too)", _frequency),
    Key("moe_shared_expert_intermediate_size", "model.shared_expert_ffn"),
    Key("moe_router_score_function", "model.router_score", _score),
    Key("moe_router_pre_softmax", "model.normalize_top_k=false", _before_softmax),
    Key("moe_router_topk_scaling_factor", "model.routed_scale"),
    Key("moe_router_num_groups", "model.expert_groups"),
    Key("moe_router_group_topk", "model.groups_per_token"),
    Key("moe_router_enable_expert_bias", "model.balance=bias"),
    Key("moe_router_bias_update_rate", "optimizer.balance_rate"),
    Key("moe_router_load_balancing_type", "model.balance (seq_aux_loss is sequence)", _balance),
    Key("moe_aux_loss_coeff", "model.balance_weight", _weight),
    Key("moe_z_loss_coeff", "model.z_loss"),
    Key("moe_router_force_load_balancing", "model.moe_route=balanced"),
    Key("moe_expert_capacity_factor",
        "model.moe_capacity (there of a rank's micro-batch, here of each sequence)", _capacity),
    Key("moe_token_drop_policy", "model.moe_capacity (by weight)", _drops, ("probs",)),
    Key("overlap_moe_expert_parallel_comm", "parallel.pair=true"),
    Key("overlap_dispatch_backward_with_experts_wgrad", NO_KEY + "parallel.pair does it, too"),
    Key("ep_overlap_early_attn_memory_release", NO_KEY + "parallel.pair orders by time alone"),
    Key("moe_layer_recompute", NO_KEY + "activation.policy says what is computed again"),
    *(Key(name, NO_KEY + "threed has one way to do it") for name in _WAYS.split()),
    Key("moe_*", NOTHING + "threed has no such setting of experts"),
)
KEYS = tuple(row if row.theirs == "num_experts" else where(_none, row) for row in _ROWS)

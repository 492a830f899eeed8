"""Keys of config.json of transformers, and what each is here. (`threed import` reads such a file, by
threed/interop/hf/names.py; a test compares the two.)"""

from __future__ import annotations

from typing import Any

from threed.config.keys.table import NOTHING, Framework, Given, Key

_MOE = "(with model.family=moe)"
_SEQUENCE = f"model.balance_weight (of model.balance=sequence, {_MOE[1:]}"

ROWS = (
    *(Key(name, f"model.{ours}") for ours, names in {
        "layers": "n_layer num_hidden_layers", "hidden": "n_embd hidden_size",
        "heads": "n_head num_attention_heads", "kv_heads": "num_key_value_heads",
        "ffn_hidden": "n_inner intermediate_size", "vocab": "vocab_size",
        "norm_eps": "layer_norm_epsilon layer_norm_eps rms_norm_eps", "init_std": "initializer_range",
        "dropout": "resid_pdrop embd_pdrop", "attention_dropout": "attn_pdrop",
        "tie_embeddings": "tie_word_embeddings", "seq_len": "n_positions max_position_embeddings",
    }.items() for name in names.split()),
    Key("hidden_act", "model.activation (silu is swiglu)"),
    Key("activation_function", "model.activation (gelu_new is gelu)"),
    Key("attention_bias", "model.qkv_bias"),
    Key("rope_parameters", "model.rope_theta (and model.rope_scaling, of Llama 3)"),
    *(Key(name, f"model.{ours} {_MOE}") for ours, names in {
        "experts": "num_local_experts n_routed_experts", "experts_per_token": "num_experts_per_tok",
        "expert_ffn_hidden": "moe_intermediate_size", "normalize_top_k": "norm_topk_prob",
        "routed_scale": "routed_scaling_factor", "first_dense": "first_k_dense_replace",
        "expert_groups": "n_group", "groups_per_token": "topk_group", "router_score": "scoring_func",
        "moe_every": "decoder_sparse_step",
    }.items() for name in names.split()),
    Key("n_shared_experts", "model.shared_expert_ffn (their number x model.expert_ffn_hidden)"),
    Key("shared_expert_intermediate_size", "model.shared_expert_ffn (without a gate)"),
    Key("mlp_only_layers",
        NOTHING + "threed has model.first_dense and model.moe_every, and no list of blocks"),
    Key("router_aux_loss_coef", _SEQUENCE),
    Key("aux_loss_alpha", _SEQUENCE),
    Key("seq_aux", f"model.balance=sequence {_MOE}"),
    Key("output_router_logits", f"model.balance=sequence {_MOE}"),
    Key("topk_method", f"model.balance=bias {_MOE}"),
    Key("router_jitter_noise", NOTHING + "threed adds no noise to the router's input"),
    Key("sliding_window", NOTHING + "attention sees the whole sequence"),
    *(Key(name, NOTHING + "threed has no latent attention") for name in ("kv_lora_rank", "q_lora_rank")),
)


def _nothing(_: Given) -> dict[str, Any]:
    return {}


TRANSFORMERS = Framework("transformers", ROWS, _nothing)

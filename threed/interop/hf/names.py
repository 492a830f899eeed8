"""The families of transformers that threed knows, one table each, which both directions read.

A row of `weights` names a parameter of ours, their tensors, and the view of ours that these are; `{i}`
stands for a block's number, `{x}` for that of an expert: such a row becomes one row an expert, which names
that expert's part of our parameter. A row of `keys` names a key of config.json and the key of ours. What
transformers takes where config.json does not have a key is in that row, or in `defaults` where families of
one table differ. To add a family is to add a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from threed.interop.hf.slices import (
    TensorPart,
    View,
    by_group,
    by_kind,
    gate_and_up,
    same,
    transposed,
    vocabulary,
)
from threed.models.layers.experts import ExpertsConfig
from threed.schema import ModelConfig

NEEDED = object()  # a key without a default


class TensorRow(NamedTuple):
    ours: str
    theirs: tuple[str, ...]
    view: View = same
    # Another name of the tensor in some files; of a row with {x}, the tensor that holds those of all experts,
    # one behind the other: what transformers 5 has in memory.
    also: str = ""
    expert: int | None = None  # whose part of our parameter it is; None: it is all of it

    def of(self, block: int, model: ModelConfig) -> Iterator[TensorRow]:
        """Its rows for a block."""
        def named(name: str, expert: int | None) -> str:
            return name.replace("{i}", str(block)).replace("{x}", str(expert))

        experts = model.experts if isinstance(model, ExpertsConfig) else 0
        for expert in range(experts) if "{x}" in self.theirs[0] else (None,):
            yield TensorRow(named(self.ours, None), tuple(named(name, expert) for name in self.theirs),
                            self.view, named(self.also, None), expert)

    def box(self, stored: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) of its part of our parameter, which has the shape `stored`."""
        if self.expert is None:
            return tuple(0 for _ in stored), stored
        return (self.expert, *(0 for _ in stored[1:])), (1, *stored[1:])

    def parts(self, values: torch.Tensor, model: ModelConfig) -> list[TensorPart]:
        """The tensors of transformers, in the order of `theirs`: each is a part of `values`, the content of
        this row's box."""
        return self.view(values if self.expert is None else values[0], model)

    def shapes(self, stored: tuple[int, ...], model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Name of each tensor of transformers -> its shape. `stored`: the shape of our parameter."""
        parts = self.parts(torch.empty(self.box(stored)[1], device="meta"), model)
        return {name: part.shape for name, part in zip(self.theirs, parts, strict=True)}

    def stack(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor `also`."""
        return stored if self.expert is None else (stored[0], math.prod(stored[1:-1]), stored[-1])

    def is_in(self, block: int, model: ModelConfig) -> bool:
        """Whether a block has it: those with experts have no MLP besides."""
        with_experts = isinstance(model, ExpertsConfig) and model.has_experts(block)
        part = self.ours.split(".")[2] if "{i}" in self.ours else ""
        return with_experts if part in ("experts", "router", "shared") else part != "mlp" or not with_experts


class HfKey(NamedTuple):
    theirs: str
    ours: str
    default: Any = NEEDED
    also: str = ""  # another name of it in some files


@dataclass(frozen=True)
class HFFamily:
    model_type: str
    architecture: str
    weights: tuple[TensorRow, ...]
    keys: tuple[HfKey, ...]
    fixed: Mapping[str, Any]  # keys of ours that every model of the family has alike
    # Keys of theirs -> the values that threed computes with, what transformers writes first. (A default of
    # transformers is among them.)
    only: Mapping[str, tuple[Any, ...]]
    prefix: str  # of all names but the head's; some files leave it out
    longest: str = "max_position_embeddings"  # their key of the longest sequence
    dropped: tuple[str, ...] = ()  # ends of names of tensors that are no weights
    # Keys that a config.json may leave out -> what transformers takes then.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: str = ""  # whose attention a sliding_window cuts: that of all "layers", or by "kinds" of them
    whole_heads: bool = False  # hidden must be a multiple of heads, whatever head_dim is
    other: tuple[str, ...] = ()  # keys that do not change what a model computes here
    shared: str = ""  # their key of how many experts, each as large as another, compute all tokens
    best_of_group: int = 0  # a group of experts is as good as the sum of so many; 0: there are no groups

    def completed(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A config.json as transformers reads it: keys by their first name, and defaults for those that are
        left out."""
        named = {key.also: key.theirs for key in self.keys if key.also}
        named |= {"max_position_embeddings": self.longest}
        known = {named[name]: value for name, value in config.items() if name in named}
        usual = {key.theirs: key.default for key in self.keys if key.default is not NEEDED}
        return {**usual, **self.defaults, **known, **config}

    def rows(self, model: ModelConfig) -> dict[str, list[TensorRow]]:
        """Parameters that a model of ours may have -> their rows: one, or one an expert."""
        found: dict[str, list[TensorRow]] = {}
        for row in self.weights:
            blocks = [block for block in range(model.layers) if row.is_in(block, model)]
            mine = [each for block in blocks for each in row.of(block, model)] if "{i}" in row.ours else [row]
            for each in mine:
                found.setdefault(each.ours, []).append(each)
        return found


# ---------------------------------------------------------------- GPT-2

_GPT2 = HFFamily(
    "gpt2", "GPT2LMHeadModel",
    (
        TensorRow("embedding.word.weight", ("transformer.wte.weight",), vocabulary),
        TensorRow("embedding.position.weight", ("transformer.wpe.weight",)),
        TensorRow("blocks.{i}.attention_norm.weight", ("transformer.h.{i}.ln_1.weight",)),
        TensorRow("blocks.{i}.attention_norm.bias", ("transformer.h.{i}.ln_1.bias",)),
        TensorRow("blocks.{i}.attention.qkv.weight", ("transformer.h.{i}.attn.c_attn.weight",), by_kind),
        TensorRow("blocks.{i}.attention.qkv.bias", ("transformer.h.{i}.attn.c_attn.bias",), by_kind),
        TensorRow("blocks.{i}.attention.out.weight", ("transformer.h.{i}.attn.c_proj.weight",), transposed),
        TensorRow("blocks.{i}.attention.out.bias", ("transformer.h.{i}.attn.c_proj.bias",)),
        TensorRow("blocks.{i}.mlp_norm.weight", ("transformer.h.{i}.ln_2.weight",)),
        TensorRow("blocks.{i}.mlp_norm.bias", ("transformer.h.{i}.ln_2.bias",)),
        TensorRow("blocks.{i}.mlp.up.weight", ("transformer.h.{i}.mlp.c_fc.weight",), transposed),
        TensorRow("blocks.{i}.mlp.up.bias", ("transformer.h.{i}.mlp.c_fc.bias",)),
        TensorRow("blocks.{i}.mlp.down.weight", ("transformer.h.{i}.mlp.c_proj.weight",), transposed),
        TensorRow("blocks.{i}.mlp.down.bias", ("transformer.h.{i}.mlp.c_proj.bias",)),
        TensorRow("head.norm.weight", ("transformer.ln_f.weight",)),
        TensorRow("head.norm.bias", ("transformer.ln_f.bias",)),
        TensorRow("head.output.weight", ("lm_head.weight",), vocabulary),
    ),
    (
        HfKey("n_layer", "layers", 12, "num_hidden_layers"), HfKey("n_embd", "hidden", 768, "hidden_size"),
        HfKey("n_head", "heads", 12, "num_attention_heads"),
        HfKey("n_inner", "ffn_hidden", None), HfKey("vocab_size", "vocab", 50257),
        HfKey("layer_norm_epsilon", "norm_eps", 1e-5), HfKey("initializer_range", "init_std", 0.02),
        HfKey("resid_pdrop", "dropout", 0.1), HfKey("attn_pdrop", "attention_dropout", 0.1),
        HfKey("tie_word_embeddings", "tie_embeddings", True),
    ),
    {"family": "gpt", "position": "learned", "norm": "layernorm", "activation": "gelu", "bias": True,
     "qkv_bias": None, "qk_norm": False, "kv_heads": None, "head_dim": None, "rope_scaling": None},
    {"activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "scale_attn_weights": (True,),
     "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    "transformer.", "n_positions", (".attn.bias", ".attn.masked_bias"),
    defaults={"n_positions": 1024, "embd_pdrop": 0.1}, other=("n_ctx", "reorder_and_upcast_attn"),
)

# ---------------------------------------------------------------- Llama and what is built like it

_LLAMA_WEIGHTS = (
    TensorRow("embedding.word.weight", ("model.embed_tokens.weight",), vocabulary),
    TensorRow("blocks.{i}.attention_norm.weight", ("model.layers.{i}.input_layernorm.weight",)),
    TensorRow("blocks.{i}.attention.qkv.weight", ("model.layers.{i}.self_attn.q_proj.weight",
                                                  "model.layers.{i}.self_attn.k_proj.weight",
                                                  "model.layers.{i}.self_attn.v_proj.weight"), by_group),
    TensorRow("blocks.{i}.attention.out.weight", ("model.layers.{i}.self_attn.o_proj.weight",)),
    TensorRow("blocks.{i}.mlp_norm.weight", ("model.layers.{i}.post_attention_layernorm.weight",)),
    TensorRow("blocks.{i}.mlp.up.weight", ("model.layers.{i}.mlp.gate_proj.weight",
                                           "model.layers.{i}.mlp.up_proj.weight"), gate_and_up),
    TensorRow("blocks.{i}.mlp.down.weight", ("model.layers.{i}.mlp.down_proj.weight",)),
    TensorRow("head.norm.weight", ("model.norm.weight",)),
    TensorRow("head.output.weight", ("lm_head.weight",), vocabulary),
)
_LLAMA_KEYS = (
    HfKey("num_hidden_layers", "layers"), HfKey("hidden_size", "hidden"),
    HfKey("num_attention_heads", "heads"), HfKey("num_key_value_heads", "kv_heads", None),
    HfKey("intermediate_size", "ffn_hidden"), HfKey("vocab_size", "vocab"),
    HfKey("rms_norm_eps", "norm_eps", 1e-6),
    HfKey("initializer_range", "init_std", 0.02), HfKey("attention_dropout", "attention_dropout", 0.0),
    HfKey("tie_word_embeddings", "tie_embeddings", False),
)
_LLAMA_FIXED = {"family": "llama", "position": "rotary", "norm": "rmsnorm", "activation": "swiglu",
                "bias": False, "qkv_bias": None, "qk_norm": False, "dropout": 0.0}
_LLAMA_ONLY = {"hidden_act": ("silu", "swish")}
_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_ROTARY = {"rope_theta": 1e4}
_QWEN = {**_ROTARY, "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096,
         "use_sliding_window": False, "max_window_layers": 28}

_LLAMA = HFFamily("llama", "LlamaForCausalLM", _LLAMA_WEIGHTS, _LLAMA_KEYS, _LLAMA_FIXED,
                  {**_LLAMA_ONLY, "attention_bias": (False,), "mlp_bias": (False,)}, "model.",
                  dropped=(".rotary_emb.inv_freq",), defaults={**_ROTARY, "max_position_embeddings": 2048},
                  whole_heads=True, other=("pretraining_tp",))
_MISTRAL = HFFamily("mistral", "MistralForCausalLM", _LLAMA_WEIGHTS, _LLAMA_KEYS, _LLAMA_FIXED, _LLAMA_ONLY,
                    "model.", defaults={**_ROTARY, "num_key_value_heads": 8, "sliding_window": 4096,
                                        "max_position_embeddings": 131072},
                    windows="layers", other=_WINDOWS)
_QWEN2 = HFFamily(
    "qwen2", "Qwen2ForCausalLM",
    (*_LLAMA_WEIGHTS,
     TensorRow("blocks.{i}.attention.qkv.bias", ("model.layers.{i}.self_attn.q_proj.bias",
                                                 "model.layers.{i}.self_attn.k_proj.bias",
                                                 "model.layers.{i}.self_attn.v_proj.bias"), by_group)),
    _LLAMA_KEYS, {**_LLAMA_FIXED, "qkv_bias": True}, _LLAMA_ONLY, "model.", defaults=_QWEN, windows="kinds",
    other=_WINDOWS)
_QWEN3 = HFFamily(
    "qwen3", "Qwen3ForCausalLM",
    (*_LLAMA_WEIGHTS,
     TensorRow("blocks.{i}.attention.q_norm.weight", ("model.layers.{i}.self_attn.q_norm.weight",)),
     TensorRow("blocks.{i}.attention.k_norm.weight", ("model.layers.{i}.self_attn.k_norm.weight",))),
    _LLAMA_KEYS, {**_LLAMA_FIXED, "qk_norm": True}, {**_LLAMA_ONLY, "attention_bias": (False,)}, "model.",
    defaults={**_QWEN, "head_dim": 128}, windows="kinds", other=_WINDOWS)

# ---------------------------------------------------------------- mixtures of experts


def _of_experts(block: str, gate: str, up: str, down: str) -> tuple[TensorRow, ...]:
    """`block`: what has the router and the experts in files with a tensor an expert."""
    layer, also = f"model.layers.{{i}}.{block}.", "model.layers.{i}.mlp."
    expert = f"{layer}experts.{{x}}."
    return (TensorRow("blocks.{i}.router.weight", (f"{layer}gate.weight",), same, f"{also}gate.weight"),
            TensorRow("blocks.{i}.experts.up", (f"{expert}{gate}.weight", f"{expert}{up}.weight"),
                      gate_and_up, f"{also}experts.gate_up_proj"),
            TensorRow("blocks.{i}.experts.down", (f"{expert}{down}.weight",), same,
                      f"{also}experts.down_proj"))


_QWEN3_NORMS = _QWEN3.weights[len(_LLAMA_WEIGHTS):]
_EXPERTS_FIXED = {**_LLAMA_FIXED, "family": "moe", "router_score": "softmax", "normalize_top_k": True,
                  "routed_scale": 1.0, "expert_groups": 1, "groups_per_token": 1, "shared_expert_ffn": 0,
                  "first_dense": 0, "moe_every": 1, "balance": "none"}
_AUXILIARY = {"output_router_logits": False, "router_aux_loss_coef": 0.001}
_QWEN3_NAMES = _of_experts("mlp", "gate_proj", "up_proj", "down_proj")

_MIXTRAL = HFFamily(
    "mixtral", "MixtralForCausalLM",
    (*_LLAMA_WEIGHTS, *_of_experts("block_sparse_moe", "w1", "w3", "w2")),
    (*_LLAMA_KEYS, HfKey("num_local_experts", "experts", 8),
     HfKey("num_experts_per_tok", "experts_per_token", 2)),
    _EXPERTS_FIXED, _LLAMA_ONLY, "model.",
    defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8,
              "max_position_embeddings": 131072, **_AUXILIARY},
    windows="layers", other=_WINDOWS)
_QWEN3_MOE = HFFamily(
    "qwen3_moe", "Qwen3MoeForCausalLM", (*_LLAMA_WEIGHTS, *_QWEN3_NORMS, *_QWEN3_NAMES),
    (*_LLAMA_KEYS, HfKey("num_experts", "experts", 128, "num_local_experts"),
     HfKey("num_experts_per_tok", "experts_per_token", 8),
     HfKey("moe_intermediate_size", "expert_ffn_hidden", 768),
     HfKey("norm_topk_prob", "normalize_top_k", False)),
    {**_EXPERTS_FIXED, "qk_norm": True},
    {**_LLAMA_ONLY, "attention_bias": (False,), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    "model.", defaults={**_QWEN, "num_key_value_heads": 4, **_AUXILIARY}, windows="layers", other=_WINDOWS)
_DOTS1 = HFFamily(
    "dots1", "Dots1ForCausalLM",
    (*_LLAMA_WEIGHTS, *_QWEN3_NORMS, *_QWEN3_NAMES,
     TensorRow("blocks.{i}.router.bias", ("model.layers.{i}.mlp.gate.e_score_correction_bias",)),
     TensorRow("blocks.{i}.shared.up.weight", ("model.layers.{i}.mlp.shared_experts.gate_proj.weight",
                                               "model.layers.{i}.mlp.shared_experts.up_proj.weight"),
               gate_and_up),
     TensorRow("blocks.{i}.shared.down.weight", ("model.layers.{i}.mlp.shared_experts.down_proj.weight",))),
    (*_LLAMA_KEYS, HfKey("n_routed_experts", "experts", NEEDED, "num_local_experts"),
     HfKey("num_experts_per_tok", "experts_per_token"),
     HfKey("moe_intermediate_size", "expert_ffn_hidden"), HfKey("norm_topk_prob", "normalize_top_k", False),
     HfKey("routed_scaling_factor", "routed_scale", 1.0), HfKey("first_k_dense_replace", "first_dense", 0),
     HfKey("n_group", "expert_groups", 1), HfKey("topk_group", "groups_per_token", 1)),
    {**_EXPERTS_FIXED, "qk_norm": True, "router_score": "sigmoid", "balance": "bias"},
    {**_LLAMA_ONLY, "attention_bias": (False,)}, "model.",
    defaults={**_ROTARY, "num_key_value_heads": 32, "max_position_embeddings": 2048, "sliding_window": 4096,
              "max_window_layers": 62},
    windows="kinds",
    other=(*_WINDOWS, "moe_layer_freq", "scoring_func", "topk_method", "output_router_logits"),
    shared="n_shared_experts", best_of_group=2)

# The first that can hold a model is what a run is exported as.
FAMILIES = {each.model_type: each for each in (_GPT2, _LLAMA, _MISTRAL, _QWEN2, _QWEN3, _MIXTRAL, _QWEN3_MOE,
                                               _DOTS1)}

"""Llama: GPT's layers with rotary positions, RMS norms, gated MLPs, no biases and an output projection of its
own."""

from __future__ import annotations

from dataclasses import dataclass

from threed.models.families.base import Family
from threed.models.families.gpt import layers
from threed.schema import ModelConfig


@dataclass
class LlamaConfig(ModelConfig):
    family: str = "llama"
    norm: str = "rmsnorm"
    activation: str = "swiglu"
    bias: bool = False
    tie_embeddings: bool = False


# Touvron et al. 2023; Dubey et al. 2024
SIZES = {
    "llama2-7b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn_hidden": 11008,
                  "seq_len": 4096, "vocab": 32000, "rope_theta": 1e4},
    "llama3-8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336,
                  "seq_len": 8192, "vocab": 128256, "rope_theta": 5e5},
    "llama3-70b": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn_hidden": 28672,
                   "seq_len": 8192, "vocab": 128256, "rope_theta": 5e5},
}
LLAMA = Family(layers, LlamaConfig, SIZES)

"""Llama: GPT's layers with rotary positions, RMS norms, gated MLPs, no biases and an output projection of its
own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


def _llama(layers: int, hidden: int, heads: int, ffn_hidden: int, scaled: float | None = None,
           tied: bool = False) -> dict[str, Any]:
    """Llama 3. `scaled`: the factor by which rotary frequencies are scaled, for sequences of up to 131072."""
    scaling = {"rope_scaling": [scaled, 1.0, 4.0, 8192.0]} if scaled is not None else {}
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8, "ffn_hidden": ffn_hidden,
            "seq_len": 8192, "vocab": 128256, "rope_theta": 5e5, "tie_embeddings": tied, **scaling}


def _qwen2(layers: int, hidden: int, heads: int, kv_heads: int, ffn_hidden: int,
           small: bool = False) -> dict[str, Any]:
    """Qwen 2.5, its base models. `small`: embeddings are tied; 0.5b to 7b have another epsilon."""
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads,
            "ffn_hidden": ffn_hidden, "seq_len": 4096, "vocab": 151936 if small else 152064,
            "rope_theta": 1e6, "norm_eps": 1e-6 if hidden < 5120 else 1e-5, "qkv_bias": True,
            "tie_embeddings": small}


def _qwen3(layers: int, hidden: int, heads: int, ffn_hidden: int, tied: bool = False) -> dict[str, Any]:
    """Qwen 3, dense: heads of 128 numbers, whose queries and keys have norms."""
    return {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8, "head_dim": 128,
            "ffn_hidden": ffn_hidden, "seq_len": 4096, "vocab": 151936, "rope_theta": 1e6, "norm_eps": 1e-6,
            "qk_norm": True, "tie_embeddings": tied}


# As in the config.json of the published base models. `seq_len` is that of most of their pretraining; they
# have longer ones since.
SIZES: dict[str, dict[str, Any]] = {
    # Touvron et al. 2023
    "llama2-7b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn_hidden": 11008,
                  "seq_len": 4096, "vocab": 32000, "rope_theta": 1e4},
    # Dubey et al. 2024
    "llama3-8b": _llama(32, 4096, 32, 14336),
    "llama3-70b": _llama(80, 8192, 64, 28672),
    "llama3.1-8b": _llama(32, 4096, 32, 14336, 8.0),
    "llama3.1-70b": _llama(80, 8192, 64, 28672, 8.0),
    "llama3.1-405b": _llama(126, 16384, 128, 53248, 8.0),
    "llama3.2-1b": _llama(16, 2048, 32, 8192, 32.0, tied=True),
    "llama3.2-3b": _llama(28, 3072, 24, 8192, 32.0, tied=True),
    # Qwen team 2024
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, small=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, small=True),
    "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11008, small=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13824),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29568),
    # Yang et al. 2025
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    # Jiang et al. 2023; v0.3 sees the whole sequence. (v0.1 has a sliding window, which threed has not.)
    "mistral-7b-v0.3": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336,
                        "seq_len": 8192, "vocab": 32768, "rope_theta": 1e6},
}
LLAMA = Family(layers, LlamaConfig, SIZES)

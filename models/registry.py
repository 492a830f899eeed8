"""Sizes by name: `model.name` in a config picks one, and any field given beside it wins. Plain values, no torch."""

from __future__ import annotations

from typing import Any


def _gpt(layers: int, hidden: int, heads: int, seq_len: int, vocab: int = 50257) -> dict[str, Any]:
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "seq_len": seq_len, "vocab": vocab, "position": "learned",
        "norm": "layernorm", "activation": "gelu", "bias": True, "tie_embeddings": True,
    }


def _llama(**sizes: Any) -> dict[str, Any]:
    return {**sizes, "position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False,
            "tie_embeddings": False}


SIZES: dict[str, dict[str, Any]] = {
    # Radford et al. 2019
    "gpt2-small": _gpt(12, 768, 12, 1024),
    "gpt2-medium": _gpt(24, 1024, 16, 1024),
    "gpt2-large": _gpt(36, 1280, 20, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 1024),
    # Brown et al. 2020, table 2.1. Its XL has 24 heads, which do not divide 2048, and its 13B a hidden size of 5140,
    # which 40 heads do not: 16 and 5120 are what everyone builds.
    "gpt3-small": _gpt(12, 768, 12, 2048),
    "gpt3-medium": _gpt(24, 1024, 16, 2048),
    "gpt3-large": _gpt(24, 1536, 16, 2048),
    "gpt3-xl": _gpt(24, 2048, 16, 2048),
    "gpt3-2.7b": _gpt(32, 2560, 32, 2048),
    "gpt3-6.7b": _gpt(32, 4096, 32, 2048),
    "gpt3-13b": _gpt(40, 5120, 40, 2048),
    "gpt3-175b": _gpt(96, 12288, 96, 2048),
    # Narayanan et al. 2021, table 1
    "megatron-1t": _gpt(128, 25600, 160, 2048, 51200),
    # Touvron et al. 2023; Dubey et al. 2024
    "llama2-7b": _llama(layers=32, hidden=4096, heads=32, kv_heads=32, ffn_hidden=11008,
                        seq_len=4096, vocab=32000, rope_theta=1e4),
    "llama3-8b": _llama(layers=32, hidden=4096, heads=32, kv_heads=8, ffn_hidden=14336,
                        seq_len=8192, vocab=128256, rope_theta=5e5),
    "llama3-70b": _llama(layers=80, hidden=8192, heads=64, kv_heads=8, ffn_hidden=28672,
                         seq_len=8192, vocab=128256, rope_theta=5e5),
}

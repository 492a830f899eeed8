"""Lacks: what models of transformers have and threed does not, so that it is refused by its name: by keys of
config.json, by kinds of models that always have it, and by names of tensors. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_OFF = (None, False, 0)


class Lack(NamedTuple):
    what: str
    keys: Mapping[str, tuple[Any, ...]]  # of config.json -> values, besides _OFF, that do not ask for it
    kinds: tuple[str, ...] = ()  # model types that have it, and no key for it
    tensors: str = r"(?!)"  # a pattern in the names of its tensors

    def asked(self, config: Mapping[str, Any]) -> str | None:
        """How a config.json asks for it: a key and its value, or "" for the kind of model; None: it does
        not."""
        for key, allowed in self.keys.items():
            if (value := config.get(key)) not in (*_OFF, *allowed):
                return f"{key}={value}"
        return "" if config.get("model_type") in self.kinds else None


LACKS = (
    Lack("latent attention (MLA)", {"kv_lora_rank": (), "q_lora_rank": ()}, (), r"\.(kv|q)_[ab]_proj"),
    Lack("attention sinks", {}, ("gpt_oss", "mimo_v2_flash", "deepseek_v4", "granite_swa", "granitemoe_swa"),
         r"\.sinks$"),
    Lack("gate of the shared expert", {"shared_expert_intermediate_size": ()}, (),
         r"\.shared_expert(_gate)?\."),
    Lack("norms of queries and keys over all heads", {"qk_norm_type": ("per_head",)},
         ("olmo2", "olmo3", "olmoe", "flex_olmo", "minimax_m2")),
    Lack("clamped SwiGLU", {"swiglu_limit": ()}),
    Lack("biases of MLPs alone", {"mlp_bias": ()}),
    Lack("biases of experts", {"expert_bias": ()}, ("gpt_oss",), r"\.experts\..*bias$"),
)
KEYS = frozenset(key for lack in LACKS for key in lack.keys)


def asked(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, how it is asked for) of all that a config.json asks for and threed does not have."""
    return [(lack.what, how) for lack in LACKS if (how := lack.asked(config)) is not None]


def of_tensor(name: str) -> str:
    """Words that say what a tensor of this name belongs to; "" where to nothing here."""
    return next((f", which has no {lack.what}" for lack in LACKS if re.search(lack.tensors, name)), "")

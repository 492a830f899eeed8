"""Kinds of slots, as a page names them."""

from __future__ import annotations

from threed.program.table import Table

_SLOTS = {"act": "output", "grad": "gradient of the output", "saved": "saved for the backward",
          "kept": "input, kept for recomputation", "kpart": "part of the kept input",
          "actpart": "part of the output", "gradpart": "part of the output's gradient",
          "operands": "operands of weight gradients", "logits": "logits of the last token"}
_EXPERTS = {"picks": "choices of experts", "counts": "numbers of tokens for experts",
            "arriving": "numbers of tokens to come", "routed": "tokens sent to experts",
            "arrived": "tokens at their experts", "answers": "answers of experts",
            "returned": "answers back at their tokens"}


def kind_name(kind: str, table: Table) -> str:
    """What people call a kind of slots that holds activations or their gradients."""
    tensor = table.handed.get(kind)
    if tensor is None:
        return _SLOTS[kind]
    name = _EXPERTS.get(tensor, f"'{tensor}', handed on")
    return name if kind == tensor else f"gradient of {name}"

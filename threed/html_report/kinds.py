"""Kinds of slots, as a page names them."""

from __future__ import annotations

from threed.program.table import Table

_SLOTS = {"act": "outputs", "grad": "gradients of outputs", "saved": "saved for backward",
          "kept": "inputs kept for recomputation", "kpart": "parts of kept inputs",
          "actpart": "parts of outputs", "gradpart": "parts of gradients of outputs",
          "operands": "operands of weight gradients", "logits": "logits"}
_EXPERTS = {"picks": "choices of experts", "counts": "counts of rows to send",
            "arriving": "counts of rows to come", "routed": "rows to experts", "arrived": "rows at experts",
            "answers": "answers of experts", "returned": "answers returned"}


def kind_name(kind: str, table: Table) -> str:
    """What people call a kind of slots that holds activations or their gradients."""
    tensor = table.handed.get(kind)
    if tensor is None:
        return _SLOTS[kind]
    name = _EXPERTS.get(tensor, f"'{tensor}', handed on")
    return name if kind == tensor else f"gradients of {name}"

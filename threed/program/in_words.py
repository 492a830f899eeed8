"""What people call the slots and parameter units of a plan: for explanations, tables and figures.
(`instruction` says what each kind of slot is.)"""

from __future__ import annotations

from threed.program.entries import ParameterUnit
from threed.program.table import Table

_SLOTS = {
    "act": "output", "grad": "gradient of the output", "saved": "saved for the backward",
    "kept": "input, kept for recomputation", "kpart": "part of the kept input",
    "actpart": "part of the output", "gradpart": "part of the output's gradient",
    "operands": "operands of weight gradients", "logits": "logits of the last token",
    "param": "parameters, whole", "pshard": "shard of the parameters", "state": "optimizer state",
    "wgrad": "gradient, of this rank's samples", "wsum": "gradient, summed over tp",
    "gpart": "gradient, summed over a shard group", "gfull": "gradient, summed over all shard groups",
    "gshard": "shard of the gradient", "gprev": "gradient of the step before",
    "snapshot": "copy for the next checkpoint", "loss": "sum of losses", "scale": "factor of gradients"}
# Tensors that the layers of experts hand on (models/layers/experts.py); others have their own name.
_HANDED = {
    "picks": "choices of experts", "counts": "numbers of tokens for experts",
    "arriving": "numbers of tokens to come", "routed": "tokens sent to experts",
    "arrived": "tokens at their experts", "answers": "answers of experts",
    "returned": "answers back at their tokens"}
_KINDS = {"small": "small ones", "adapters": "adapters", "counted": "biases of the choice of experts"}


def slot_words(kind: str, table: Table) -> str:
    """What a kind of slot holds."""
    tensor = table.handed.get(kind)
    if tensor is None:
        return _SLOTS[kind]
    name = _HANDED.get(tensor, f"'{tensor}', handed on")
    return name if kind == tensor else f"gradient of {name}"


def unit_words(unit: ParameterUnit) -> str:
    """The name of a parameter unit: of its compute unit, and what of it, where that is not all."""
    part = f"cut over {unit.fold}" if unit.fold else _KINDS.get(unit.kind)
    return unit.name if part is None else f"{unit.name.removesuffix(f', {unit.kind}')}: {part}"

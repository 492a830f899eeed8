"""What people call the slots and parameter units of a plan: for explanations, tables and figures.
(`instruction` says what each kind of slot is.)"""

from __future__ import annotations

from threed.program.entries import ParameterUnit
from threed.program.instruction import SlotKind
from threed.program.table import Table

_SLOTS: dict[str, str] = {
    SlotKind.ACT: "output", SlotKind.GRAD: "gradient of the output",
    SlotKind.SAVED: "saved for the backward", SlotKind.KEPT: "input, kept for recomputation",
    SlotKind.KEPT_PART: "part of the kept input", SlotKind.ACT_PART: "part of the output",
    SlotKind.GRAD_PART: "part of the output's gradient", SlotKind.OPERANDS: "operands of weight gradients",
    SlotKind.LOGITS: "logits of the last token", SlotKind.PARAM: "parameters, whole",
    SlotKind.PARAM_SHARD: "shard of the parameters", SlotKind.STATE: "optimizer state",
    SlotKind.WEIGHT_GRAD: "gradient, of this rank's samples", SlotKind.TP_SUM: "gradient, summed over tp",
    SlotKind.SHARD_SUM: "gradient, summed over a shard group",
    SlotKind.REPLICA_SUM: "gradient, summed over all shard groups",
    SlotKind.GRAD_SHARD: "shard of the gradient", SlotKind.PREVIOUS_GRAD: "gradient of the step before",
    SlotKind.SNAPSHOT: "copy for the next checkpoint",
    SlotKind.UPDATE: "shard of what is to be turned", SlotKind.MATRIX: "matrices to turn, of their owner",
    SlotKind.TURNED: "turned matrices, of their owner", SlotKind.DIRECTION: "direction of the step",
    SlotKind.LOSS: "sum of losses",
    SlotKind.SCALE: "factor of gradients"}
# Tensors that the layers of experts hand on (models/layers/experts.py); others have their own name.
_HANDED = {
    "picks": "choices of experts", "counts": "numbers of tokens for experts",
    "arriving": "numbers of tokens to come", "routed": "tokens sent to experts",
    "arrived": "tokens at their experts", "answers": "answers of experts",
    "returned": "answers back at their tokens",
    # and those of attention as two units (models/layers/overlapped.py)
    "queries": "queries", "kv": "keys and values", "allkv": "keys and values of all ranks of cp"}
_KINDS = {"small": "small ones", "adapters": "adapters", "counted": "biases of the choice of experts",
          "plain": "what AdamW steps", "plain_small": "small ones that AdamW steps",
          "plain_folded": "what AdamW steps of experts"}


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

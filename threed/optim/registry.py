"""Optimizers by their `optimizer.name`. A new one is a file in this folder and a line below."""

from __future__ import annotations

from threed.optim.adamw import AdamW
from threed.optim.balance import Balance
from threed.optim.base import Optimizer
from threed.optim.lion import Lion
from threed.optim.sgd import SGD

OPTIMIZERS: dict[str, Optimizer] = {"adamw": AdamW(), "lion": Lion(), "sgd": SGD()}
# Rules for parameters whose gradient is no gradient: kinds of parameter units name them, and configs do not.
RULES: dict[str, Optimizer] = {"balance": Balance()}


def optimizer_called(name: str) -> Optimizer:
    """The optimizer with this name, from RULES or OPTIMIZERS."""
    return RULES[name] if name in RULES else OPTIMIZERS[name]

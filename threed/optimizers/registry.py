"""Optimizers by their `optimizer.name`. A new one is a file in this folder and a line below."""

from __future__ import annotations

from threed.optimizers.adamw import AdamW
from threed.optimizers.base import Optimizer
from threed.optimizers.lion import Lion
from threed.optimizers.sgd import SGD

OPTIMIZERS: dict[str, Optimizer] = {"adamw": AdamW(), "lion": Lion(), "sgd": SGD()}

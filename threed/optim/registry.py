"""Optimizers by their `optimizer.name`. A new one is a file in this folder and a line below."""

from __future__ import annotations

from threed.optim.adamw import AdamW
from threed.optim.base import Optimizer
from threed.optim.lion import Lion
from threed.optim.sgd import SGD

OPTIMIZERS: dict[str, Optimizer] = {"adamw": AdamW(), "lion": Lion(), "sgd": SGD()}

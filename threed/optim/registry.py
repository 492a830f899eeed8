"""Optimizers by their `optimizer.name`. A new one is a file in this folder and a line below."""

from __future__ import annotations

from threed.optim.adamw import AdamW
from threed.optim.balance import Balance
from threed.optim.base import AnyOptimizer, MatrixOptimizer, Optimizer
from threed.optim.lion import Lion
from threed.optim.muon import Muon
from threed.optim.polar import Polar
from threed.optim.sgd import SGD

OPTIMIZERS: dict[str, AnyOptimizer] = {"adamw": AdamW(), "lion": Lion(), "sgd": SGD(), "muon": Muon(),
                                       "polar": Polar()}
BESIDE = "adamw"  # what steps the parameters that are in no matrix, where a config asks for one of matrices
# Rules for parameters whose gradient is no gradient: kinds of parameter units name them, and configs do not.
RULES: dict[str, Optimizer] = {"balance": Balance()}


def any_called(name: str) -> AnyOptimizer:
    """The optimizer with this name, from RULES or OPTIMIZERS."""
    return RULES[name] if name in RULES else OPTIMIZERS[name]


def optimizer_called(name: str) -> Optimizer:
    """The elementwise optimizer with this name."""
    found = any_called(name)
    assert isinstance(found, Optimizer), name
    return found


def elementwise(name: str) -> str:
    """The name of what steps parameters that are in no matrix, by that of a config."""
    return BESIDE if turning(name) is not None else name


def kept_by(name: str) -> tuple[str, ...]:
    """The names of all that an optimizer keeps, with what it keeps of parameters that are in no matrix."""
    found = (*any_called(name).buffers, *any_called(elementwise(name)).buffers)
    return tuple(dict.fromkeys(buffer.name for buffer in found))


def turning(name: str) -> MatrixOptimizer | None:
    """The optimizer with this name if it is one of matrices."""
    found = any_called(name)
    return found if isinstance(found, MatrixOptimizer) else None

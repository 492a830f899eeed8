"""Transitions between the states of a unit's tensors.

Each is one method of `weights.Weights`, `gradient.Gradient` or `optimizer_state.OptimizerState`, and a table
at the top of that file: the states where it begins, and the state in which it leaves the tensors. The tables
say of tensors what `program/effects` says of slots: a program that `check` accepts meets no TransitionError.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)


class TransitionError(Exception):
    """An internal error: tensors are not where a transition begins."""


class Transition(Generic[S]):
    def __init__(self, name: str, ends: Mapping[S, S]):
        """`ends`: state where it begins -> state where it ends."""
        self.name, self.ends = name, ends

    def __call__(self, state: S, what: str) -> S:
        """The state afterwards. TransitionError where it does not begin in `state`. `what`: whose state it
        is, such as "weights of p3 (blocks.2)"."""
        if state not in self.ends:
            begins = " or ".join(begin.name for begin in self.ends) or "no state of these"
            raise TransitionError(f"{self.name} of the {what} begins in {begins}, and the state is "
                                  f"{state.name} ({state.value})")
        return self.ends[state]

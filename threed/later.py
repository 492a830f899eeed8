"""torch, imported when it is first used: a file may say what planning must know, and hold what computes
beside it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    import torch.nn.functional as F
else:

    class _Later:
        """A module that is imported by the first look at what is in it."""

        def __init__(self, name: str):
            self._name = name

        def __getattr__(self, item: str) -> Any:
            return getattr(importlib.import_module(self._name), item)

    torch, F = _Later("torch"), _Later("torch.nn.functional")

__all__ = ["F", "torch"]

"""torch, imported when it is first used: so one file can hold what planning must know, without torch, and the
computation beside it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    import torch.nn.functional as F
else:

    class _Later:
        """A module that is imported when its first attribute is used."""

        def __init__(self, name: str):
            self._name = name

        def __getattr__(self, item: str) -> Any:
            return getattr(importlib.import_module(self._name), item)

    torch, F = _Later("torch"), _Later("torch.nn.functional")

__all__ = ["F", "torch"]

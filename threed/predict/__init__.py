"""Predict: how long a step takes, what it keeps and what it sends, by walking the plan with a clock.

This package is also the verb `threed.predict`: importing one of its modules puts the package under that name.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Verb(ModuleType):
    """A package that can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        from threed.predict.verb import predict

        return predict(*args, **kwargs)


sys.modules[__name__].__class__ = _Verb

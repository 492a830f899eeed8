"""AdamW over flat host memory in one pass: native.c, which is compiled when threed is installed, if there is a C compiler."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from typing import Any

VERSION = 1  # of native.c's arguments and arithmetic: a rank with an older one would drift from the others
KINDS = {"": 0, "float32": 1, "bfloat16": 2, "float16": 3}  # enum kind


class Numbers(ctypes.Structure):
    """`struct numbers`."""

    _fields_ = [(name, ctypes.c_float) for name in ("scale", "beta1", "rest1", "beta2", "rest2", "keep", "size", "root", "eps")]


class Range(ctypes.Structure):
    """`struct range`: addresses of the elements, and the kinds of the last two."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("weight", "exp_avg", "exp_avg_sq", "grad", "copy")),
                ("grad_kind", ctypes.c_int), ("copy_kind", ctypes.c_int)]


def _load() -> tuple[Callable[..., Any] | None, str]:
    """The function, or None and why there is none."""
    spec = importlib.util.find_spec("threed._native")
    if spec is None or spec.origin is None:
        return None, "threed was installed where there was no C compiler with OpenMP"
    try:
        library = ctypes.CDLL(spec.origin)
        if library.threed_version() != VERSION:
            return None, f"{spec.origin} is of another version of threed"
        function = library.threed_adamw
    except (OSError, AttributeError) as error:
        return None, str(error)
    function.argtypes = [ctypes.POINTER(Range), ctypes.c_int64, ctypes.c_int, ctypes.POINTER(Numbers)]
    function.restype = None
    return function, ""


ADAMW, MISSING = _load()

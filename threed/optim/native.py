"""Two loops over host memory, AdamW and a checksum, from native.c, which is compiled when threed is installed
if the machine has a C compiler."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from typing import Any

VERSION = 2  # of native.c's arguments and arithmetic: a rank with an older one would drift from the others
KINDS = {"": 0, "float32": 1, "bfloat16": 2, "float16": 3}  # enum kind


class Numbers(ctypes.Structure):
    """`struct numbers`."""

    _fields_ = [(name, ctypes.c_float) for name in ("scale", "beta1", "rest1", "beta2", "rest2", "keep",
                                                    "size", "root", "eps")]


class Range(ctypes.Structure):
    """`struct range`: addresses of the elements, and the kinds of the last two."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("weight", "exp_avg", "exp_avg_sq", "grad", "copy")),
                ("grad_kind", ctypes.c_int), ("copy_kind", ctypes.c_int)]


def _load() -> tuple[Callable[..., Any] | None, Callable[..., Any] | None, str]:
    """AdamW and the checksum; or None for both, and why they are missing."""
    spec = importlib.util.find_spec("threed.optim._native")
    if spec is None or spec.origin is None:
        return None, None, "threed was installed where there was no C compiler with OpenMP"
    try:
        library = ctypes.CDLL(spec.origin)
        if library.threed_version() != VERSION:
            return None, None, f"{spec.origin} is of another version of threed"
        adamw, checksum = library.threed_adamw, library.threed_sum
    except (OSError, AttributeError) as error:
        return None, None, str(error)
    adamw.argtypes = [ctypes.POINTER(Range), ctypes.c_int64, ctypes.c_int, ctypes.POINTER(Numbers)]
    adamw.restype = None
    checksum.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint64, ctypes.c_uint64]
    checksum.restype = ctypes.c_uint64
    return adamw, checksum, ""


ADAMW, SUM, MISSING = _load()

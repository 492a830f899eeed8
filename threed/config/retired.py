"""Keys that earlier versions had: files, checkpoints and run folders of theirs may still have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from threed.base.errors import Problem

# Key -> the value that asks for nothing, and what to do where it has another
_RETIRED: dict[str, tuple[Any, str]] = {
    "offload.delayed_update": (False, "the key is gone: offload.overlap=auto, the default, hides the host's "
                                      "step where it can, and applies no gradient late; leave it out"),
    "offload.warmup": (0, "the key is gone with offload.delayed_update: no gradient is applied late; leave "
                          "it out"),
}


def is_retired(key: str) -> bool:
    return key in _RETIRED


def retired(key: str, value: Any) -> Iterator[Problem]:
    """The problem of a retired key; none where its value asks for nothing."""
    usual, said = _RETIRED[key]
    if value is not None and value != usual:
        yield Problem.of(key, f"={value}: {said}")

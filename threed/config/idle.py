"""Idle: keys of a file that overrides leave without effect. Who gives monitor.loggers=[] need not know that
the file has a port for one of them: such a key is left out, with a note. A file that has such a key by itself
is refused, and so is an override without effect."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from threed.base.console import say, speaks_for_machine
from threed.base.errors import ConfigError, Idle
from threed.config.named import joined
from threed.schema import Config

_LEAVE = re.compile("[:;] leave it out.*$")  # what a problem asks for


def overridden(values: dict[str, Any], others: dict[str, Any], make: Callable[[dict[str, Any]], Config],
               where: str) -> Config:
    """What `make` makes of a file's values by dotted key, and of overrides. Errors as from `make`."""
    out: dict[str, str] = {}
    while True:
        try:
            config = make(joined({key: value for key, value in values.items() if key not in out}, others))
            break
        except ConfigError as error:
            idle = {key: text for key, text in _idle(error).items() if key in values and key not in others}
            if not (left := idle.keys() - _alone(values, make)):
                raise
            out |= {key: idle[key] for key in left}
    for text in out.values():
        _note(f"note: left out of {where}, by the overrides: {_LEAVE.sub('', text)}")
    return config


def _idle(error: ConfigError) -> dict[str, str]:
    return {each.key: str(each) for each in error.problems if isinstance(each, Idle)}


def _alone(values: dict[str, Any], make: Callable[[dict[str, Any]], Config]) -> set[str]:
    """Keys that have no effect in the file as it is."""
    try:
        make(values)
    except ConfigError as error:
        return set(_idle(error))
    return set()


@lru_cache(100)  # a start loads its config for an unknown number of ranks, and then for a known one
def _note(line: str) -> None:
    if speaks_for_machine():
        say(line)

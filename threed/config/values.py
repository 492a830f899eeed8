"""Values: that of a key, and whether each key has one that it may have, whatever the other keys are."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from threed.base.errors import Problem
from threed.base.paths import of_mix
from threed.schema import Config, KeySpec, ModelConfig, keys_of

PATHS = {key: spec.path for key, spec in keys_of().items() if spec.path is not None}


def get(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def check_values(config: Config) -> list[Problem]:
    return [Problem.of(key, text) for key, spec in _bounded(type(config.model))
            for text in spec.wrong(get(config, key))]


@lru_cache(8)
def _bounded(model: type[ModelConfig]) -> list[tuple[str, KeySpec]]:
    """The keys that may not have every value of their type."""
    return [(key, spec) for key, spec in keys_of(model).items()
            if spec != KeySpec(spec.doc, path=spec.path, free=spec.free)]


def expand(values: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Values by dotted key, with paths expanded; and a problem for each that cannot be, which is left out."""
    found, problems = dict(values), []
    for key, path in PATHS.items():
        value = values.get(key)
        if isinstance(value, str) or path is of_mix:  # a list in place of a path: validate says so
            try:
                found[key] = path(value)
            except ValueError as error:
                problems.append(Problem.of(key, f"={value}: {error}"))
                del found[key]
    return found, problems

"""Names that stand for many keys: of a model's size, and of its family."""

from __future__ import annotations

import dataclasses
from typing import Any

from threed.base.errors import InputError, Problem
from threed.models.families.base import Family
from threed.models.families.registry import FAMILIES, family_of, instead_of, size_of, sizes
from threed.schema import Config, ModelConfig, keys_of

_NAME, _FAMILY = "model.name", "model.family"
# Which of two keys is left out of a file where an override gives the other: one of them names the data.
_INSTEAD = {"data.source": "data.mix", "data.mix": "data.source"}


def joined(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Values of a file, and over them those of overrides. A name that an override gives stands for many keys,
    so it wins over what the file says of these."""
    replaced = {_INSTEAD[key] for key, value in others.items() if key in _INSTEAD and value is not None}
    file = _known(values.get(_FAMILY))
    asked = _known(others.get(_FAMILY, values.get(_FAMILY)))
    size = _size(others)
    if size in sizes() or size in asked.sizes:
        told = {**{key: spec for family in FAMILIES.values() for key, spec in keys_of(family.config).items()},
                **keys_of(file.config)}
        replaced |= {key for key, spec in told.items() if key.startswith("model.") and not spec.free}
        if size in file.sizes:
            replaced -= {_FAMILY}
    elif _FAMILY in others and asked is not file:
        replaced |= {f"model.{key}" for key, value in dataclasses.asdict(asked.config()).items()
                     if value != getattr(ModelConfig(), key, value)}
    return {**{key: value for key, value in values.items() if key not in replaced}, **others}


def unlike(config: Config) -> str | None:
    """What of a model with a name differs from what the name says; None where nothing does, or it has none.
    (The length of sequences is everybody's own.)"""
    model, told = config.model, keys_of(type(config.model))
    size = family_of(model.family).sizes.get(model.name)
    if size is None:
        return None
    own = type(model)(**{"family": model.family, "name": model.name, **size})
    others = [f"{leaf.name}={getattr(model, leaf.name)} ({getattr(own, leaf.name)})"
              for leaf in dataclasses.fields(model) if not told[f"model.{leaf.name}"].free
              and leaf.name != "seq_len" and getattr(model, leaf.name) != getattr(own, leaf.name)]
    return f"model.name={model.name}, but with {', '.join(others)}" if others else None


def _known(name: Any) -> Family:
    """A family; where there is none of the name, which others say, that of default."""
    try:
        return family_of(str(name or "gpt"))
    except InputError:
        return FAMILIES["gpt"]


def _size(given: dict[str, Any]) -> str:
    """The size that `model.name` means, as its table writes it."""
    name = str(given.get(_NAME) or "custom")  # of null the check of types says what is wrong
    return size_of(name) or name


def named_model(given: dict[str, Any]) -> tuple[ModelConfig, dict[str, Any], list[Problem]]:
    """The defaults of the model's family, values by dotted key of the size that `model.name` names, and what
    is wrong with the two."""
    problems, known = [], sizes()
    size, name = _size(given), str(given.get(_FAMILY) or "")
    try:
        family = family_of(name or known.get(size, "gpt"))
    except InputError as error:
        problems.append(Problem(_FAMILY, str(error)))
        family = FAMILIES["gpt"]
    if size in family.sizes:
        values = {f"model.{key}": value for key, value in {**family.sizes[size], "name": size}.items()}
        return family.config(family=name or known[size]), values, problems
    if size in known and not problems:
        problems.append(Problem.of(_NAME, f"={size} is a size of model.family={known[size]}, not of {name}; "
                                   "leave one of them out (model.name=custom: the other keys are the sizes)"))
    elif size != "custom" and size not in known:
        imported = ", or take threed import for a model of Hugging Face" * ("/" in size)
        problems.append(Problem.of(_NAME, f"={size}: no such size{instead_of(size)} There are "
                                   f"{', '.join(known)}; leave it out to give the sizes yourself{imported}"))
    return family.config(family=name or "gpt"), {}, problems

"""Keys that have no effect on a model of user layers: they are refused, not ignored. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from threed.base.errors import Problem
from threed.models.families.registry import family_of
from threed.schema import Config, DataConfig

_TEXTS = "train.sample_prompts", "train.sample_every"


def unused(config: Config) -> Iterator[Problem]:
    """What is wrong with a config for a model of user layers."""
    model, family = config.model, family_of(config.model.family)
    for key, value in _changed(model, type(model)()):
        if key != "family":
            yield Problem.of(f"model.{key}", f"={value}: the layers are your own, and say themselves what "
                             "they are; leave it out")
    for key, value in _changed(config.data, DataConfig()):
        yield Problem.of(f"data.{key}", f"={value}: the data were given with the layers; leave it out")
    train = config.train
    if train.sample_every or train.sample_prompts:
        yield Problem.of("train.sample_every", f"={train.sample_every} with "
                         f"train.sample_prompts={list(train.sample_prompts)}: layers of your own write no "
                         "text; leave both out")
    if train.eval_every and not family.validates:
        yield Problem.of("train.eval_every", f"={train.eval_every}: there are no samples to validate with; "
                         "give data as a tuple (data set, data set to validate with)")
    if config.parallel.cp > 1:
        yield Problem.of("parallel.cp", f"={config.parallel.cp}: layers of your own see whole sequences, and "
                         "it gives each rank a part of them; leave it out")
    if config.activation.policy == "selective":
        yield Problem.of("activation.policy", "=selective: threed does not know the pieces of layers of your "
                         "own; use full or budget, which compute whole units again")


def _changed(section: Any, usual: Any) -> list[tuple[str, Any]]:
    return [(leaf.name, getattr(section, leaf.name)) for leaf in dataclasses.fields(section)
            if getattr(section, leaf.name) != getattr(usual, leaf.name)]

"""Keys that have no effect on a model of user layers: they are refused, not ignored. No torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from threed.models.families.registry import calling, family_of
from threed.models.tiling import share_of
from threed.schema import Config, DataConfig

_TEXTS = "train.sample_prompts", "train.sample_every"


def unused(config: Config) -> list[str]:
    """What is wrong with a config for a model of user layers, one line each."""
    model, family = config.model, family_of(config.model.family)
    problems = [f"model.{key}={value}: the layers are your own, and say themselves what they are; leave "
                "it out"
                for key, value in _changed(model, type(model)()) if key != "family"]
    problems += [f"data.{key}={value}: the data were given with the layers; leave it out"
                 for key, value in _changed(config.data, DataConfig())]
    train = config.train
    if train.sample_every or train.sample_prompts:
        problems.append(f"train.sample_every={train.sample_every} with train.sample_prompts="
                        f"{list(train.sample_prompts)}: layers of your own write no text; leave both out")
    if train.eval_every and not family.validates:
        problems.append(f"train.eval_every={train.eval_every}: there are no samples to validate with; give "
                        "data as a tuple (data set, data set to validate with)")
    if config.activation.policy == "selective":
        problems.append("activation.policy=selective: threed does not know the pieces of layers of your own; "
                        "use full or budget, which compute whole units again")
    with calling(model.family, "check()"):
        return [*problems, *family.check(model, share_of(config).ranks)]


def _changed(section: Any, usual: Any) -> list[tuple[str, Any]]:
    return [(leaf.name, getattr(section, leaf.name)) for leaf in dataclasses.fields(section)
            if getattr(section, leaf.name) != getattr(usual, leaf.name)]

"""`threed.initialize`: a config whose model is user layers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from threed.base.errors import ConfigError, InputError, Problem, check_type
from threed.config import load as configs
from threed.config.load import checked, of_values
from threed.models.families.registry import give
from threed.models.own.model import Layers, Loss
from threed.models.own.spec import Spec
from threed.schema import Config, LayersConfig, ModelConfig


def initialize(layers: Sequence[Spec] | Layers, loss: Loss | None = None,
               config: Config | str | Path | Mapping[str, Any] | None = None, data: Any = None,
               overrides: list[str] | None = None) -> Config:
    """A config whose model is your own layers, for `threed.check`, `plan`, `show`, `predict`, `report` and
    `train`.

    `layers`, `loss`, `data`: as of `threed.Layers`, or such an object alone. `config`: a YAML file, a
    dictionary of sections or dotted keys, or a Config, without a section `model`; `overrides` as of
    `threed.load`. Raises InputError where these are no model, or have keys that would have no effect. The
    config is for this process and those that it forks; under torchrun, each process makes its own.

    >>> config = threed.initialize([threed.Spec(Embed), threed.Spec(Head)], loss, {"parallel.pp": 2}, data)
    """
    if isinstance(layers, Layers):
        if loss is not None or data is not None:
            raise InputError("initialize was given threed.Layers, which have loss and data: leave these out")
    else:
        layers = Layers(layers, loss, data)  # pyright: ignore[reportArgumentType]  (it says what is missing)
    check_type("config", config, (Config, str, Path, dict, None),
               "the path of a YAML file, a dictionary of sections, or a Config")
    name = give(layers)
    if isinstance(config, Config):
        if overrides:
            raise InputError("overrides belong to a YAML file or a dictionary: give them to threed.load")
        return _of_config(config, name)
    where = str(config) if isinstance(config, str | Path) else "the config"
    source = configs.ConfigSource.read(config if isinstance(config, str | Path) else None, overrides)
    own = configs.flat(config) if isinstance(config, Mapping) else {}
    given = {**source.values, **own, **source.others}
    if extra := [Problem.of(key, f"={value}: the layers are your own, and say themselves what they are; "
                            "leave it out") for key, value in given.items() if key.startswith("model.")]:
        raise ConfigError(extra, where)
    made = of_values({**given, "model.family": name}, where)
    if given.get("parallel.dp", "auto") == "auto":  # the number of ranks decides, once it is known
        made.parallel.dp = "auto"
    return made


def _of_config(config: Config, name: str) -> Config:
    usual = ModelConfig()
    if extra := [Problem.of(f"model.{leaf.name}", f"={getattr(config.model, leaf.name)}: the layers are your "
                            "own, and say themselves what they are; leave it out")
                 for leaf in dataclasses.fields(ModelConfig)
                 if getattr(config.model, leaf.name) != getattr(usual, leaf.name)]:
        raise ConfigError(extra)
    made = copy.deepcopy(config)
    made.model = LayersConfig(family=name)
    dp = made.parallel.dp
    made = checked(made)
    made.parallel.dp = dp
    return made

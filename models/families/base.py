"""What a family is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from threed.models.layers.base import Layer
from threed.schema import Config, ModelConfig


def nothing(_: Any, __: Mapping[str, int]) -> list[str]:
    return []


@dataclass(frozen=True)
class Family:
    """Models of one kind."""

    # configuration -> its layers, first to last: the first embeds tokens, the last computes the loss
    layers: Callable[[Any], list[Layer]]
    config: type[ModelConfig] = ModelConfig  # keys of `model` and their defaults; a subclass may add its own
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # model.name -> values of keys
    # (configuration, axis -> ranks) -> its problems, one line each, beside those checked for all families
    check: Callable[[Any, Mapping[str, int]], list[str]] = nothing
    # config -> the samples to train on and those to validate with, as of data.mix.open_splits; None: the
    # tokens of the config's section `data`
    samples: Callable[[Config], tuple[Any, Any]] | None = None
    validates: bool = True  # whether there are some to validate with

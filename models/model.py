"""A model as a whole: its layers, its parameters, its work."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from threed.models.families.registry import calling, family_of
from threed.models.layers.base import Layer
from threed.models.spec import Parameter
from threed.schema import ModelConfig


def layers(model: ModelConfig) -> list[Layer]:
    """The layers of a model, first to last, none of them cut."""
    family = family_of(model.family)
    with calling(model.family, "layers()"):
        return family.layers(model)


def tied_parameters(model_layers: Iterable[Layer]) -> tuple[Parameter, ...]:
    """The parameters that the first and the last layer use and neither holds."""
    return tuple(dict.fromkeys(parameter for layer in model_layers for parameter in layer.parameters()
                               if parameter.tied))


def parameters(model: ModelConfig) -> list[Parameter]:
    """The parameters of the whole model, a tied one once."""
    return list(dict.fromkeys(parameter for layer in layers(model) for parameter in layer.parameters()))


def num_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, without the padding of its vocabulary."""
    return sum(prod((each.unpadded or each.shape[0], *each.shape[1:])) for each in parameters(model))


def model_flops(model: ModelConfig, sequences: int, together: int = 1) -> int:
    """FLOPs of forward and backward of `sequences`, of which `together` are a micro-batch, without
    recomputation: backward is twice forward.

    Narayanan et al. 2021, appendix, less the recomputed forward: 72 B s l h^2 (1 + s/(6h) + V/(12 l h)). Only
    matrix products count, and attention is counted whole (not halved for the causal mask), as is customary
    for MFU.
    """
    return round(3 * sequences * sum(layer.sequence_flops(together) for layer in layers(model)))

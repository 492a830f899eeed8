"""A model as a whole: its layers, its parameters, its work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from threed.models.families.registry import calling, family_of
from threed.models.layers.base import Layer, Part
from threed.models.layers.parts import Adapter, Held, every
from threed.schema import ModelConfig
from threed.spec.parameter import Parameter, Share


def layers(model: ModelConfig) -> list[Layer]:
    """The layers of a model, first to last, none of them cut."""
    family = family_of(model.family)
    with calling(model.family, "layers()"):
        made = family.layers(model)
    if model.lora_rank is not None and isinstance(made, Sequence):
        freeze(each for each in made if isinstance(each, Part))
    return made


def freeze(parts: Iterable[Part]) -> None:
    """Let all parameters of parts be frozen, but those of adapters."""
    for part in (inner for each in parts for inner in every(each)):
        if isinstance(part, Held) and not isinstance(part, Adapter):
            part.held = {name: replace(parameter, trains=False) for name, parameter in part.held.items()}


def adapters(model: ModelConfig) -> list[Adapter]:
    """The adapters of a model, first to last."""
    return [part for layer in layers(model) for part in every(layer) if isinstance(part, Adapter)]


def own_parameters(layer: Layer) -> tuple[Parameter, ...]:
    """The parameters that a layer's unit holds: all but tied ones."""
    return tuple(parameter for parameter in layer.parameters() if not parameter.tied)


def tied_parameters(model_layers: Iterable[Layer]) -> tuple[Parameter, ...]:
    """The parameters that the first and the last layer share, each once. They belong to neither layer."""
    return tuple(dict.fromkeys(parameter for layer in model_layers for parameter in layer.parameters()
                               if parameter.tied))


def parameters(model: ModelConfig) -> list[Parameter]:
    """The parameters of the whole model, a tied one once."""
    return list(dict.fromkeys(parameter for layer in layers(model) for parameter in layer.parameters()))


def num_parameters(model: ModelConfig, active: bool = False, trained: bool = False) -> int:
    """Parameters of the whole model, without the padding of its vocabulary and what counts rows. `active`:
    those that compute a token; `trained`: those that are not frozen."""
    return sum(prod((each.unpadded or each.shape[0], *each.shape[1:]))
               * (each.used[0] if active else each.used[1]) // each.used[1]
               for each in parameters(model) if not each.counted and (each.trains or not trained))


def model_flops(model: ModelConfig, sequences: int, together: int = 1) -> int:
    """FLOPs of forward and backward of `sequences`, of which `together` are a micro-batch, without
    recomputation: backward is twice forward, less the gradients of frozen weights.

    Narayanan et al. 2021, appendix, less the recomputed forward: 72 B s l h^2 (1 + s/(6h) + V/(12 l h)). Only
    matrix products count, and attention is counted whole (not halved for the causal mask), as is customary
    for MFU.
    """
    costs = [layer.cost(Share(sequences=together)) for layer in layers(model)]
    return sequences * sum(3 * cost.flops - cost.frozen_flops for cost in costs) // together

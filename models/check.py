"""Check: whether the layers that a family lists can be a model. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from threed.base.errors import Idle, InputError, Problem
from threed.models.families.registry import calling
from threed.models.layers.base import Layer, Part
from threed.models.layers.block import Block, Branch
from threed.models.layers.parts import Linear, every
from threed.models.model import adapters, layers
from threed.schema import ModelConfig
from threed.spec.parameter import Parameter


def unsound(model: ModelConfig) -> list[Problem]:
    """Why the layers of a model cannot run; empty when they can."""
    try:
        listed: Any = layers(model)
        if problem := _no_layers(listed):
            return [_of_family(model, f"layers() {problem}")]
        problems = [*_ends(listed)]
        for layer in listed:
            problems += _branches(layer, layer.name)
        if problems:
            return [_of_family(model, problem) for problem in problems]
        with calling(model.family, "parameters()"):
            problem = _names(listed)
        return [_of_family(model, problem)] if problem else _adapters(model, listed)
    except InputError as error:
        return [Problem("model.family", str(error))]


def _of_family(model: ModelConfig, text: str) -> Problem:
    return Problem.of("model.family", f"={model.family}: {text}")


def _no_layers(listed: Any) -> str | None:
    if not isinstance(listed, Sequence):
        return f"returned {_kind(listed)}: it must return the list of layers, first to last"
    for index, layer in enumerate(listed):
        if not isinstance(layer, Layer):
            hint = "; does the function that makes it end without return?" if layer is None else ""
            return f"has {_kind(layer)} at index {index}, which must be a Layer{hint}"
        if not isinstance(getattr(layer, "name", None), str):
            return f"has {_kind(layer)} without a name at index {index}: set self.name"
    if len(listed) < 2:
        return f"has {len(listed)} layers: it must have at least one that embeds tokens and one with the loss"
    return None


def _ends(listed: Sequence[Layer]) -> Iterator[str]:
    first, last = listed[0], listed[-1]
    if not first.tokens:
        yield (f"the first layer, '{first.name}' ({_kind(first)}), does not embed tokens: begin with "
               "Embedding(model), or with a layer of your own that reads batch.tokens_BS and has "
               "tokens = True")
    if not last.loss:
        yield (f"the last layer, '{last.name}' ({_kind(last)}), has no loss: end with Head(model), or with a "
               "layer of your own that returns Out(loss=...) and has loss = True")


def _branches(part: Part, layer: str) -> Iterator[str]:
    """Blocks and branches that lack something, in a layer and its parts."""
    if isinstance(part, Block):
        for branch in part.branches:
            if not isinstance(branch, Part):
                yield f"block '{part.name}' has {_kind(branch)} where a Branch must be"
    if isinstance(part, Branch):
        expected = "it must be Branch(name, norm, body, ...)"
        if not isinstance(part.norm, Part) or hasattr(part.norm, "axis"):  # all bodies have an axis
            yield f"branch '{part.name}' of '{layer}' has {_kind(part.norm)} as its norm: {expected}"
        elif not part.bodies:
            yield f"branch '{part.name}' of '{layer}' has no body: {expected}"
        for body in part.bodies:
            if not isinstance(body, Part):
                yield f"branch '{part.name}' of '{layer}' has {_kind(body)} as a body: {expected}"
    for inner in part.parts():
        yield from _branches(inner, layer)


def _adapters(model: ModelConfig, listed: Sequence[Layer]) -> list[Problem]:
    """Why a model cannot have the adapters that it asks for."""
    if model.lora_rank is None:
        return [Idle.of(f"model.{key}", f"={getattr(model, key)} needs model.lora_rank, the rank of "
                        "adapters; leave it out")
                for key in ("lora_alpha", "lora_targets") if getattr(model, key) is not None]
    if model.tile_linears is not None:
        return [Problem.of("model.tile_linears", f"={model.tile_linears} with "
                           f"model.lora_rank={model.lora_rank}: tiles have no adapters; leave one of the two "
                           "out")]
    offered = list(dict.fromkeys(target for layer in listed for part in every(layer)
                                 if isinstance(part, Linear) for target in part.offers))
    asked = f"={list(model.targets)}"
    if strange := [target for target in model.targets if target not in offered]:
        return [Problem.of("model.lora_targets", f"{asked}: the model has no linear {strange[0]}; it has "
                           f"{', '.join(offered) or 'none'}")]
    if "qkv_proj" in model.targets and len({"q_proj", "k_proj", "v_proj"} & {*model.targets}):
        return [Problem.of("model.lora_targets", f"{asked}: qkv_proj is one adapter for queries, keys and "
                           "values together: leave it out, or the others")]
    if not model.targets or len(set(model.targets)) < len(model.targets):
        return [Problem.of("model.lora_targets", f"{asked}: must be some of {', '.join(offered)}, each once")]
    trained = {parameter.name for adapter in adapters(model) for parameter in adapter.parameters()}
    wild = next((parameter.name for layer in listed for parameter in layer.parameters()
                 if parameter.trains and parameter.name not in trained), None)
    return [] if wild is None else [Problem.of(
        "model.lora_rank", f"={model.lora_rank}: parameter {wild} of family {model.family} is in no part of "
        "the kind threed.models.layers.parts.Held, so it cannot be frozen")]


def _names(listed: Sequence[Layer]) -> str | None:
    """The first parameter with the name of another. (A tied one belongs to two layers, and a layer may list
    one twice.)"""
    owners: dict[str, tuple[int, Parameter]] = {}
    for index, layer in enumerate(listed):
        for parameter in layer.parameters():
            at, owner = owners.setdefault(parameter.name, (index, parameter))
            if (owner is parameter and at == index) or (owner.tied and parameter.tied):
                continue
            where = (f"layers {at} ('{listed[at].name}') and {index} ('{layer.name}') both have"
                     if at != index else f"layer {at} ('{layer.name}') has twice")
            return (f"{where} a parameter named '{parameter.name}': checkpoints and initial values know a "
                    "parameter by its name, so give each its own")
    return None


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"

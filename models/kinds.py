"""Kinds: which layers of a model compute in the same way, and cost the same. A model has few kinds."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from threed.base.remember import remembered
from threed.models.layers.base import Layer
from threed.models.tiling import layers_of, model_key, share_of
from threed.schema import Config
from threed.spec.parameter import Cost, Share


@runtime_checkable
class Alike(Protocol):
    """A layer whose class does not tell how it computes. `likeness`: equal for layers that compute in the
    same way, given that their costs are equal."""

    def likeness(self, share: Share) -> object: ...


@remembered(model_key)
def layer_costs(config: Config) -> list[Cost]:
    """Of each layer: its cost on one rank."""
    share = share_of(config)
    return [layer.cost(share) for layer in layers_of(config)]


@remembered(model_key)
def layer_kinds(config: Config) -> list[object]:
    """Of each layer: equal for layers of one kind that cost the same."""
    share = share_of(config)
    return [(_likeness(layer, share), *_sizes(cost))
            for layer, cost in zip(layers_of(config), layer_costs(config), strict=True)]


def _likeness(layer: Layer, share: Share) -> object:
    return layer.likeness(share) if isinstance(layer, Alike) else type(layer)


def _sizes(cost: Cost) -> tuple[object, ...]:
    """A cost without the names of what is saved, which differ from block to block."""
    return (cost.flops, cost.operands, sorted(cost.sent.items()),
            [(kept.bytes, kept.piece) for kept in cost.saved])

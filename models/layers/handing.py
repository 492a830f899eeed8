"""Handing: what a layer hands to later layers in addition to the residual stream, or in place of it.

A layer that hands tensors on, or reads such tensors, has those of these attributes and methods that it needs:
the fields of `Handing`, `makes` and `passes`. Threed asks with the three functions of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from threed.models.layers.base import Layer
from threed.spec.parameter import Outflow, Share
from threed.spec.travel import Exchanged, Gathered


class Handing(NamedTuple):
    """The attributes of a layer that say which tensors it reads, and how those that it makes travel."""

    reads: tuple[str, ...] = ()  # names of tensors that earlier layers hand it
    # Of those that it reads, what has travelled and forward uses up: backward needs none of its values. The
    # last FORWARD or RECOMPUTE of the layer frees it.
    spent: tuple[str, ...] = ()
    # Shapes of those that it reads that have not the shape of the residual stream: name -> shape, or a
    # function of a rank's share.
    shapes: Mapping[str, tuple[int, ...] | Callable[[Share], tuple[int, ...]]] = {}
    # Those that it makes or reads to which no gradient belongs: name -> dtype, such as int64. What it made of
    # them in forward is given to it when its forward is computed again: a choice stays as it was.
    without_grad: Mapping[str, str] = {}
    # How tensors that it makes travel to other ranks before later layers read them: name -> way.
    travels: Mapping[str, Gathered | Exchanged] = {}


@runtime_checkable
class Maker(Protocol):
    """A layer that makes tensors for later layers of its stage (`Out.makes`): name -> bytes. Of what comes
    from other ranks in their place, too, where plans are to count more or less than leaves."""

    def makes(self, share: Share) -> dict[str, int]: ...


@runtime_checkable
class Passing(Protocol):
    """A layer that may hand something else to the next layer than the residual stream (None)."""

    def passes(self, share: Share) -> Outflow | None: ...


def handing(layer: Layer) -> Handing:
    return Handing(**{name: getattr(layer, name) for name in Handing._fields if hasattr(layer, name)})


def makes(layer: Layer, share: Share) -> dict[str, int]:
    return layer.makes(share) if isinstance(layer, Maker) else {}


def passes(layer: Layer, share: Share) -> Outflow | None:
    return layer.passes(share) if isinstance(layer, Passing) else None

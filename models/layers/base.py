"""Parts and layers: what planning must know about them, and their computation, in one class.

A **part** consists of parts: a layer has a norm and an MLP, an MLP has two linears. It declares its
parameters and its cost, by default those of its parts. A **layer** is a part that can be a unit. Parts made
from a config are plain values, so a plan needs no torch; `build` binds them to the weights of a rank, and
then they can compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from threed.spec.parameter import WHOLE, Cost, Outflow, Parameter, Share, Tile
from threed.spec.travel import Exchanged, Gathered

if TYPE_CHECKING:
    import torch

    from threed.tensor.context import Context


class Part:
    """A piece of a layer: it has the parameters and the cost of its parts, and adds its own."""

    context: Context  # after `build`

    def parts(self) -> Iterator[Part]:
        """Its own parts, in the order in which they were made."""
        for value in vars(self).values():
            for each in value if isinstance(value, tuple | list) else (value,):
                if isinstance(each, Part):
                    yield each

    def parameters(self) -> list[Parameter]:
        """All parameters that it uses."""
        return [parameter for part in self.parts() for parameter in part.parameters()]

    def cost(self, share: Share) -> Cost:
        return sum((part.cost(share) for part in self.parts()), Cost())

    def build(self, context: Context, weights: Mapping[str, torch.nn.Parameter]) -> Self:
        """Bind the part to the weights of a rank (key of a parameter -> weight)."""
        self.context = context
        for part in self.parts():
            part.build(context, weights)
        return self

    def modules(self) -> list[torch.nn.Module]:
        """The torch modules that hold its weights, after `build`."""
        return [module for part in self.parts() for module in part.modules()]

    def forward(self, *inputs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} computes nothing")

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.forward(*inputs, **named)


class Logits(NamedTuple):
    """What a layer of the head sends and holds where it makes logits in place of a loss."""

    bytes: int  # of the logits of one token of each sequence of a micro-batch, all ranks' parts together
    sent: Mapping[str, int]  # axis -> bytes that a rank sends in that forward


class Out(NamedTuple):
    """The output of a layer that returns more than the residual stream."""

    x: torch.Tensor | None = None  # input of the next layer, mostly the residual stream; None for the last
    makes: Mapping[str, torch.Tensor] = {}  # tensors for later layers of its stage, by name
    # Added to the loss, equal on all ranks with the same samples: a sum / batch.num_tokens.
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None  # of each sequence's token `batch.last_B`, [B, V of all ranks]
    # By whose sum over the global batch CLIP divides the loss and STEP the gradients; None: by nothing.
    count: torch.Tensor | None = None
    # It is trained on as the loss is. It is reported apart from the loss, and not evaluated.
    penalty: torch.Tensor | None = None


class Layer(Part):
    """A layer is called with the residual stream [s, B, D], the batch, and by name the tensors that it reads.
    It returns the residual stream, or an Out."""

    name: str
    tile: Tile = WHOLE
    # Whether it only adds to its input: it keeps nothing, and passes the gradient on unchanged. It is called
    # with None when it is computed again, and returns what it adds, or None if that is nothing (`added`).
    adds = False
    tokens = False  # whether it embeds the batch's tokens; the first layer does
    loss = False  # whether it adds to the loss or has a penalty; the last layer does
    reads: tuple[str, ...] = ()  # names of tensors that earlier layers hand it
    # Of those that it reads, what has travelled and forward uses up: backward needs none of its values. The
    # last FORWARD or RECOMPUTE of the layer frees it.
    spent: tuple[str, ...] = ()
    # Shapes of those that it reads that have not the shape of the residual stream: name -> shape.
    shapes: Mapping[str, tuple[int, ...]] = {}
    # Those that it makes or reads to which no gradient belongs: name -> dtype, such as int64. What it made of
    # them in forward is given to it when its forward is computed again: a choice stays as it was.
    without_grad: Mapping[str, str] = {}
    # How tensors that it makes travel to other ranks before later layers read them: name -> way.
    travels: Mapping[str, Gathered | Exchanged] = {}
    # What its tensors' shapes depend on beside the config, such as "how many tokens an expert gets". No CUDA
    # graph can hold such a layer.
    shapes_from = ""
    # Its weights, after `build`, where autograd alone computes their gradients: what of them can wait for the
    # weights' half is found in the graph (tensor/halves). None: its products put gradients off by themselves.
    by_graph: Sequence[torch.nn.Parameter] | None = None

    def makes(self, share: Share) -> dict[str, int]:
        """Tensors for later layers: name -> bytes. Of what comes from other ranks in their place, too, where
        plans are to count more or less than leaves."""
        return {}

    def passes(self, share: Share) -> Outflow | None:
        """What it hands to the next layer; None: the residual stream."""
        return None

    def schema(self, share: Share) -> Any:
        """A tensor.packing.Schema of what it hands to the next layer; None: one tensor."""
        return None

    def example(self, share: Share) -> tuple[Any, Any]:
        """`inputs` and `targets` of a micro-batch, for a layer that reads them: without meaning, but of the
        right shapes."""
        return None, None

    def likeness(self, share: Share) -> object:
        """Equal for layers that compute in the same way, given that their costs are equal."""
        return type(self)

    def weighs_alike(self, share: Share) -> bool:
        """Whether each micro-batch has the same weight in its loss, and may have fewer targets that count."""
        return False

    def undivided(self, share: Share) -> tuple[str, ...]:
        """Its matrices, if none of their gradients can wait for the weights' half of backward."""
        return ()

    def logits(self, share: Share) -> Logits | None:
        """What it makes where `batch.last_B` is set, to generate text; None where it makes no logits."""
        return None

    def own_parameters(self) -> tuple[Parameter, ...]:
        """The parameters that its unit holds: all but tied ones."""
        return tuple(parameter for parameter in self.parameters() if not parameter.tied)

    def tileable(self) -> tuple[Tileable, ...]:
        """Its parts that can be cut into tiles."""
        return ()

    def cut(self, tiling: Tiling) -> list[Layer]:
        """Itself, or the smaller layers that compute the same."""
        return [self]


class Tileable(Protocol):
    """A part whose matrices can be cut into equal tiles."""

    kind: str  # what it is called
    axis: str  # of the mesh, over which its matrices are cut
    cells: int  # the number of pieces that must stay whole
    cell: str  # the name of such a piece

    def parameters(self) -> list[Parameter]: ...
    def tiled(self, tile: Tile) -> Self: ...


class Sharing(Protocol):
    """A body of a branch whose first tile hands tensors to its other tiles: parameters that all tiles use."""

    def shares(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> shape of a tensor, in the dtype of compute. The other tiles are called with it by name."""
        ...

    def shared(self) -> Mapping[str, torch.Tensor]:
        """The tensors, made by the first tile."""
        ...


class Tiling(Protocol):
    """How layers are cut so that none gathers more than a limit."""

    def fits(self, part: Any) -> bool: ...
    def tiles(self, part: Any) -> list[Any]: ...

"""Parts and layers: what planning must know about them, and their computation, in one class.

A **part** consists of parts: a layer has a norm and an MLP, an MLP has two linears. It declares its
parameters and its cost, by default those of its parts. A **layer** is a part that can be a unit. Parts made
from a config are plain values, so a plan needs no torch; `build` binds them to the weights of a rank, and
then they can compute.

A layer may have more, which no other needs. It then has attributes and methods that stand where threed asks
for them:

    tensors for later layers, which may travel to other ranks   layers/handing
    tiles, into which it can be cut                             models/tiling
    logits, to generate text                                    layers/head.Generates
    a user's modules                                            models/own
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from threed.spec.parameter import Cost, Parameter, Share

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

    def computes_as(self, kind: type[Part]) -> bool:
        """Whether its forward is that of `kind`. Else no piece (tensor/pieces) takes its place."""
        return type(self).forward is kind.forward


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
    # Whether it only adds to its input: it keeps nothing, and passes the gradient on unchanged. It is called
    # with None when it is computed again, and returns what it adds, or None if that is nothing (`added`).
    adds = False
    tokens = False  # whether it embeds the batch's tokens; the first layer does
    loss = False  # whether it adds to the loss or has a penalty; the last layer does

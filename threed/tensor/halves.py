"""The two halves of a backward that autograd alone computes (user layers).

The input half runs the graph without the products that give the gradients of matrices: it computes the
gradients of the unit's input, and of the small weights (biases, norms), and the gradient that reaches each of
these products. The weights' half runs these products.

                 grad of the output
                        |
    input half     [ product ]----> grad of the input          captured: what arrives at the product
                        :
    weights' half       '.....> (view) .....> grad of the weight

A weight can wait if one product alone uses it, through views at most: then its gradient needs the product's
other operand and what arrives there, and no weight, which may be gone by then (ZeRO-3). Other weights belong
to the input half: those that are used twice, in operations that are no products, or inside a
user's autograd.Function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch.autograd.graph import GradientEdge

from threed.tensor.layers import WeightGrads
from threed.tensor.saving import SavingPolicy

# Nodes of autograd's graph by name. The two operands of a product, of which one is the weight: the last two
# of a product of matrices, the first two of a convolution.
PRODUCTS = {"MmBackward0": slice(0, 2), "AddmmBackward0": slice(1, 3), "ConvolutionBackward0": slice(0, 2)}
VIEWS = {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0",
         "ReshapeAliasBackward0", "AliasBackward0"}


@runtime_checkable
class ByGraph(Protocol):
    """A layer of whose backward autograd alone computes the gradients of weights. (The products of other
    layers put these off by themselves: `WeightGrads`.)"""

    by_graph: Sequence[torch.nn.Parameter]  # its weights, after `build`


class Halves(NamedTuple):
    roots: Sequence[Any]  # edges at which backward begins
    leaves: Sequence[torch.Tensor]  # inputs that get gradients
    now: Sequence[torch.Tensor]  # weights of the input half
    later: Sequence[tuple[Any, torch.Tensor]]  # (product, its weight) of the weights' half

    @classmethod
    def of(cls, roots: Sequence[Any], leaves: Sequence[torch.Tensor],
           weights: Sequence[torch.Tensor]) -> Halves:
        """The halves of a graph. Every call finds the same ones in the same layers."""
        users = _users(edge.node for edge in roots)
        own = {_accumulator(weight): weight for weight in weights}
        later = {node: product for node in own if (product := _product(node, users, own)) is not None}
        return cls(roots, leaves, [weight for node, weight in own.items() if node not in later],
                   [(product, own[node]) for node, product in later.items()])

    def run(self, grads: Sequence[torch.Tensor], sums: WeightGrads, saving: SavingPolicy) -> None:
        """The input half. Each leaf gets its gradient as `.grad`; what is left goes to `sums.put_off`."""
        assert sums.put_off is not None
        edges = [GradientEdge(product, 0) for product, _ in self.later]
        wanted = [*self.leaves, *self.now, *edges]
        got = iter(torch.autograd.grad(list(self.roots), wanted, list(grads), retain_graph=bool(edges),
                                       allow_unused=True))
        for leaf in self.leaves:
            leaf.grad = next(got)
        for weight in self.now:
            if (grad := next(got)) is not None:
                sums.put_off.append(partial(_add, weight, grad))
        for edge, (_, weight) in zip(edges, self.later, strict=True):
            if (grad := next(got)) is not None:
                sums.put_off.append(partial(_multiply, edge, grad, weight, saving))


def _add(weight: torch.Tensor, grad: torch.Tensor) -> None:
    torch.autograd.backward([weight], [grad])  # only adds, by the hook of the weight


def _multiply(edge: GradientEdge, grad: torch.Tensor, weight: torch.Tensor, saving: SavingPolicy) -> None:
    with saving.without_parameters():
        torch.autograd.backward([edge], [grad], inputs=[weight])


def _accumulator(weight: torch.Tensor) -> Any:
    """The node at which the gradient of a leaf is added up."""
    return torch.autograd.graph.get_gradient_edge(weight).node


def _users(roots: Iterator[Any]) -> dict[Any, list[Any]]:
    """Node -> the nodes that read what it stands for, one for each use."""
    users: dict[Any, list[Any]] = {}
    todo = list(dict.fromkeys(roots))
    seen = set(todo)
    while todo:
        node = todo.pop()
        for below, _ in node.next_functions:
            if below is not None:
                users.setdefault(below, []).append(node)
                if below not in seen:
                    seen.add(below)
                    todo.append(below)
    return users


def _product(weight: Any, users: dict[Any, list[Any]], own: dict[Any, torch.Tensor]) -> Any:
    """The product that alone uses a weight; None where there is none."""
    node = weight
    while len(above := users.get(node, ())) == 1:
        user = above[0]
        if user.name() in PRODUCTS:
            operands = [below for below, _ in user.next_functions[PRODUCTS[user.name()]]]
            others = [below for below in operands if below is not node]
            return user if len(others) == 1 and _viewed(others[0]) not in own else None
        if user.name() not in VIEWS:
            return None
        node = user
    return None


def _viewed(node: Any) -> Any:
    """What a chain of views begins with."""
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    return node

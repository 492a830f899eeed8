"""A block is a sequence of branches. A branch adds to the residual stream the outputs of its bodies, which
read the output of its norm:

    Block(name, Branch(f"{name}.attention", norm, attention), Branch(f"{name}.mlp", norm, mlp))   in turn
    Block(name, Branch(f"{name}.both", norm, attention, mlp))                                     side by side

A body is a part that is called with (norm's output, batch) and that can be cut into tiles (tiling.Tileable).
A block that is too large is cut into its branches, and a branch into tiles of its bodies. The first tile has
the norm and hands its output to the other tiles. The first tile of a body may hand on more (Sharing).

With model.fused and a layer norm, what ends a branch is one pass: the bias of its last linear (Ending), its
dropout, its sum, and the norm of the branch that follows in the block (tensor/pieces).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from threed.models.layers.base import Layer, Out
from threed.models.layers.parts import Column, Row, keeps, replaced
from threed.models.layers.residual import Dropout, Norm, added
from threed.spec.kernels import WHOLE, Moved, partial_sums
from threed.spec.parameter import SEQUENCE, Cost, Saved, Share, Tile

if TYPE_CHECKING:
    import torch

    from threed.models.tiling import Limit
    from threed.tensor.context import Batch


@runtime_checkable
class Sharing(Protocol):
    """A body of a branch whose first tile makes tensors (`shared`) with which its other tiles are called, by
    name: parameters that all tiles use. `shares`: their shapes; their dtype is that of compute."""

    tile: Tile

    def shares(self) -> Mapping[str, tuple[int, ...]]: ...
    def shared(self) -> Mapping[str, torch.Tensor]: ...


@runtime_checkable
class Ending(Protocol):
    """A body of a branch whose last linear may leave its bias to the branch: `forward` has a parameter
    `bias`, False where it does."""

    @property
    def end(self) -> Row: ...


@cache
def _leaves_bias(body: type) -> bool:
    return "bias" in inspect.signature(body.forward).parameters


class Block(Layer):
    """Branches, one after the other, as one layer."""

    def __init__(self, name: str, *branches: Branch):
        self.name, self.branches = name, branches

    def tileable(self) -> tuple[Any, ...]:
        return tuple(body for branch in self.branches for body in branch.bodies)

    def cut(self, limit: Limit) -> list[Layer]:
        return [layer for branch in self.branches for layer in limit.cut(branch)]

    def forward(self, x_sBD: torch.Tensor, batch: Batch, **keys: torch.Tensor) -> torch.Tensor:
        """`keys`: what the first branch attends to, where another unit has made it (layers/overlapped)."""
        normed = None
        for branch, then in self._followed():
            if type(branch) is Branch:
                x_sBD, normed = branch.through(x_sBD, batch, normed, then)
            else:
                x_sBD, normed, keys = branch(x_sBD, batch, **keys), None, {}
        return x_sBD

    def cost(self, share: Share) -> Cost:
        costs = (branch.cost(share, then is not None) if type(branch) is Branch else branch.cost(share)
                 for branch, then in self._followed())
        return sum(costs, Cost())

    def _followed(self) -> Iterator[tuple[Branch, Norm | None]]:
        """Each branch, and the norm behind it that is one piece with its end."""
        for branch, other in zip(self.branches, (*self.branches[1:], None), strict=True):
            alike = type(branch) is type(other) is Branch and branch.fuses
            yield branch, other.norm if other is not None and alike and other.norm.fuses else None


class Branch(Layer):
    """x + dropout(bodies(norm(x))): adds to the residual stream what its bodies compute, summed."""

    def __init__(self, name: str, norm: Norm, *bodies: Any):
        self.name, self.norm, self.bodies = name, norm, bodies
        self.dropout = Dropout(norm.model, name)

    def cost(self, share: Share, followed: bool = False) -> Cost:
        """`followed`: whether the norm behind it is one piece with its end."""
        # Operands of the products: the norm's output, and the gradient of the branch's output. Bodies share
        # both tensors, but a body that gathers a cut sequence has a gradient of its own.
        size = self.norm.model.seq_len * self.norm.model.hidden
        gathers = [body.axis in share.sequence for body in self.bodies]
        normed, whole = share.bytes(size, SEQUENCE), share.bytes(size)
        read = any(keeps(body, Column) for body in self.bodies)
        ends = [keeps(body, Row) for body in self.bodies]
        shared = any(end and not gather for end, gather in zip(ends, gathers, strict=True))
        ungathered = sum(end and gather for end, gather in zip(ends, gathers, strict=True))
        saved = (Saved("output of the norm", normed, "norm"),) if read else ()
        sums = len(self.bodies)  # of the stream and the bodies, and in backward of their gradients
        moved = Moved("sum", 3 * sums * normed, 3 * sums * normed, (sums, sums))
        cost = super().cost(share) + Cost((moved,), saved,
                                          operands=normed * (read + shared) + ungathered * whole)
        if not self.fuses:
            return cost
        apart = [moved, self.norm.moved(share), *self.dropout.moved(share)]
        if (end := self.end) is not None:
            apart += end.of_bias(share)
        return replaced(cost, apart, self._pieces(share, normed, followed))

    def _pieces(self, share: Share, stream: int, followed: bool) -> list[Moved]:
        """The norm with the sum of its input's gradients; and the end. If a norm follows, its kernel reads
        for both."""
        model, others = self.norm.model, 3 * (len(self.bodies) - 1) * stream
        drops, sums = bool(model.dropout), self.end is not None and self.end.sums_bias
        tokens = stream // model.hidden // share.element

        def partial(whole: bool, count: int) -> int:
            return partial_sums(model.hidden, tokens, whole, count) if count else 0

        learns = 2 * self.norm.learns
        again = model.hidden > WHOLE  # backward reads the stream and the norm's gradient for sums of a token
        norm = Moved(self.norm.name, 2 * stream, (4 + 2 * again) * stream + partial(True, learns),
                     (1, 2 + again + 2 * self.norm.learns), "norm", fused=True)
        backward = (2 if drops else int(sums)) * stream + partial(drops, sums)
        end = Moved("end of the branch", 3 * stream, backward, (1, (drops or sums) + sums), fused=True)
        if followed:
            end = end._replace(forward=2 * stream, backward=drops * stream + partial(True, sums),
                               kernels=(0, int(sums)))
        rest = Moved("sum", others, others, (len(self.bodies) - 1, len(self.bodies) - 1))
        return [norm, end, *([rest] if others else [])]

    @property
    def fuses(self) -> bool:
        """Whether its norm is a piece, and its end is one."""
        return self.norm.fuses and self.dropout.computes_as(Dropout)

    @property
    def end(self) -> Row | None:
        """The linear whose bias the branch adds."""
        body = self.bodies[0]
        one = len(self.bodies) == 1 and isinstance(body, Ending) and _leaves_bias(type(body))
        return body.end if one and body.end.computes_as(Row) else None

    def tileable(self) -> tuple[Any, ...]:
        return self.bodies

    def cut(self, limit: Limit) -> list[Layer]:
        bodies = [tile for body in self.bodies for tile in limit.tiles(body)]
        return [BranchTile(self, body, Tile(index, len(bodies))) for index, body in enumerate(bodies)]

    def forward(self, x_sBD: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.through(x_sBD, batch)[0]

    def through(self, x_sBD: torch.Tensor, batch: Batch, normed: torch.Tensor | None = None,
                then: Norm | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stream, and the norm `then` of it. `normed`: its own norm of the stream, where there is one."""
        fuses = self.fuses
        if normed is None:
            normed, x_sBD = self.norm.beside(x_sBD)
        x, apart = x_sBD.detach(), {"bias": False} if fuses and self.end is not None else {}
        with self.context.saving.instead("norm", normed, lambda: self.norm.again(x)):
            parts = [body(normed, batch, **apart) for body in self.bodies]
        part = sum(parts[1:], parts[0])
        if not fuses:
            return x_sBD + self.dropout(part, batch), None
        bias = self.end.bias if self.end is not None else None
        by, norm = self.context.fused.sums(x_sBD.device), then.values if then is not None else None
        return self.context.pieces.ended(x_sBD, part, bias, self.dropout.dropped(batch), norm, by)


class BranchTile(Layer):
    """A tile of a body, which adds its output to the residual stream. (All tiles have the same dropout mask,
    which makes this the dropout of their sum.)"""

    def __init__(self, branch: Branch, body: Any, tile: Tile):
        self.model, self.name, self.tile = branch.norm.model, tile.of(branch.name), tile
        self.norm = branch.norm if tile.index == 0 else None
        self.body, self.dropout = body, Dropout(self.model, branch.name)
        self.adds = tile.index > 0
        shares = body.shares() if isinstance(body, Sharing) and body.tile.count > 1 else {}
        self.hands = shares if body.tile.index == 0 else {}
        self.shapes = shares if body.tile.index > 0 else {}
        self.reads = (*(("normed",) if tile.index > 0 else ()), *self.shapes)

    def makes(self, share: Share) -> dict[str, int]:
        stream = share.bytes(self.model.seq_len * self.model.hidden, SEQUENCE)
        return {**({"normed": stream} if self.norm is not None else {}),
                **{name: math.prod(shape) * share.element for name, shape in self.hands.items()}}

    def cost(self, share: Share) -> Cost:
        size = self.model.seq_len * self.model.hidden
        operands = share.bytes(size, SEQUENCE) if self.norm is not None else 0
        # All tiles share the gradient of the output, unless dropout or a gather makes one for each tile.
        gathers = self.body.axis in share.sequence
        if self.norm is not None or self.model.dropout or gathers:
            operands += share.bytes(size, "" if gathers else SEQUENCE)
        stream = share.bytes(size, SEQUENCE)
        return super().cost(share) + Cost((Moved("sum", 3 * stream, 3 * stream),), operands=operands)

    def forward(self, x_sBD: torch.Tensor | None, batch: Batch, normed: torch.Tensor | None = None,
                **shared: torch.Tensor) -> Any:
        made: dict[str, Any] = dict(self.body.shared()) if self.hands else {}
        if self.norm is not None:
            made["normed"] = normed = self.norm(x_sBD)
        x = added(x_sBD, self.dropout(self.body(normed, batch, **shared), batch))
        return Out(x, made) if made else x

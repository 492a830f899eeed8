"""A block is a sequence of branches. A branch adds to the residual stream the outputs of its bodies, which
read the output of its norm:

    Block(name, Branch(f"{name}.attention", norm, attention), Branch(f"{name}.mlp", norm, mlp))   in turn
    Block(name, Branch(f"{name}.both", norm, attention, mlp))                                     side by side

A body is a part that is called with (norm's output, batch) and that can be cut into tiles (tiling.Tileable).
A block that is too large is cut into its branches, and a branch into tiles of its bodies. The first tile has
the norm and hands its output to the other tiles. The first tile of a body may hand on more (Sharing).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from threed.models.layers.base import Layer, Out
from threed.models.layers.parts import Column, Dropout, Norm, Row, added, keeps
from threed.spec.kernels import Moved
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
        first, *others = self.branches
        x_sBD = first(x_sBD, batch, **keys)
        for branch in others:
            x_sBD = branch(x_sBD, batch)
        return x_sBD


class Branch(Layer):
    """x + dropout(bodies(norm(x))): adds to the residual stream what its bodies compute, summed."""

    def __init__(self, name: str, norm: Norm, *bodies: Any):
        self.name, self.norm, self.bodies = name, norm, bodies
        self.dropout = Dropout(norm.model, name)

    def cost(self, share: Share) -> Cost:
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
        return super().cost(share) + Cost((Moved("sum", 3 * sums * normed, 3 * sums * normed, (sums, sums)),),
                                          saved, operands=normed * (read + shared) + ungathered * whole)

    def tileable(self) -> tuple[Any, ...]:
        return self.bodies

    def cut(self, limit: Limit) -> list[Layer]:
        bodies = [tile for body in self.bodies for tile in limit.tiles(body)]
        return [BranchTile(self, body, Tile(index, len(bodies))) for index, body in enumerate(bodies)]

    def forward(self, x_sBD: torch.Tensor, batch: Batch) -> torch.Tensor:
        normed, x = self.norm(x_sBD), x_sBD.detach()
        with self.context.saving.instead("norm", normed, lambda: self.norm(x)):
            parts = [body(normed, batch) for body in self.bodies]
        return x_sBD + self.dropout(sum(parts[1:], parts[0]), batch)


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

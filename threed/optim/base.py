"""The interface of an optimizer: the buffers that it keeps, and how it updates weights: element by element in
any range (Optimizer), or whole matrices (MatrixOptimizer).

Each optimizer is a file in this folder. From its buffers threed derives a plan's memory, files on the host
and the disk, the content of checkpoints, and predicted times. The planner reads the buffers, and imports no
torch: optimizers import torch inside `update`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from threed.base.quantity import BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from threed.schema import OptimizerConfig


class Buffer(NamedTuple):
    """A tensor as large as the weights, initially zeros."""

    name: str
    dtype: str = "fp32"


class OnDevice(NamedTuple):
    """One update's numbers, each of one element in fp32 on the device: the host does not know them yet."""

    found_inf: Tensor  # 1: the update changes nothing; else 0
    divisor: Tensor | None  # of gradients; None: 1
    lr: Tensor
    number: Tensor


class Update(NamedTuple):
    """One update's numbers."""

    config: OptimizerConfig
    lr: float
    number: int  # 1 for the first update (Adam's bias correction)
    decay: bool  # whether weight decay applies to the range
    scale: float  # gradients are multiplied by it
    mean: float = 0.0  # of a gradient that is a count: over the elements of its parameter
    threads: int = 0  # of native.c; 0: as many as torch's
    device: OnDevice | None = None  # given: instead of `lr`, `number` and `scale`, which are no numbers then
    shape: tuple[int, int] = (0, 0)  # of the matrix that the range is a part of (MatrixOptimizer.end)

    @property
    def weight_decay(self) -> float:
        return self.config.weight_decay if self.decay else 0.0


class View(NamedTuple):
    """A flat range of one unit's weights, [n]; weight decay applies to all of them or to none."""

    weight: Tensor  # updated in place
    grad: Tensor  # to be multiplied by the update's scale; may be overwritten
    state: Mapping[str, Tensor]  # buffers by name, updated in place


class AnyOptimizer:
    """What all optimizers tell."""

    buffers: tuple[Buffer, ...] = ()
    compiled = False  # whether native.c has a loop for it
    # Whether it can read its numbers from `Update.device`. Else the host waits for CLIP before each STEP on
    # the device, to give them to it.
    on_device = False

    @property
    def bytes(self) -> int:
        """Bytes of all buffers per element."""
        return sum(BYTES[buffer.dtype] for buffer in self.buffers)


class Optimizer(AnyOptimizer, ABC):
    """An elementwise optimizer: the update of an element depends on no other, so any range can be updated on
    its own."""

    needs_room = False  # whether `update` allocates tensors as large as its range; then ranges are short

    @abstractmethod
    def update(self, view: View, by: Update) -> None:
        """Update a range of fp32 weights with fp32 gradients."""

    def update_all(self, views: Sequence[View], by: Update) -> None:
        """Update several ranges of fp32 weights with fp32 gradients."""
        for view in views:
            self.update(view, by)

    def update_any(self, view: View, by: Update, copy: Tensor | None) -> bool:
        """A faster update, for the dtypes and devices that it supports. Writes the new weights to `copy`,
        too, if given. False: not supported, and nothing was done."""
        return False


class MatrixOptimizer(AnyOptimizer, ABC):
    """An optimizer of whole matrices. An update has three parts: `begin` and `end` work element by element on
    what a rank owns, and between them one rank has the whole of a matrix, which it turns. What is in no
    matrix, AdamW steps.

    `begin` and `end` are here those of Muon: one moment, a decay of weights, and a step by a learning rate
    that the shape of the matrix scales.
    """

    buffers = (Buffer("momentum"),)

    @abstractmethod
    def turn(self, matrix: Tensor, by: Update) -> Tensor:
        """A matrix [m, n], which may be overwritten, -> the direction of its step, [m, n], of the same dtype
        (optimizer.turn_dtype). Zeros must give zeros."""

    @abstractmethod
    def products(self, rows: int, columns: int, config: OptimizerConfig) -> Sequence[tuple[int, int, int]]:
        """What a turn costs: products of [m, k] by [k, n], as (m, n, k)."""

    def flops(self, rows: int, columns: int, config: OptimizerConfig) -> int:
        """Of the turn of a matrix."""
        return sum(2 * math.prod(product) for product in self.products(rows, columns, config))

    def begin(self, view: View, by: Update) -> Tensor:
        """Update the buffers of a range with fp32 gradients, [n] -> what is to be turned, [n] in fp32."""
        momentum, mean = by.config.momentum, view.state["momentum"]
        grad = view.grad.mul_(by.scale) if by.scale != 1.0 else view.grad
        mean.lerp_(grad, 1 - momentum)
        return grad.lerp(mean, momentum) if by.config.nesterov else mean

    def end(self, view: View, turned: Tensor, by: Update) -> None:
        """Step a range of fp32 weights, [n], by what was turned, [n] in optimizer.turn_dtype."""
        scale = self.scale(*by.shape, by.config)
        view.weight.mul_(1 - by.lr * by.weight_decay).add_(turned, alpha=-by.lr * scale)

    def scale(self, rows: int, columns: int, config: OptimizerConfig) -> float:
        """The factor of `end` on a turned (orthogonalized) matrix, besides the learning rate."""
        return (0.2 * math.sqrt(max(rows, columns)) if config.turn_scale == "match_rms_adamw"
                else math.sqrt(max(1, rows / columns)))

"""What an optimizer is: the buffers that it keeps, and how it updates a range of weights.

A file an optimizer. From what it keeps follow the bytes of a plan, files on the host and the disk, contents
of checkpoints and prices. The planner reads that: torch is imported inside `update`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from threed.schema import OptimizerConfig

if TYPE_CHECKING:
    from torch import Tensor

BYTES = {"fp32": 4, "bf16": 2}


class Buffer(NamedTuple):
    """As large as the weights; zeros at first."""

    name: str
    dtype: str = "fp32"


class Update(NamedTuple):
    """What all ranges of a step have in common."""

    config: OptimizerConfig
    lr: float
    number: int  # 1 for the first update (Adam's bias correction)
    decay: bool
    scale: float  # of the gradients

    @property
    def weight_decay(self) -> float:
        return self.config.weight_decay if self.decay else 0.0


class View(NamedTuple):
    """A flat range of one unit's weights, [n], all of them decayed or none."""

    weight: Tensor  # updated in place
    grad: Tensor  # to be multiplied by the update's scale; may be overwritten
    state: Mapping[str, Tensor]  # buffers by name, updated in place


class Optimizer(ABC):
    """One that works on elements: what it does to one depends on no other, so that any range may be updated
    by itself."""

    buffers: tuple[Buffer, ...] = ()
    needs_room = False  # whether `update` makes tensors as large as its range, which is then short
    compiled = False  # whether native.c has a loop for it

    @abstractmethod
    def update(self, view: View, by: Update) -> None:
        """Update a range of fp32 weights with fp32 gradients."""

    def update_any(self, view: View, by: Update, copy: Tensor | None) -> bool:
        """A shorter way, of dtypes that it chooses, which writes the weights into `copy`, too. False: nothing
        was done."""
        return False

    @property
    def bytes(self) -> int:
        """Of its buffers, an element."""
        return sum(BYTES[buffer.dtype] for buffer in self.buffers)

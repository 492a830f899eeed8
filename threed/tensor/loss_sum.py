"""What the layers of a rank have added to the loss of a global batch: five sums in fp64, [5], which CLIP adds
up over all ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch

NUMBERS = 5


class LossSum(NamedTuple):
    """The sums of all ranks, in the order of the tensor."""

    loss: float
    counting: float  # layers that have counted by themselves (`Out.count`)
    count: float  # what they have counted
    penalties: float  # how many
    penalty: float


def addend(loss: torch.Tensor | None, count: torch.Tensor | None, penalty: torch.Tensor | None,
           constants: torch.Tensor) -> torch.Tensor:
    """One micro-batch's. `constants`: [0, 1] in fp64, on the device: one from the host would be a copy."""
    zero, one = constants
    return torch.stack([zero if loss is None else loss.detach().double(),
                        zero if count is None else one, zero if count is None else count.double(),
                        zero if penalty is None else one,
                        zero if penalty is None else penalty.detach().double()])

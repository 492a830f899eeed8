"""Updates: how many steps and updates a run has made, and what follows from them: the loss scale and the
learning rate.

A step that is skipped is no update. Whether a step was taken, a GPU knows before the host does. So updates
are counted on the device for what updates weights there, and on the host when somebody asks.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from threed.features.zero.clip import Clipped
from threed.optim.base import OnDevice
from threed.optim.loss_scale import LossScaler
from threed.optim.rate import learning_rate
from threed.schema import Config


class Due(NamedTuple):
    """The numbers of a step's update, where they come from the host."""

    clipped: Clipped
    lr: float
    update: int  # its number, from 1


class UpdateCount:
    def __init__(self, config: Config, device: torch.device):
        self.config = config
        self.step_number = 0  # steps of the run so far
        self._scaler = LossScaler.of(config)
        # Updates of the steps that the host has counted, and the steps that it has not; and updates of all
        # steps, on the device.
        self._counted, self._uncounted = 0, deque[Clipped]()
        self._taken = torch.zeros((), device=device)

    @property
    def updates(self) -> int:
        """Optimizer updates so far, for Adam and the learning rate. The host waits for the last CLIP."""
        self._count(wait=True)
        return self._counted

    @updates.setter
    def updates(self, number: int) -> None:
        self._uncounted.clear()
        self._counted = number
        self._taken.fill_(number)

    @property
    def scaler(self) -> LossScaler:
        """The loss scale. The host waits for the last CLIP if it may have changed it."""
        if self._scaler.dynamic:
            self._count(wait=True)
        return self._scaler

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return self._rate(self.updates)

    def finish_step(self, clipped: Clipped) -> None:
        """Count a step, given its CLIP's result, and adapt the loss scale: on the device at once."""
        self.step_number += 1
        self._taken.add_(clipped.taken)
        self._uncounted.append(clipped)

    def due(self, clipped: Clipped) -> Due:
        """The numbers of this step's update. The host waits for the steps before it."""
        return Due(clipped, self.lr, self.updates + 1)

    def due_on_device(self, clipped: Clipped) -> OnDevice:
        """The numbers of this step's update. The host waits for nothing: the device chooses among the
        learning rates that may follow the steps that the host has not counted."""
        self._count(wait=False)
        lr = torch.full((), self._rate(self._counted), device=self._taken.device)
        for updates in range(self._counted + 1, self._counted + len(self._uncounted) + 1):
            lr.masked_fill_(self._taken >= updates, self._rate(updates))
        return OnDevice(clipped.found_inf, clipped.divisor, lr, self._taken + 1)

    def _rate(self, updates: int) -> float:
        return learning_rate(self.config.optimizer, updates, self.config.train.steps)

    def _count(self, wait: bool) -> None:
        """Count the steps whose result is known, or `wait` for all."""
        while self._uncounted and (wait or self._uncounted[0].known):
            finite = self._uncounted.popleft().finite
            self._counted += finite
            self._scaler.update(not finite)

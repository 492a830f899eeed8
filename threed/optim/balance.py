"""The rule for the biases of a router (DeepSeek-V3): an expert that gets fewer rows than the mean is chosen
more often from the next step on. Its "gradient" is a count of rows, which neither a loss scale nor clipping
scales.

    bias += rate x sign(mean - rows)
"""

from __future__ import annotations

from threed.optim.base import Optimizer, Update, View


class Balance(Optimizer):
    needs_room = on_device = True

    def update(self, view: View, by: Update) -> None:
        direction = (by.mean - view.grad).sign_()
        if by.device is not None:
            direction.masked_fill_(by.device.found_inf != 0, 0.0)
        view.weight.add_(direction, alpha=by.config.balance_rate)

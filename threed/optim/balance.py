"""The rule for the biases of a router (DeepSeek-V3): an expert that gets fewer rows than the mean is chosen
more often from the next step on. Its "gradient" is a count of rows, which neither a loss scale nor clipping
scales.

    bias += rate x sign(mean - rows)
"""

from __future__ import annotations

from threed.optim.base import Optimizer, Update, View


class Balance(Optimizer):
    needs_room = True

    def update(self, view: View, by: Update) -> None:
        view.weight.add_((by.mean - view.grad).sign_(), alpha=by.config.balance_rate)

"""SGD without momentum: it keeps no buffers. Weight decay is an L2 gradient."""

from __future__ import annotations

from threed.optim.base import Optimizer, Update, View


class SGD(Optimizer):
    def update(self, view: View, by: Update) -> None:
        view.weight.mul_(1 - by.lr * by.weight_decay).add_(view.grad, alpha=-by.lr * by.scale)

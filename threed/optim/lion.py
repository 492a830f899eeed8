"""Lion (Chen et al. 2023, algorithm 2): steps by the sign of a mean of gradients, and keeps one such mean."""

from __future__ import annotations

from threed.optim.base import Buffer, Optimizer, Update, View


class Lion(Optimizer):
    buffers = (Buffer("exp_avg"),)
    needs_room = True

    def update(self, view: View, by: Update) -> None:
        beta1, beta2 = by.config.betas
        mean, grad = view.state["exp_avg"], view.grad.mul_(by.scale)
        direction = mean.lerp(grad, 1 - beta1).sign_()
        view.weight.mul_(1 - by.lr * by.weight_decay).add_(direction, alpha=-by.lr)
        mean.lerp_(grad, 1 - beta2)

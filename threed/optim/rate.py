"""The learning rate of each step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threed.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of step 0, 1, ...: linear warm-up from lr / warmup_steps, then the schedule, then
    min_lr."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    stop = config.decay_steps if config.decay_steps is not None else total_steps
    start = config.warmup_steps
    if config.schedule == "wsd":
        length = config.wsd_decay_steps if config.wsd_decay_steps is not None else max(1, stop // 10)
        start = max(start, stop - length)
    if step >= stop:
        return config.min_lr
    share = max(0.0, (step - start) / max(1, stop - start))
    if config.schedule == "cosine":
        return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * share))
    return config.lr + (config.min_lr - config.lr) * share

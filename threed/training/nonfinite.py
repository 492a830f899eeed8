"""Nonfinite: what a run does about a step whose loss or gradients are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable

from threed.base.errors import RunError
from threed.base.quantity import many
from threed.engine.diagnose import find_nonfinite
from threed.engine.engine import Engine
from threed.features.zero.clip import Clipped
from threed.tensor.context import Batch
from threed.training.checkpoints import Checkpoints


class Skipped:
    """Counts the steps that changed no weight. All ranks see the same steps, and act alike."""

    def __init__(self, engine: Engine, checkpoints: Checkpoints, say: Callable[[str], None], total: int):
        self.total = total  # of the run
        self.in_a_row = 0  # the latest ones, without those by which a dynamic loss scale adapts
        self._engine, self._checkpoints, self._say = engine, checkpoints, say
        self._config = engine.config

    def look(self, number: int, clipped: Clipped, hopeless: bool, batch: Callable[[int], Batch]) -> None:
        """Look at step `number`, whose data are `batch`. `hopeless`: no smaller loss scale was possible.
        RunError where the run cannot go on."""
        if clipped.finite:
            self.in_a_row = 0
            return
        self.total += 1
        scaler = self._engine.zero.scaler
        loss_is_finite = math.isfinite(clipped.loss) and math.isfinite(clipped.penalty or 0.0)
        if loss_is_finite and not hopeless:  # a dynamic loss scale adapts
            self._say(f"step {number}: gradients overflowed at loss scale {clipped.loss_scale:.10g}: the "
                      f"step is skipped, {self.total} so far; the scale is now {scaler.scale:.10g}")
            return
        penalty = "" if clipped.penalty is None else f", penalty {clipped.penalty}"
        what = f"step {number}: not finite (loss {clipped.loss}{penalty}, gradient norm {clipped.grad_norm})"
        if self._config.train.on_nonfinite == "skip":
            self._leave_out(what)
            return
        self._checkpoints.finish_before_failing()
        # The learning rate's step number may differ: the repeated step updates nothing either.
        where = find_nonfinite(self._engine, batch)
        scale = "precision.min_loss_scale" if scaler.dynamic else "precision.loss_scale"
        high = scale if loss_is_finite and clipped.loss_scale > 1 else "optimizer.lr"
        raise RunError(f"{what}; {where}. No weight has changed for it. Lower {high}, or set "
                       "train.on_nonfinite=skip to leave such steps out")

    def _leave_out(self, what: str) -> None:
        self.in_a_row += 1
        self._say(f"{what}: the step is skipped, {self.total} so far")
        if self.in_a_row >= self._config.train.max_skipped > 0:
            self._checkpoints.finish_before_failing()
            in_a_row = many(self.in_a_row, "step")
            raise RunError(f"{what}: {in_a_row} in a row were left out (train.max_skipped): the "
                           "run learns nothing any more. Lower optimizer.lr, and go on from a checkpoint "
                           "before them")

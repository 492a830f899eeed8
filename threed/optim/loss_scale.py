"""The loss scale: the loss is multiplied by it and gradients are divided by it, since small fp16 gradients
would vanish. No torch.

Dynamic (Micikevicius et al. 2018, with the hysteresis of Megatron-LM and DeepSpeed): a step whose gradients
overflow is skipped; the `hysteresis`-th overflow, and every one after it, halves the scale; after
`loss_scale_window` good steps in a row the scale doubles and the count of overflows begins anew.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threed.schema import Config


@dataclass
class LossScaler:
    scale: float
    dynamic: bool
    window: int
    hysteresis: int
    least: float
    good: int = 0  # steps in a row without an overflow
    left: int = 0  # overflows until the scale is halved

    @classmethod
    def of(cls, config: Config) -> LossScaler:
        precision, fixed = config.precision, config.loss_scale
        return cls(precision.initial_loss_scale if fixed is None else fixed, fixed is None,
                   precision.loss_scale_window, precision.hysteresis, precision.min_loss_scale,
                   left=precision.hysteresis)

    @property
    def exhausted(self) -> bool:
        """Whether the scale cannot become smaller after an overflow."""
        return not self.dynamic or self.scale <= self.least

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step. `overflow`: whether its gradients overflowed."""
        if not self.dynamic:
            return
        if overflow:
            self.good = 0
            self.left -= 1
            if self.left <= 0:
                self.scale = max(self.scale / 2, self.least)
            return
        self.good += 1
        if self.good >= self.window:
            self.good, self.left = 0, self.hysteresis
            self.scale = min(2 * self.scale, 2.0**96)  # finite in fp32, whatever the window

    def state(self) -> dict[str, float]:
        """The numbers that a checkpoint keeps; none for a fixed scale, so that a later dynamic scale does not
        start from it."""
        return {key: value for key, value in asdict(self).items()
                if self.dynamic and key in ("scale", "good", "left")}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint's numbers. A fixed scale stays that of the config."""
        if self.dynamic and state:
            self.scale, self.good, self.left = float(state["scale"]), int(state["good"]), int(state["left"])

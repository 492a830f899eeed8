"""Spread: how evenly the rows of experts were spread over ranks and experts in a step."""

from __future__ import annotations

import torch

from threed.features.travel.arrivals import room_for

COLUMNS = ("imbalance", "load", "beyond", "chosen", "dropped")  # numbers of `Arrivals` that each rank reports


DROPPED = 0.1  # share of a step's choices above which what a capacity drops is said


class Spread:
    """Makes metrics from all ranks' numbers. The first step in which rows exceed the room is a warning, and
    so is the first in which a capacity drops many."""

    def __init__(self) -> None:
        self.warnings: list[str] = []  # of this step
        self._warned: set[str] = set()  # of what

    def look(self, imbalance: torch.Tensor, load: torch.Tensor, beyond: torch.Tensor, chosen: torch.Tensor,
             dropped: torch.Tensor) -> dict[str, float]:
        """Each rank's numbers, [ranks]. No metrics where no rows have come."""
        self.warnings, most = [], float(imbalance.max())
        if not most:
            return {}
        share = float(dropped.sum() / chosen.sum())
        if beyond.any():
            self._warn("room", f"rank {int(imbalance.argmax())} got {most:.2f} times the rows of balanced "
                       "ranks, more than memory is planned for. They take what they need; if memory ends, "
                       f"set {room_for(most)}, or balance the experts (model.balance)")
        if share > DROPPED:
            self._warn("dropped", f"warning: model.moe_capacity drops {share:.0%} of the choices of this "
                       "step: these tokens get nothing of the experts that they chose. Raise "
                       "model.moe_capacity, or balance the experts (model.balance); moe/dropped has the "
                       "share of each step")
        return {"moe/imbalance": most, "moe/load_max": float(load.max()), "moe/room": float(beyond.sum()),
                "moe/dropped": share}

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            self.warnings.append(text)

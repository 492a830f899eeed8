"""Spread: how evenly the rows of experts were spread over ranks and experts in a step."""

from __future__ import annotations

import torch

from threed.features.travel.arrivals import room_for

COLUMNS = ("imbalance", "load", "beyond", "chosen", "dropped")  # numbers of `Arrivals` that each rank reports


class Spread:
    """Makes metrics from all ranks' numbers. The first step in which rows exceed the room is a warning."""

    def __init__(self) -> None:
        self.warnings: list[str] = []  # of this step
        self._warned = False

    def look(self, imbalance: torch.Tensor, load: torch.Tensor, beyond: torch.Tensor, chosen: torch.Tensor,
             dropped: torch.Tensor) -> dict[str, float]:
        """Each rank's numbers, [ranks]. No metrics where no rows have come."""
        self.warnings, most = [], float(imbalance.max())
        if not most:
            return {}
        if beyond.any() and not self._warned:
            self._warned = True
            self.warnings.append(
                f"rank {int(imbalance.argmax())} got {most:.2f} times the rows of balanced ranks, more than "
                f"memory is planned for. They take what they need; if memory ends, set {room_for(most)}, or "
                "balance the experts (model.balance)")
        return {"moe/imbalance": most, "moe/load_max": float(load.max()), "moe/room": float(beyond.sum()),
                "moe/dropped": float(dropped.sum() / chosen.sum())}

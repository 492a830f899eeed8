"""Straggler: names the rank that takes longest for its own work. The rank is not ended: the run goes on at
its pace.

Ranks of one pipeline position run the same program, so their work takes equally long on machines that are
equally fast. Work is what a rank does by itself: its compute instructions, the optimizer, and copies to and
from its host and disk; it does not include waiting for other ranks. Compute includes collectives over tp, and
over cp where ranks share sequences, so such peers are as slow as the slowest of them, and are named together.
A position with a single replica has no peers to compare it with.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from threed.base.mesh import Mesh

WORK = ("compute", "optimizer", "offload")
SLOWER = 1.5  # times its peers' work: a warning is due,
STEPS = 10  # after so many steps in a row


def by_place(mesh: Mesh) -> torch.Tensor:
    """The ranks of a mesh, [position, replica, peer], int64; those at one place in ascending order."""
    ranks = torch.arange(mesh.size).view([mesh.sizes[axis] for axis in mesh.order])
    ranks = ranks.movedim((mesh.order.index("pp"), mesh.order.index("dp")), (0, 1))
    return ranks.reshape(mesh.sizes["pp"], mesh.sizes["dp"], -1)


class Stragglers:
    """Looks at each step's numbers. A step in which nobody is slow takes no loop over ranks: there may be
    thousands."""

    def __init__(self, mesh: Mesh):
        self.warnings: list[str] = []  # of this step
        self._ranks = by_place(mesh)
        # [position, replica]: how many steps in a row it has been slow
        self._slow = torch.zeros(self._ranks.shape[:2], dtype=torch.int64)

    def look(self, columns: Mapping[str, torch.Tensor]) -> dict[str, float | None]:
        """Metrics of a step, from each rank's seconds, [ranks], of each part in WORK. Sets `warnings`: ranks
        that have been slow for STEPS steps, and ranks that no longer are."""
        compute, optimizer, offload = (columns[what][self._ranks] for what in WORK)
        slowest_s, peer = (compute + optimizer + offload).max(dim=2)
        slowest = self._ranks.gather(2, peer.unsqueeze(2)).squeeze(2)
        # The lower median: of two groups, the faster one counts as normal.
        usual_s = slowest_s.median(dim=1, keepdim=True).values
        slower = torch.where(usual_s > 0, slowest_s / usual_s, 1.0)
        before, self._slow = self._slow, torch.where(slower > SLOWER, self._slow + 1, 0)
        self.warnings = []
        news = (self._slow == STEPS) | (before >= STEPS) & (self._slow == 0)
        for position, replica in news.nonzero().tolist():
            name = _name(position, replica, self._ranks[position, replica].tolist())
            if self._slow[position, replica]:
                seconds = {what: columns[what][slowest[position]] for what in WORK}
                times = float(slower[position, replica])
                self.warnings.append(_describe(name, position, replica, seconds, times))
            else:
                self.warnings.append(f"{name} no longer slow")
        worst = int(slower.argmax())
        return {"straggler/rank": float(slowest.view(-1)[worst]),
                "straggler/slower": float(slower.view(-1)[worst])}


def _describe(name: str, position: int, replica: int, seconds: Mapping[str, torch.Tensor],
              slower: float) -> str:
    """`seconds`: of each part, of the slowest rank of each replica at this position."""
    usual = {what: float(each.median()) for what, each in seconds.items()}
    own = {what: float(each[replica]) for what, each in seconds.items()}
    what = max(WORK, key=lambda part: own[part] - usual[part])
    return (f"warning: {name} slow for {STEPS} steps now: {slower:.1f} times the work of others at "
            f"pp{position}, most of it in {what} ({own[what]:.3g} s a step instead of {usual[what]:.3g} s). "
            "The run waits for it: look at the hardware there")


def _name(position: int, replica: int, ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks))
    one = len(ranks) == 1
    return f"{'rank' if one else 'ranks'} {some} (pp{position} dp{replica}) {'is' if one else 'are'}"

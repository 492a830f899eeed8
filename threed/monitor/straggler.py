"""Straggler: names the rank that takes longest for its own work. The rank is not ended: the run goes on at
its pace.

Ranks of one pipeline position run the same program, so their work takes equally long on machines that are
equally fast. Work is what a rank does by itself: its compute instructions, the optimizer, and copies to and
from its host and disk; it does not include waiting for other ranks. Compute includes tensor-parallel
collectives, so tp peers are as slow as the slowest of them, and are named together. A position with a single
tp group has no peers to compare it with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from threed.mesh import Mesh

WORK = ("compute", "optimizer", "offload")
SLOWER = 1.5  # times its peers' work: a warning is due,
STEPS = 10  # after so many steps in a row

Row = Mapping[str, float]


@dataclass
class Stragglers:
    """Looks at each step's rows."""

    mesh: Mesh
    warnings: list[str] = field(default_factory=list)  # of this step
    # (pp, dp) -> how many steps in a row it has been slow
    _slow: dict[tuple[int, int], int] = field(default_factory=dict)

    def look(self, rows: Sequence[Row]) -> dict[str, float | None]:
        """Metrics of a step, from each rank's row. Sets `warnings`: ranks that have been slow for STEPS
        steps, and ranks that no longer are."""
        groups: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.mesh.size):
            here = self.mesh.coordinate(rank)
            groups.setdefault((here.position, here.replica), []).append(rank)
        slowest = {key: max(ranks, key=lambda rank: _work_s(rows[rank])) for key, ranks in groups.items()}
        # The lower median: of two groups, the faster one counts as normal.
        usual = {pp: median_low([_work_s(rows[rank]) for key, rank in slowest.items() if key[0] == pp])
                 for pp in range(self.mesh.positions)}
        slower = {key: _work_s(rows[rank]) / usual[key[0]] if usual[key[0]] > 0 else 1.0
                  for key, rank in slowest.items()}
        self.warnings = []
        for key, ratio in slower.items():
            before, now = self._slow.get(key, 0), self._slow.get(key, 0) + 1 if ratio > SLOWER else 0
            self._slow[key] = now
            if now == STEPS:
                peers = [rows[rank] for other, rank in slowest.items() if other[0] == key[0]]
                self.warnings.append(_describe(key, groups[key], rows[slowest[key]], peers, ratio))
            elif before >= STEPS and not now:
                self.warnings.append(f"{_name(key, groups[key])} no longer slow")
        worst = max(slower, key=lambda key: slower[key])
        return {"straggler/rank": float(slowest[worst]), "straggler/slower": slower[worst]}


def _describe(key: tuple[int, int], ranks: list[int], row: Row, peers: Sequence[Row], slower: float) -> str:
    usual = {what: median_low([peer[what] for peer in peers]) for what in WORK}
    what = max(WORK, key=lambda part: row[part] - usual[part])
    return (f"warning: {_name(key, ranks)} slow for {STEPS} steps now: {slower:.1f} times the work of others "
            f"at pp{key[0]}, most of it in {what} ({row[what]:.3g} s a step instead of {usual[what]:.3g} s). "
            "The run waits for it: look at the hardware there")


def _name(key: tuple[int, int], ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks))
    one = len(ranks) == 1
    return f"{'rank' if one else 'ranks'} {some} (pp{key[0]} dp{key[1]}) {'is' if one else 'are'}"


def _work_s(row: Row) -> float:
    return sum(row[what] for what in WORK)

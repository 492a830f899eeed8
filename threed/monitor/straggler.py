"""Straggler: the rank that takes longest for its own work. It is alive, so the run goes on at its pace; it is
named, not ended.

Ranks of one pipeline position run the same program, so their work takes equally long on machines that are
equally fast. Work is what a rank does by itself: its compute instructions, the optimizer, and what it moves
to and from its host and disk; no waiting for other ranks. Tensor-parallel collectives lie inside compute, so
tp peers are as slow as the slowest of them, and are named together. A position with one such group has nobody
to be compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from threed.mesh import Mesh

WORK = ("compute", "optimizer", "offload")
SLOWER = 1.5  # times its peers: what is worth a word
STEPS = 10  # in a row

Row = Mapping[str, float]


@dataclass
class Stragglers:
    """Looks at each step's rows."""

    mesh: Mesh
    warnings: list[str] = field(default_factory=list)  # of this step
    _slow: dict[tuple[int, int], int] = field(default_factory=dict)  # (pp, dp) -> steps in a row that it has
    # been slow

    def look(self, rows: Sequence[Row]) -> dict[str, float | None]:
        """Metrics of a step, from what each rank reported. `warnings` tells of who has been slow for long
        enough, and of who no longer is."""
        groups: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.mesh.size):
            here = self.mesh.coordinate(rank)
            groups.setdefault((here.position, here.replica), []).append(rank)
        slowest = {key: max(ranks, key=lambda rank: _work_s(rows[rank])) for key, ranks in groups.items()}
        # The lower median: of two, the faster one is as it should be.
        usual = {pp: median_low([_work_s(rows[rank]) for key, rank in slowest.items() if key[0] == pp])
                 for pp in range(self.mesh.positions)}
        slower = {key: _work_s(rows[rank]) / usual[key[0]] if usual[key[0]] > 0 else 1.0 for key,
                  rank in slowest.items()}
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
    return (
        f"rank {some} (pp{key[0]} dp{key[1]}) is"
        if len(ranks) == 1
        else f"ranks {some} (pp{key[0]} dp{key[1]}) are"
    )


def _work_s(row: Row) -> float:
    return sum(row[what] for what in WORK)

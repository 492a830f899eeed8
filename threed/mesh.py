"""The mesh: which rank sits where, and with whom it talks. Plain arithmetic, no torch.

A rank has a coordinate on each axis: pp (pipeline position), dp (data-parallel replica), tp (tensor-parallel part).
`order` names the axes outermost first, as in Megatron-LM's default pp-dp-tp: neighbours on the last axis are
neighbouring ranks, so that tp groups stay inside a node.

Groups (each rank is in one of each):

    tp       same pp and dp         collectives inside FORWARD and BACKWARD
    dp       same pp and tp         REDUCE, GATHER
    shard    a run of `shard` members of dp   } sub-groups of dp: state is sharded within `shard`
    replica  the peers across shard groups    } and repeated across `replica`
    pp       same dp and tp         SEND, RECV
    tie      first and last of a pp group: the two ranks that hold a tied embedding (alone elsewhere)
    world    everybody              CLIP
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

AXES = ("pp", "dp", "tp")
GROUPS = ("tp", "dp", "shard", "replica", "pp", "tie", "world")


class Coordinate(NamedTuple):
    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    pp: int = 1
    dp: int = 1
    tp: int = 1
    order: tuple[str, ...] = AXES  # outermost first
    shard: int | None = None  # ranks a shard group; None: all of dp

    def __post_init__(self) -> None:
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"axis order {self.order} must name pp, dp and tp once each")
        if min(self.pp, self.dp, self.tp) < 1:
            raise ValueError(f"axes must have at least one rank: pp={self.pp} dp={self.dp} tp={self.tp}")
        if self.dp % self.shard_size:
            raise ValueError(f"dp={self.dp} is not divisible by the shard size {self.shard_size}")

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def shard_size(self) -> int:
        return self.dp if self.shard is None else self.shard

    def coordinate(self, rank: int) -> Coordinate:
        """Rank -> (pp, dp, tp)."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside the mesh of {self.size}")
        found = {}
        for axis in reversed(self.order):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return Coordinate(**found)

    def rank(self, pp: int = 0, dp: int = 0, tp: int = 0) -> int:
        """(pp, dp, tp) -> rank."""
        rank = 0
        for axis in self.order:
            rank = rank * getattr(self, axis) + {"pp": pp, "dp": dp, "tp": tp}[axis]
        return rank

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group called `name` that `rank` is in, in the order of their coordinate."""
        pp, dp, tp = self.coordinate(rank)
        if name == "world":
            return tuple(range(self.size))
        if name == "tp":
            return tuple(self.rank(pp, dp, other) for other in range(self.tp))
        if name == "dp":
            return tuple(self.rank(pp, other, tp) for other in range(self.dp))
        if name == "shard":
            first = dp - dp % self.shard_size
            return tuple(self.rank(pp, first + other, tp) for other in range(self.shard_size))
        if name == "replica":
            return tuple(self.rank(pp, other, tp) for other in range(dp % self.shard_size, self.dp, self.shard_size))
        if name == "pp":
            return tuple(self.rank(other, dp, tp) for other in range(self.pp))
        if name == "tie":
            if pp not in (0, self.pp - 1):
                return (rank,)
            return tuple(self.rank(other, dp, tp) for other in sorted({0, self.pp - 1}))
        raise ValueError(f"no group called {name}; there are {', '.join(GROUPS)}")

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """All groups called `name`, by their least rank: every rank makes them in this order."""
        return sorted({self.group(name, rank) for rank in range(self.size)})

    def draw(self, most: int = 64) -> str:
        """Who sits where: a row for each pipeline position and replica, a column for each tp part."""
        cells = {self.coordinate(rank): f"r{rank}" for rank in range(self.size)}
        width = max(map(len, (*cells.values(), f"tp{self.tp - 1}")))
        lines = [f"{self.size} ranks = pp {self.pp} x dp {self.dp} x tp {self.tp}, order {'-'.join(self.order)}",
                 " " * 12 + "  ".join(f"tp{tp}".ljust(width) for tp in range(self.tp))]
        rows = [(pp, dp) for pp in range(self.pp) for dp in range(self.dp)]
        for pp, dp in rows[:most]:
            row = "  ".join(cells[Coordinate(pp, dp, tp)].ljust(width) for tp in range(self.tp))
            lines.append(f"pp{pp} dp{dp}".ljust(12) + row)
        if len(rows) > most:
            lines.append(f"... and {len(rows) - most} rows more")
        return "\n".join(line.rstrip() for line in lines)

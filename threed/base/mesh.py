"""The mesh: the coordinate of each rank, and the groups of ranks that communicate. Plain arithmetic, no
torch.

A rank has a coordinate on each axis. `order` names the axes outermost first, as in Megatron-LM's default
pp-dp-tp: neighbours on the last axis are neighbouring ranks, so that tp groups stay inside a node.

All other modules read the tables AXES (base/axes), FOLDS and GROUPS: a new axis is a row in AXES, and a row
in GROUPS for each group of ranks that it brings. The group with the name of an axis is all ranks along it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import NamedTuple

from threed.base.axes import AXES, DATA, QUIET, axes_of, data_axes, in_full, shown, spanned
from threed.base.quantity import many


class GroupRow(NamedTuple):
    """A kind of group. Each rank is in one group of each kind."""

    # The axes that the group spans, or what ranks along them divide, which is all such axes; None: all.
    over: tuple[str, ...] | None
    counts: str  # the axis under which its bytes are counted
    lane: str = ""  # of its collectives; empty: it has messages instead, each channel on a lane of its own
    # Its members among all ranks along its axes, which are numbered in the order of the mesh, the last axis
    # fastest: (mesh, own number) -> numbers; None: all.
    members: Callable[[Mesh, int], Iterable[int]] | None = None
    needed: Callable[[Mesh], bool] = lambda mesh: True  # False: another group has the same ranks

    @property
    def axes(self) -> tuple[str, ...] | None:
        """The axes that it spans; None: all."""
        return None if self.over is None else spanned(self.over)

    @property
    def across_positions(self) -> bool:
        """Whether its members sit at several pipeline positions, and so run different programs."""
        return self.axes is None or "pp" in self.axes


def in_runs(length: Callable[[Mesh], int]) -> Callable[[Mesh, int], range]:
    """A `GroupRow.members`: each group is a run of `length(mesh)` consecutive ranks."""
    def members(mesh: Mesh, at: int) -> range:
        first = at - at % length(mesh)
        return range(first, first + length(mesh))

    return members


def across_runs(length: Callable[[Mesh], int], over: tuple[str, ...]) -> Callable[[Mesh, int], range]:
    """Members are the ranks at the same place in each run. `over`: the row's."""
    def members(mesh: Mesh, at: int) -> range:
        return range(at % length(mesh), mesh.count(spanned(over)), length(mesh))

    return members


def _shards(mesh: Mesh) -> int:
    return mesh.shard_size


def _owners(mesh: Mesh, at: int) -> list[int]:
    """The ranks of a position whose data ranks are in one shard group with those of the rank `at`."""
    axes = GROUPS[OWNERS].axes or ()

    def run(number: int) -> int:
        return mesh.number(mesh.at(number, axes), data_axes()) // mesh.shard_size

    own = run(at)
    return [each for each in range(mesh.count(axes)) if run(each) == own]


OWNERS = "owners"


GROUPS: dict[str, GroupRow] = {
    # Collectives inside FORWARD and BACKWARD.
    "tp": GroupRow(("tp",), "tp", "compute"),
    "cp": GroupRow(("cp",), "cp", "compute"),
    # GATHER and REDUCE of keys and values, beside the computation (parallel.cp_overlap).
    "keys": GroupRow(("cp",), "cp", "keys", needed=lambda mesh: "keys" in mesh.extra),
    # REDUCE and GATHER.
    "dp": GroupRow(DATA, "dp", "dp"),
    # A run of `shard` members of dp: state is sharded within it,
    "shard": GroupRow(DATA, "dp", "dp", in_runs(_shards), lambda mesh: mesh.has_copies),
    # and repeated across "replica", the ranks at the same place in each run.
    "replica": GroupRow(DATA, "dp", "dp", across_runs(_shards, DATA), lambda mesh: mesh.has_copies),
    # EXCHANGE of matrices for their owners, which turn them: ranks that together have a parameter unit.
    OWNERS: GroupRow((*DATA, "parameters"), "dp", "owners", _owners, lambda mesh: OWNERS in mesh.extra),
    # SEND and RECV.
    "pp": GroupRow(("pp",), "pp"),
    # The first and the last position, which hold a tied embedding; any other position is alone in its group.
    "tie": GroupRow(("pp",), "pp", "tie",
                    lambda mesh, at: (sorted({0, mesh.positions - 1}) if at in (0, mesh.positions - 1)
                                      else (at,))),
    # CLIP.
    "world": GroupRow(None, "world", "compute"),
}


class Fold(NamedTuple):
    """The ranks of a position numbered in a second way, for the parameters that are cut over its axis: those
    along `along` together are runs of consecutive ranks, and each run has all of these parameters. Each of
    these ranks must have tokens of its own. The gradient is summed over all ranks with equal parts: of other
    runs, and along axes of data that the fold does not name."""

    along: tuple[str, ...]  # axes, or what ranks along them divide, which is all such axes
    over: str  # the group of ranks with equal parts, over which these parameters are sharded

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which runs are."""
        return spanned(self.along)

    @property
    def spans(self) -> tuple[str, ...]:
        """The axes of the groups of ranks with equal parts."""
        return spanned((*self.along, *DATA))

    @property
    def shard(self) -> str:
        """Their shard groups, where there are several."""
        return f"{self.over}_shard"

    @property
    def replica(self) -> str:
        """The group of ranks with copies of a shard."""
        return f"{self.over}_replica"

    def group(self, mesh: Mesh) -> str:
        """The name of the group over which the fold's parameters are sharded: `shard` if the mesh has several
        shard groups, else `over`."""
        return self.shard if mesh.has_copies else self.over

    def ranks(self, mesh: Mesh, axis: str) -> int:
        """In that group."""
        return mesh.count(self.spans) // mesh.folds[axis] // mesh.copies


# Derived axis, the place in a run, whose key in parallel.* is its ranks -> its fold. `fold_groups` gives the
# rows of GROUPS that it needs.
FOLDS: dict[str, Fold] = {"ep": Fold((*DATA, "tp"), "edp")}  # experts


def fold_groups(axis: str) -> dict[str, GroupRow]:
    """The runs of a fold, on a lane of their own, and the ranks with equal parts, all of them and in shard
    groups."""
    fold = FOLDS[axis]
    along, over = fold
    spans = (*along, *DATA)

    def equal(mesh: Mesh, at: int) -> list[int]:
        """The ranks with the parts of the rank `at`."""
        left_out = [each for each in fold.spans if each not in fold.axes]
        runs = range(mesh.number(mesh.at(at, fold.spans), fold.axes) % mesh.folds[axis],
                     mesh.count(fold.axes), mesh.folds[axis])
        others = [mesh.at(number, left_out) for number in range(mesh.count(left_out))]
        return sorted(mesh.number({**other, **mesh.at(number, fold.axes)}, fold.spans)
                      for number in runs for other in others)

    def shards(mesh: Mesh, at: int) -> list[int]:
        alike, length = equal(mesh, at), fold.ranks(mesh, axis)
        first = alike.index(at) // length * length
        return alike[first:first + length]

    def copies(mesh: Mesh, at: int) -> list[int]:
        alike, length = equal(mesh, at), fold.ranks(mesh, axis)
        return alike[alike.index(at) % length::length]

    def used(mesh: Mesh) -> bool:
        return axis in mesh.folded

    def copied(mesh: Mesh) -> bool:
        return used(mesh) and mesh.has_copies

    return {axis: GroupRow(along, axis, axis, in_runs(lambda mesh: mesh.folds[axis]), used),
            over: GroupRow(spans, "dp", "dp", equal, used),
            fold.shard: GroupRow(spans, "dp", "dp", shards, copied),
            fold.replica: GroupRow(spans, "dp", "dp", copies, copied)}


GROUPS |= fold_groups("ep")


def fold_problem(axis: str, size: int, sizes: Mapping[str, int], shard_size: int) -> str:
    """Why a fold cannot have runs of `size` ranks; "" where it can. `sizes`: of the other axes."""
    fold = FOLDS[axis]
    if "pp" in fold.axes:
        return "is of a fold along pp, whose ranks have other layers: FOLDS takes axes of one position"
    runs, spans, data = ([each for each in axes if each not in QUIET or sizes[each] > 1]
                         for axes in (fold.axes, fold.spans, data_axes()))
    ranks, all_ranks, copies = (prod(sizes[each] for each in axes) for axes in (runs, spans, data))
    copies //= shard_size
    if size < 1 or ranks % size:
        return f"does not divide the {ranks} ranks of {' x '.join(runs)}: take a divisor of {ranks}"
    if (equal := all_ranks // size) % copies:
        return (f"leaves {equal} of the ranks of {' x '.join(spans)} with equal parts, which the "
                f"{copies} shard groups do not divide: take fewer of either (zero.shard_size)")
    return ""


@dataclass(frozen=True)
class Coordinate:
    """A rank's coordinates."""

    on: Mapping[str, int]  # axis -> coordinate; also on those of FOLDS
    shown: Sequence[str] = field(default=(), compare=False)  # axes that its text has; none: all

    @property
    def position(self) -> int:
        """Its pipeline position."""
        return self.on["pp"]

    @property
    def replica(self) -> int:
        """Its part of the batch."""
        return self.on["dp"]

    def is_first(self, axes: Iterable[str]) -> bool:
        """Whether its coordinate is 0 on each of these axes."""
        return not any(self.on[axis] for axis in axes)

    def __str__(self) -> str:
        return " ".join(f"{axis}{self.on[axis]}" for axis in self.shown or AXES)


class Mesh:
    """A mesh of ranks.

    `order`: its axes, outermost first; empty: as in AXES. `shard`: ranks a shard group; None: all of dp.
    `sizes`: ranks along each axis, those of FOLDS included, 1 where an axis is not named. `folded`: the axes
    of FOLDS over which the model has parameters; None: those in `sizes`. `forms`: what the text says of an
    axis besides its size. `extra`: groups that it needs besides those of all meshes. ValueError where they do
    not fit together.
    """

    def __init__(self, order: tuple[str, ...] = (), shard: int | None = None,
                 folded: Collection[str] | None = None, forms: Mapping[str, str] | None = None,
                 extra: Collection[str] = (), **sizes: int):
        self.order, self._forms = in_full(order or tuple(AXES)), forms or {}
        self.extra = frozenset(extra)
        self.sizes: dict[str, int] = {axis: sizes.pop(axis, 1) for axis in AXES}
        self.folded = frozenset(axis for axis in FOLDS if axis in (sizes if folded is None else folded))
        self.folds: dict[str, int] = {axis: sizes.pop(axis, 1) for axis in FOLDS}
        if sizes or sorted(self.order) != sorted(AXES):
            raise ValueError(f"axis order {'-'.join((*self.order, *sizes))} must name {', '.join(AXES)} once "
                             "each")
        if min(self.sizes.values()) < 1:
            raise ValueError(f"axes must have at least one rank: {self.text('=')}")
        self.shard_size = self.data_ranks if shard is None else shard
        if self.data_ranks % self.shard_size:
            raise ValueError(f"dp={self.data_ranks} is not divisible by the shard size {self.shard_size}")
        for axis, size in self.folds.items():
            if axis in self.folded and (problem := fold_problem(axis, size, self.sizes, self.shard_size)):
                raise ValueError(f"{axis}={size} {problem}")

    @property
    def size(self) -> int:
        return prod(self.sizes.values())

    @property
    def data_ranks(self) -> int:
        """Ranks of the group dp."""
        return self.count(data_axes())

    @property
    def positions(self) -> int:
        """Pipeline positions."""
        return self.sizes["pp"]

    @property
    def has_copies(self) -> bool:
        """Whether dp is cut into several shard groups, each with a copy of what is sharded."""
        return self.shard_size < self.data_ranks

    @property
    def copies(self) -> int:
        """How many shard groups dp has (HSDP's replicas). Each has a copy of what is sharded."""
        return self.data_ranks // self.shard_size

    @property
    def shard_group(self) -> str:
        """The name of the group over which state is sharded."""
        return "shard" if self.has_copies else "dp"

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of a rank."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside the mesh of {self.size}")
        at = self.at(rank, self.order)
        here = Coordinate({axis: at[axis] for axis in AXES}, shown(self.sizes))
        if not self.folded:
            return here
        folded = {axis: self.number(here.on, FOLDS[axis].axes) % self.folds[axis] for axis in self.folded}
        return Coordinate({**here.on, **folded}, here.shown)

    def rank(self, **at: int) -> int:
        """The rank with these coordinates, 0 on axes that are not named."""
        rank = 0
        for axis in self.order:
            rank = rank * self.sizes[axis] + at.get(axis, 0)
        return rank

    def tokens_of(self, here: Coordinate) -> tuple[int, int]:
        """(index, count) of a rank's part of the tokens of a sample."""
        axes = axes_of("tokens")
        return self.number(here.on, axes), self.count(axes)

    def group(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group called `name` that `rank` is in, in the order of their coordinates."""
        if name not in GROUPS:
            raise ValueError(f"no group called {name}; there are {', '.join(GROUPS)}")
        row = GROUPS[name]
        axes = row.axes
        if axes is None:
            return tuple(range(self.size))
        own, steps = self.number(self.coordinate(rank).on, axes), self._steps(axes)
        first = rank - steps[own]
        members = range(len(steps)) if row.members is None else row.members(self, own)
        return tuple(first + steps[number] for number in members)

    def _steps(self, axes: Collection[str]) -> list[int]:
        """By number among the ranks along these axes: how much further a rank is than the first of them."""
        steps, step = [0], 1
        for axis in reversed(self.order):
            if axis in axes:
                steps = [at * step + each for at in range(self.sizes[axis]) for each in steps]
            step *= self.sizes[axis]
        return steps

    def count(self, axes: Iterable[str]) -> int:
        """Ranks along these axes together."""
        return prod(self.sizes[axis] for axis in axes)

    def number(self, on: Mapping[str, int], axes: Collection[str]) -> int:
        """Of the rank with these coordinates among all ranks along these axes, in the order of the mesh."""
        number = 0
        for axis in self._in_order(axes):
            number = number * self.sizes[axis] + on[axis]
        return number

    def at(self, number: int, axes: Collection[str]) -> dict[str, int]:
        """The coordinates on these axes of the rank with this number among those along them."""
        at = {}
        for axis in reversed(self._in_order(axes)):
            number, at[axis] = divmod(number, self.sizes[axis])
        return at

    def _in_order(self, axes: Collection[str]) -> list[str]:
        return [axis for axis in self.order if axis in axes]

    def groups(self, name: str) -> list[tuple[int, ...]]:
        """All groups called `name`, sorted by their least rank: every rank opens them in this order."""
        groups: list[tuple[int, ...]] = []
        seen: set[int] = set()
        for rank in range(self.size):
            if rank not in seen:
                groups.append(self.group(name, rank))
                seen.update(groups[-1])
        return groups

    def text(self, joined: str = " ") -> str:
        """The sizes as text: pp 2 x dp 2 x tp 1, or pp 2 x dp 2 x cp 2 (keys) x tp 1."""
        forms = {axis: f" ({form})" for axis, form in self._forms.items()}
        return " x ".join(f"{axis}{joined}{self.sizes[axis]}{forms.get(axis, '')}"
                          for axis in shown(self.sizes))

    def draw(self, most: int = 24) -> str:
        """A table of ranks: a column for each coordinate on the last of AXES, a row for each coordinate on
        the others; no more than `most` rows."""
        cells = {str(self.coordinate(rank)): f"r{rank}" for rank in range(self.size)}
        *others, last = shown(self.sizes)
        order = "-".join(axis for axis in self.order if axis in shown(self.sizes))
        heads = [f"{last}{at}" for at in range(self.sizes[last])]
        width = max(map(len, (*cells.values(), *heads)))
        lines = [f"{many(self.size, 'rank')} = {self.text()}, order {order}",
                 " " * 12 + "  ".join(head.ljust(width) for head in heads)]
        rows = [" ".join(f"{axis}{at}" for axis, at in zip(others, row, strict=True))
                for row in product(*(range(self.sizes[axis]) for axis in others))]
        for row in rows[:most]:
            lines.append(row.ljust(12) + "  ".join(cells[f"{row} {head}"].ljust(width) for head in heads))
        if len(rows) > most:
            lines.append(f"... and {len(rows) - most} rows more")
        return "\n".join(line.rstrip() for line in lines)

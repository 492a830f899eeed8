"""The mesh is pure arithmetic: any fault here sends bytes to the wrong rank."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from threed.base.axes import AXES
from threed.base.mesh import GROUPS, GroupRow, Mesh, across_runs, in_runs

MESHES = [*(Mesh(order, pp=pp, dp=dp, tp=tp) for pp, dp, tp in product((1, 2, 3, 4), (1, 2, 4), (1, 2, 3))
            for order in permutations(("pp", "dp", "tp"))),
          *(Mesh(order, pp=2, dp=3, cp=2, tp=2) for order in permutations(AXES))]


@pytest.mark.parametrize("order", list(permutations(AXES)))
def test_round_trip(order):
    """Two ranks at one coordinate, or a rank that does not come back to itself."""
    mesh = Mesh(order, pp=3, dp=4, cp=2, tp=2)
    coordinates = [mesh.coordinate(rank) for rank in range(mesh.size)]
    assert [mesh.rank(**here.on) for here in coordinates] == list(range(48))
    assert {tuple(here.on.values()) for here in coordinates} == set(
        product(range(3), range(4), range(2), range(2)))
    step = [axis for axis in AXES if coordinates[0].on[axis] != coordinates[1].on[axis]]
    assert step == [order[-1]], "neighbouring ranks are neighbours on the last axis"


def test_default_order_is_megatrons():
    """tp groups that are not neighbouring ranks leave the node."""
    mesh = Mesh(pp=2, dp=2, tp=2)
    assert mesh.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.groups("tie") == mesh.groups("pp") and mesh.groups("world") == [tuple(range(8))]


@pytest.mark.parametrize("name", GROUPS)
def test_groups_partition_the_world(name):
    """A rank in two groups, or in none, or members that do not agree on their order: a hang."""
    for mesh in MESHES:
        groups = mesh.groups(name)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        assert all(mesh.group(name, rank) == group for group in groups for rank in group)
        if name in AXES:
            axes = GROUPS[name].axes or ()
            for group in groups:  # (dp is of all ranks with other tokens: those along cp, too)
                along = [tuple(mesh.coordinate(rank).on[axis] for axis in axes) for rank in group]
                assert along == sorted(along) or mesh.sizes["cp"] > 1, "out of order"
                assert sorted(along) == [*product(*(range(mesh.sizes[axis]) for axis in axes))]


def test_tie_joins_first_and_last_position():
    """The two halves of a tied embedding's gradient are never added."""
    for mesh in MESHES:
        for rank in range(mesh.size):
            here = mesh.coordinate(rank)
            ends = {mesh.rank(**{**here.on, "pp": 0}), mesh.rank(**{**here.on, "pp": mesh.positions - 1})}
            at_an_end = here.position in (0, mesh.positions - 1)
            assert set(mesh.group("tie", rank)) == (ends if at_an_end else {rank})


def test_shard_and_replica_cut_dp():
    """State that is sharded within one sub-group of dp and repeated across the other: together they are
    dp."""
    mesh = Mesh(pp=2, dp=6, tp=2, shard=3)
    rank, here = mesh.rank(pp=1, dp=4, tp=1), mesh.coordinate(mesh.rank(pp=1, dp=4, tp=1))
    assert mesh.group("shard", rank) == tuple(mesh.rank(**{**here.on, "dp": dp}) for dp in (3, 4, 5))
    assert mesh.group("replica", rank) == tuple(mesh.rank(**{**here.on, "dp": dp}) for dp in (1, 4))
    for rank in range(mesh.size):
        shard, replica, dp = (set(mesh.group(name, rank)) for name in ("shard", "replica", "dp"))
        assert shard & replica == {rank} and len(shard) * len(replica) == len(dp)
        assert set().union(*(mesh.group("replica", other) for other in shard)) == dp
    whole = Mesh(dp=4)
    assert whole.group("shard", 2) == whole.group("dp", 2) and whole.group("replica", 2) == (2,)


@pytest.mark.parametrize("order", list(permutations(AXES)))
def test_runs_of_the_ranks_along_two_axes(order, monkeypatch):
    """A run of dp x tp and the ranks at the same place of each: experts in the wrong order, or on two ranks
    that hold the same."""
    axes = "tp", "dp"  # the mesh's order counts, not this one
    monkeypatch.setitem(GROUPS, "run", GroupRow(axes, "dp", "dp", in_runs(lambda mesh: 4)))
    monkeypatch.setitem(GROUPS, "place", GroupRow(axes, "dp", "dp", across_runs(lambda mesh: 4, axes)))
    mesh = Mesh(order, pp=2, dp=4, tp=2)
    for rank in range(mesh.size):
        here = mesh.coordinate(rank)
        number = mesh.number(here.on, axes)
        assert mesh.at(number, axes) == {axis: here.on[axis] for axis in axes}
        run, place = (mesh.group(name, rank) for name in ("run", "place"))
        of = [mesh.number(mesh.coordinate(other).on, axes) for other in run]
        assert of == [*range(number // 4 * 4, number // 4 * 4 + 4)] and run[number % 4] == rank
        assert place[number // 4] == rank and set(run) & set(place) == {rank} and len(place) == 2
        assert {mesh.coordinate(other).position for other in (*run, *place)} == {here.position}
    inner = [axis for axis in order if axis in axes][-1]
    assert [mesh.coordinate(rank).on[inner] for rank in mesh.group("run", 0)][:2] == [0, 1]
    for name in ("run", "place"):
        assert sorted(rank for group in mesh.groups(name) for rank in group) == list(range(mesh.size))


def test_draw():
    """A picture in which a rank is missing or sits elsewhere."""
    assert Mesh(pp=2, dp=1, tp=2).draw().splitlines() == [
        "4 ranks = pp 2 x dp 1 x tp 2, order pp-dp-tp",
        "            tp0  tp1",
        "pp0 dp0     r0   r1",
        "pp1 dp0     r2   r3"]
    large = Mesh(pp=16, dp=32, tp=8).draw()
    assert len(large.splitlines()) == 27 and large.endswith("... and 488 rows more")


@pytest.mark.parametrize("wrong", [
    {"order": ("pp", "dp")}, {"order": ("pp", "dp", "dp")}, {"tp": 0}, {"dp": 4, "shard": 3}, {"ep": 2}])
def test_impossible_meshes(wrong):
    """An impossible mesh is refused, not built."""
    with pytest.raises(ValueError):
        Mesh(**wrong)


def test_unknown_rank_and_group():
    """A rank outside the mesh gets no coordinate, a group that does not exist no members."""
    with pytest.raises(ValueError, match="rank 4 is outside the mesh of 4"):
        Mesh(pp=2, dp=2).coordinate(4)
    with pytest.raises(ValueError, match="no group called xp"):
        Mesh().group("xp", 0)


def test_groups_of_a_large_mesh(monkeypatch):
    """Listing them asks once for each group, not once for each rank: every rank does it at its start. (To
    hash the world once a rank took a second of 10,240 ranks.)"""
    class Unhashed(tuple):
        __hash__ = None  # pyright: ignore[reportAssignmentType]

    mesh, asked, original = Mesh(pp=4, dp=8, tp=8, shard=4), [], Mesh.group

    def group(self: Mesh, name: str, rank: int) -> tuple[int, ...]:
        asked.append(name)
        return Unhashed(original(self, name, rank))

    monkeypatch.setattr(Mesh, "group", group)
    for name in GROUPS:
        groups = mesh.groups(name)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        assert groups == sorted(groups) and len(asked) == len(groups)
        asked.clear()

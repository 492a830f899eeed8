"""Who is slow is named, with what and once it persists; who waits for a slow one is not."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from threed.base.mesh import Mesh
from threed.monitor.straggler import STEPS, Stragglers, by_place

MESH = Mesh(pp=2, dp=3, tp=2)


def seconds(slow: dict[int, float], what: str = "compute", mesh: Mesh = MESH) -> dict[str, torch.Tensor]:
    """Every rank computes 1 s, at position 1 twice as long; slow ranks take a multiple of that, and the
    others wait for them."""
    columns = {name: torch.full((mesh.size,), each, dtype=torch.float64)
               for name, each in {"compute": 1.0, "optimizer": 0.2, "offload": 0.1, "p2p_wait": 5.0}.items()}
    for rank in range(mesh.size):
        columns["compute"][rank] += mesh.coordinate(rank).position
        columns[what][rank] *= slow.get(rank, 1.0)
    return columns


def test_evenly_fast():
    """Positions with more work, and waiting, make nobody slow."""
    watch = Stragglers(MESH)
    for _ in range(2 * STEPS):
        assert watch.look(seconds({}))["straggler/slower"] == 1.0 and not watch.warnings


@pytest.mark.parametrize("what, times", [("compute", 3.0), ("optimizer", 30.0), ("offload", 90.0)])
def test_it_persists(what, times):
    """A slow rank is in each step's metrics; a line names it at the tenth step, at no other, and says when it
    is over."""
    watch = Stragglers(MESH)
    rank = MESH.rank(pp=1, dp=2)
    for step in range(1, 3 * STEPS):
        metrics = watch.look(seconds({rank: times}, what))
        assert metrics["straggler/rank"] == rank and (metrics["straggler/slower"] or 0) > 1.5
        assert len(watch.warnings) == (step == STEPS)
        if watch.warnings:
            assert f"ranks {rank}, {rank + 1} (pp1 dp2) are slow" in watch.warnings[0]
            assert f"most of it in {what}" in watch.warnings[0]
    watch.look(seconds({}))
    assert watch.warnings == [f"ranks {rank}, {rank + 1} (pp1 dp2) are no longer slow"]


def test_ranks_that_share_sequences_are_named_together():
    """They wait for each other inside compute, as tp peers do, wherever cp is in the order of the axes."""
    for order in (("pp", "dp", "cp", "tp"), ("cp", "pp", "dp", "tp")):
        mesh = Mesh(pp=1, dp=3, cp=2, order=order)
        slow = [mesh.rank(dp=1, cp=cp) for cp in range(2)]
        watch = Stragglers(mesh)
        for _ in range(STEPS):
            metrics = watch.look(seconds(dict.fromkeys(slow, 2.0), mesh=mesh))
        assert metrics["straggler/rank"] in slow
        assert f"ranks {slow[0]}, {slow[1]} (pp0 dp1) are slow" in watch.warnings[0]


def test_tp_peers_take_turns():
    """tp peers wait for each other inside compute: which of them is measured slower changes, and they are
    slow all the same."""
    watch, said = Stragglers(MESH), []
    for step in range(STEPS):
        watch.look(seconds({0: 3.0 + step % 2, 1: 4.0 - step % 2}))
        said += watch.warnings
    assert len(said) == 1 and "ranks 0, 1 (pp0 dp0)" in said[0]


def test_now_and_then():
    """A rank that is slow every other step is not worth a line."""
    watch = Stragglers(MESH)
    for step in range(5 * STEPS):
        watch.look(seconds({0: 3.0} if step % 3 else {}))
        assert not watch.warnings


def test_two_and_one():
    """Of two ranks the faster one has the expected time; a single rank is not compared."""
    two = Mesh(pp=1, dp=2, tp=1)
    metrics = Stragglers(two).look(seconds({1: 2.0}, mesh=two))
    assert metrics == {"straggler/rank": 1.0, "straggler/slower": pytest.approx(2.3 / 1.3)}
    one = Mesh(pp=2, dp=1, tp=1)
    assert Stragglers(one).look(seconds({1: 9.0}, mesh=one))["straggler/slower"] == 1.0


@pytest.mark.parametrize("order", [*permutations(("pp", "dp", "tp"))], ids="-".join)
def test_ranks_are_found_on_any_mesh(order):
    mesh = Mesh(order, pp=2, dp=3, tp=4)
    for position, replicas in enumerate(by_place(mesh).tolist()):
        for replica, ranks in enumerate(replicas):
            assert ranks == sorted(ranks) == sorted(mesh.rank(pp=position, dp=replica, tp=at)
                                                    for at in range(4))

"""Loopback's own promises: it is what numerics are tested on."""

from __future__ import annotations

import pytest
import torch

from tests.harness import tiny
from threed.engine.loopback import run_loopback
from threed.planner import make_mesh, make_plan

pytestmark = pytest.mark.core


def test_receives_match_in_the_order_they_were_posted():
    """As with gloo and NCCL, not in the order they are waited for."""
    config = tiny("parallel.pp=2")

    def work(comm):
        if comm.here.position == 0:
            for value in (1.0, 2.0):
                comm.channels[0, 1, "act"].send(torch.tensor([value]))
            return None
        buffers = [torch.zeros(1), torch.zeros(1)]
        handles = [comm.channels[0, 1, "act"].recv(buffer) for buffer in buffers]
        handles[1].wait()
        handles[0].wait()
        return [buffer.item() for buffer in buffers]

    assert run_loopback(make_plan(config), make_mesh(config), work)[1] == [1.0, 2.0]


def test_a_failure_ends_all_ranks():
    """The first failure is raised, not the time-outs of those who wait for that rank."""
    config = tiny("parallel.dp=4")

    def work(comm):
        if comm.rank == 2:
            raise RuntimeError("rank 2 broke")
        comm.groups["dp"].all_reduce(torch.ones(4)).wait()

    with pytest.raises(RuntimeError, match="rank 2 broke"):
        run_loopback(make_plan(config), make_mesh(config), work)

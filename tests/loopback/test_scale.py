"""One rank of 4,096, over torch's fake backend: its start-up grows with the ranks, not with their square."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from threed.comm import ProcessComm
from threed.mesh import GROUPS, Mesh

RANK = 777


@pytest.fixture
def fake(monkeypatch):
    """torch.distributed over the fake backend; a list of the groups that are made."""
    init, new_group, made = dist.init_process_group, dist.new_group, []

    def fake_init(backend: str, **options) -> None:
        init("fake", **{**options, "store": FakeStore()})

    def counted(ranks, *args, **options):
        made.append(len(ranks))
        return new_group(ranks, *args, **options)

    monkeypatch.setattr(dist, "init_process_group", fake_init)
    monkeypatch.setattr(dist, "new_group", counted)
    return made


def start(mesh: Mesh) -> ProcessComm:
    comm = ProcessComm(mesh, RANK, torch.device("cpu"), 60.0, None)
    neighbours = [(at, at + 1) for at in range(mesh.positions - 1)]
    comm.open_channels([*((a, b, "act") for a, b in neighbours), *((b, a, "grad") for a, b in neighbours)])
    return comm


def test_start_up_of_a_rank(fake):
    """A group that is made once a rank, where once a group would do; members of a group that are found by
    looking at all ranks. (8 s of processor time: ten times what it takes.)"""
    mesh, begin = Mesh(pp=8, dp=64, tp=8), time.process_time()
    comm = start(mesh)
    assert time.process_time() - begin < 8
    collectives = sum(len(mesh.groups(name)) for name, row in GROUPS.items()
                      if row.lane and row.axes and row.needed(mesh) and len(mesh.group(name, RANK)) > 1)
    channels = 2 * (mesh.positions - 1) * mesh.size // mesh.positions
    assert len(fake) <= collectives + channels + mesh.size // mesh.positions  # tie: of the two ends
    assert sum(fake) < 8 * mesh.size, "a rank looks at more members than a few times the ranks"
    assert {name: group.size() for name, group in comm.groups.items()} == {
        "tp": 8, "dp": 64, "tie": 1, "world": 4096}
    assert len(comm.channels) == 4  # this position's neighbours, both ways
    comm.close()

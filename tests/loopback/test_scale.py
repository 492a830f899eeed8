"""One rank of 4,096, over torch's fake backend: its start-up grows with the ranks, not with their square."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness import tiny
from threed.comm import Comm, ProcessComm
from threed.mesh import GROUPS, Mesh
from threed.monitor.measure import COSTED, Meter
from threed.planner import make_mesh, make_plan
from threed.program.instruction import Op
from threed.program.trace import Trace
from threed.tensor.measure import SilentGroup

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


def test_metrics_of_a_step():
    """Numbers that grow with the program of each of the ranks (40 MB a step at 10,000 ranks), and a loop of
    Python over all of them on each rank. (1 s of processor time: ten times what it takes.)"""
    config = tiny("parallel.pp=8", "parallel.dp=64", "parallel.tp=8", "model.layers=30", "model.hidden=64",
                  "model.heads=8", "train.global_batch_size=1024")
    plan, comm = make_plan(config), Alone(make_mesh(config), RANK, torch.device("cpu"))
    comm.groups["world"] = SilentGroup("world", range(comm.mesh.size), RANK, comm.sent)
    program = plan.programs["train"][comm.here.position]
    times = [float(index) for index in range(len(program))]
    trace = Trace("train", 0.0, times, times, [at + 0.5 for at in times])
    trace.total_s = times[-1] + 1
    meter, begin = Meter(config, plan, comm), time.process_time()
    meter.begin()
    step = meter.exchange(trace, trace.total_s, (False, True), 0.25)
    assert step.asked("save") and not step.asked("stop")
    assert step.column("saving").tolist() == [0.25] * comm.mesh.size
    assert time.process_time() - begin < 1
    assert comm.sent["world"] < 400 * comm.mesh.size
    costs = {key: seconds for key, seconds in step.costs.items() if key[1] != Op.CLIP}
    assert {(comm.here.position, item.op, item.unit) for item in program if item.op in COSTED} == costs.keys()
    assert set(costs.values()) == {0.5}


class Alone(Comm):
    def exchange(self, value: Any) -> list[Any]:
        return [value]

"""One rank of 4,096, over torch's fake backend: what it does at the start grows with the ranks, not with
their square; what it does in a step, in Python, not at all."""

from __future__ import annotations

import builtins
import gc
import io
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.harness import tiny
from threed.base.errors import InputError
from threed.base.mesh import GROUPS, Mesh
from threed.checkpoint.choose import candidates, read_manifest
from threed.checkpoint.format import INDEX, MANIFEST, Unusable, file_name, folder, name_of
from threed.checkpoint.lineage import Lineage, write_latest
from threed.checkpoint.manifest import FORMAT, seal
from threed.comm.group import Comm
from threed.comm.process import ProcessComm
from threed.engine import shared
from threed.features.travel.arrivals import Arrivals
from threed.models.measure import SilentGroup
from threed.monitor.meter import COSTED, Meter
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import Op
from threed.program.trace import Trace
from threed.schema import Config

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


def lines_of(work: Callable[[], Any]) -> int:
    """How many lines of Python some work runs. Not those of finalizers of what earlier tests have left."""
    count = 0

    def see(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return see

    gc.collect()
    gc.disable()
    sys.settrace(see)
    try:
        work()
    finally:
        sys.settrace(None)
        gc.enable()
    return count


def start(mesh: Mesh) -> ProcessComm:
    comm = ProcessComm(mesh, RANK, torch.device("cpu"), 60.0, None)
    neighbours = [(at, at + 1) for at in range(mesh.positions - 1)]
    comm.open_channels([*((a, b, "act") for a, b in neighbours), *((b, a, "grad") for a, b in neighbours)])
    return comm


def test_start_up_of_a_rank(fake, monkeypatch):
    """A group that is made once a rank, where once a group would do; members of a group that are found by
    looking at all ranks. (8 s of processor time: ten times what it takes.)"""
    mesh, begin = Mesh(pp=8, dp=64, tp=8), time.process_time()
    listed, groups = Counter(), Mesh.groups
    monkeypatch.setattr(Mesh, "groups", lambda self, name: listed.update([name]) or groups(self, name))
    comm = start(mesh)
    assert time.process_time() - begin < 8 and set(listed.values()) == {1}
    collectives = sum(len(mesh.groups(name)) for name, row in GROUPS.items()
                      if row.lane and row.axes and row.needed(mesh) and len(mesh.group(name, RANK)) > 1)
    channels = 2 * (mesh.positions - 1) * mesh.size // mesh.positions
    assert len(fake) <= collectives + channels + mesh.size // mesh.positions  # tie: of the two ends
    assert sum(fake) < 8 * mesh.size, "a rank looks at more members than a few times the ranks"
    assert {name: group.size() for name, group in comm.groups.items()} == {
        "tp": 8, "cp": 1, "dp": 64, "tie": 1, "world": 4096}
    assert len(comm.channels) == 4  # this position's neighbours, both ways
    comm.close()


def metrics_of_a_step(dp: int) -> tuple[int, int]:
    """One rank's exchange of numbers, and rank 0's metrics, with 64 x dp ranks: lines of Python of each."""
    config = tiny("parallel.pp=8", f"parallel.dp={dp}", "parallel.tp=8", "model.layers=30", "model.hidden=64",
                  "model.heads=8", f"train.global_batch_size={16 * dp}")
    plan, comm = make_plan(config), Alone(make_mesh(config), 3, torch.device("cpu"))
    comm.groups["world"] = SilentGroup("world", range(comm.mesh.size), comm.rank, comm.sent)
    program = plan.programs["train"][comm.here.position]
    times = [float(index) for index in range(len(program))]
    trace = Trace("train", 0.0, times, times, [at + 0.5 for at in times])
    trace.total_s = times[-1] + 1
    asks: Any = SimpleNamespace(columns=("stop", "save", "saving"), row=lambda: (0.0, 1.0, 0.25))
    meter, steps = Meter(config, Analysis(plan), comm, Arrivals(plan.table), [asks]), []
    meter.begin()
    lines = lines_of(lambda: steps.append(meter.report(trace, trace.total_s)))
    (step,) = steps
    assert step.column("save").any() and not step.column("stop").any()
    assert step.column("saving").nonzero().tolist() == [[comm.rank]] and step.column("saving").sum() == 0.25
    assert comm.sent["world"] < 400 * comm.mesh.size + 2 * step._sums.nbytes
    costs = {key: seconds for key, seconds in step.costs.items() if key[1] != Op.CLIP}
    assert {(comm.here.position, item.op, item.unit) for item in program if item.op in COSTED} == costs.keys()
    assert set(costs.values()) == {0.5}
    step._rows[:] = step._rows[comm.rank]  # as if all ranks had taken as long
    meter._predict = lambda step, elapsed_s: [0.0] * comm.mesh.positions
    return lines, lines_of(lambda: meter.metrics(step, 1.0))


def test_metrics_of_a_step():
    """Numbers that grow with the program of each of the ranks (40 MB a step at 10,000 ranks), and a loop of
    Python over all of them, on each rank or on rank 0."""
    assert metrics_of_a_step(64) == metrics_of_a_step(2)


class Alone(Comm):
    def all_gather(self, value: Any) -> list[Any]:
        return [value]


@pytest.mark.parametrize("kind, world, others", [("cuda", "cpu:gloo,cuda:nccl", "nccl"),
                                                 ("cpu", "gloo", None)])
def test_only_the_world_connects_hosts(kind, world, others, fake, monkeypatch):
    """A connection over gloo from each rank of each group and channel to each other one, which carries
    nothing on GPUs."""
    made, new_group, init = [], dist.new_group, dist.init_process_group

    def noted(ranks: list[int], timeout: Any, backend: str | None) -> Any:
        made.append(backend)
        return new_group(ranks, timeout)

    monkeypatch.setattr(dist, "new_group", noted)
    monkeypatch.setattr(dist, "init_process_group",
                        lambda backend, **options: (made.append(backend), init(backend, **options)))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    comm = ProcessComm(Mesh(pp=2, dp=2, tp=2), 0, torch.device(kind), 60.0, None)
    comm.open_channels([(0, 1, "act"), (1, 0, "grad")])
    assert made == [world, *[others] * len(fake)] and len(fake) == 3 * 4 + 2 * 4
    comm.close()


# ---------------------------------------------------------------- files


@pytest.fixture
def files(monkeypatch):
    """The operations on files by name, from now on: what -> how often."""
    counts: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        original = getattr(module, name)

        def counted(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(module, name, counted)

    for name in ("stat", "lstat", "open", "listdir", "scandir", "access"):
        count(os, name)
    count(io, "open")
    monkeypatch.setattr(builtins, "open", io.open)
    return counts


def write_checkpoint(config: Config, step: int) -> Path:
    """A checkpoint of as many ranks as the config has: empty files."""
    path = folder(config) / name_of(step)
    path.mkdir(parents=True)
    names = [file_name(rank) for rank in range(config.world_size)]
    for name in [INDEX, *names]:
        (path / name).touch()
    sums = dict.fromkeys(("param", "exp_avg", "exp_avg_sq"), "0" * 16)
    (path / MANIFEST).write_text(seal({
        "format": FORMAT, "step": step, "updates": step, "samples": step, "skipped": 0, "loss_scaler": {},
        "waiting": None, "lineage": ["test-0", []], "mesh": config.axis_sizes, "config": config.to_dict(),
        "parameters": {"p": {"at": 0, "size": 0, "crc": 0, "sums": sums}},
        "files": {name: [0, 0, 0] for name in names}}))
    return path


@pytest.fixture
def written(tmp_path) -> tuple[Config, list[Path]]:
    """Three checkpoints that 4,096 ranks have written, the newest first."""
    config = tiny("parallel.pp=2", "parallel.dp=256", "parallel.tp=8", "train.global_batch_size=512",
                  f"run.dir={tmp_path}")
    paths = [write_checkpoint(config, step) for step in (3, 2, 1)]
    write_latest(config, paths[0].name, Lineage("test-0"))
    return config, paths


def test_choosing_a_checkpoint(written, files):
    """A look at each file of each rank: seconds on a network file system, while all ranks wait for rank 0."""
    config, paths = written
    files.clear()
    assert [candidate.path for candidate in candidates(config, lambda line: None)] == paths
    assert sum(files.values()) <= 4 * len(paths) + 4, files
    files.clear()
    assert len(read_manifest(paths[0], config).files) == 4096
    assert sum(files.values()) <= 8, files


def test_a_file_that_is_listed_late(written, files, monkeypatch):
    """A network file system may list what another host has written after a while: it is looked for by its
    name, it alone."""
    config, (path, *_) = written
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [name for name in listdir(path) if "777" not in name])
    files.clear()
    assert read_manifest(path, config).step == 3
    assert sum(files.values()) <= 8 + len([rank for rank in range(4096) if "777" in str(rank)]), files
    (path / file_name(777)).unlink()
    with pytest.raises(Unusable, match=r"is incomplete: rank-00777.safetensors cannot be read"):
        read_manifest(path, config)


def test_one_rank_of_a_host_looks(tmp_path, files):
    """10,000 ranks that read one file at one time."""
    class Told(Alone):
        def broadcast(self, value: Any) -> Any:
            return tmp_path / ".seen-1", "token"

    comm, names = Told(Mesh(dp=4096), RANK, torch.device("cpu")), ["a"] * 4096
    files.clear()
    shared.same_folder(comm, tmp_path, names[:1], 1.0, looks=False)
    assert not files
    with pytest.raises(InputError, match="is not the same folder on a"):
        shared.same_folder(comm, tmp_path, names[:1], 1.0, looks=True)
    assert files

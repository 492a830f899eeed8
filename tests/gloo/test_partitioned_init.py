"""A model is built in parts: no rank ever holds more than its own shards, the buffers that units share, and
one parameter."""

from __future__ import annotations

import ctypes
import itertools
import random
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import batches, tiny
from tests.workers import TIMEOUT_S, Workers
from threed.comm.group import Comm
from threed.comm.process import ProcessComm
from threed.devices import host
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.features.zero.units import UnitState
from threed.planner import analyse, layouts, make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.summary import stages
from threed.schema import Config
from threed.spec.parameter import Cut, Parameter
from threed.tensor.alive import Alive
from threed.tensor.random import draw, initial_values

# what else a process takes while it trains: activations, stacks of threads, what the allocator keeps
SLACK = 56 << 20


class Most(Alive):
    """The most bytes that were alive at a time."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.bytes())
        return result


@pytest.mark.parametrize("others", [
    ["zero.stage=3", "parallel.dp=4"], ["zero.stage=3", "precision.dtype=bf16", "parallel.dp=2"],
    ["zero.stage=3", "parallel.dp=2", "offload.optimizer=cpu", "offload.parameters=cpu"],
    ["zero.stage=1", "parallel.tp=2"],
    ["parallel.dp=2", "parallel.pp=2"], []],
                         ids=lambda others: "-".join(text.split(".")[1] for text in others) or "alone")
def test_one_parameter_at_a_time(others, monkeypatch):
    """Initial values of a whole unit, or of a stacked parameter and of its parts at once; a module with
    weights of its own."""
    config = tiny("model.hidden=512", "model.layers=2", "train.global_batch_size=4", *others)
    plan, mesh = make_plan(config), make_mesh(config)
    rows, fill = stages(Analysis(plan)), UnitState.fill
    largest = 4 * max(placed.parameter.numel for layout in layouts(config).values()
                      for placed in layout.placed)

    def watched(state: UnitState, *args) -> None:
        with Most() as alive:
            fill(state, *args)
        assert alive.most < largest, f"{alive.most} bytes at a time for unit {state.part.number}"

    monkeypatch.setattr(UnitState, "fill", watched)
    # Memory in large pages is none of torch's: no mode sees it.
    monkeypatch.setattr(host, "zeros", lambda numel, dtype: torch.zeros(numel, dtype=dtype))

    def work(comm: Comm) -> int:
        with Most() as alive:
            Engine(Analysis(plan), comm)
        return alive.most

    for rank, most in enumerate(run_loopback(plan, mesh, work)):
        row = rows[mesh.coordinate(rank).position]
        held = row.fixed_bytes + row.host_bytes
        assert held <= most <= held + largest, f"rank {rank}"


ROWS, COLUMNS = (Cut(0, "tp"),), (Cut(1, "tp"),)
PARAMETERS = [
    Parameter("plain", (300, 520), std=0.02), Parameter("rows", (512, 300), ROWS, 0.02),
    Parameter("columns", (300, 512), COLUMNS, 0.02),
    Parameter("runs", (3 * 512, 70), (Cut(0, "tp", 3),), 0.02),
    Parameter("padded", (600, 64), ROWS, 0.1, unpadded=290), Parameter("flat", (1000,), std=0.1),
    Parameter("cut-flat", (1000,), ROWS, 0.1), Parameter("ones", (3 * 30,), (Cut(0, "tp", 3),), fill=1.0),
    Parameter("experts", (4, 300, 70), (Cut(0, "ep"), Cut(1, "tp")), 0.02),
    Parameter("twice", (600, 70), (Cut(0, "ep"), Cut(0, "tp")), 0.02)]


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda each: each.name)
def test_a_part_is_a_part_of_the_whole(parameter):
    """A range that begins or ends inside a row, a tile, or a run; a rank's part drawn as if it were all, or
    for another place."""
    whole, rng = initial_values(parameter, {}, {}, 7), random.Random(0)
    assert whole.shape == parameter.stored and (parameter.std == 0 or whole[-1].std() == 0
                                                or whole.unique().numel() > 900)
    ranks = {axis: 2 for axis in parameter.axes}
    for index in itertools.product((0, 1), repeat=len(ranks)):
        place = dict(zip(ranks, index, strict=True))
        offset, shape = parameter.part(ranks, place)
        part = whole[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))]
        flat = part.reshape(-1)
        assert torch.equal(initial_values(parameter, ranks, place, 7), part)
        for _ in range(10):
            start, stop = sorted(rng.sample(range(len(flat) + 1), 2))
            values = torch.full((stop - start,), torch.nan)
            draw(values, parameter, (offset, shape), 7, start)
            assert torch.equal(values, flat[start:stop])


def build(rank: int, store: str, config: Config, allowed: int) -> float:
    """Make an engine with `allowed` bytes more than the process has, and train one step: its loss."""
    analysis = analyse(config)
    comm = ProcessComm(make_mesh(config), rank, torch.device("cpu"), TIMEOUT_S,
                       dist.FileStore(store, config.world_size))
    comm.all_gather(None)  # everybody is connected
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before gives no room
    used = next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines()
                if "VmData" in line)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + allowed, before[1]))
    try:
        engine = Engine(analysis, comm)
        comm.all_gather(None)
        return engine.train_step(batches(config, comm, 0))[0].loss
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        comm.close()


def test_more_than_a_process_may_hold():
    """The whole model somewhere on the way to its shards. Processes of their own: a limit may leave one
    without memory."""
    model = ["model.layers=64", "model.seq_len=8", "model.hidden=256", "model.heads=4", "zero.stage=3"]
    config, alone = tiny(*model, "parallel.dp=8"), tiny(*model)
    row = stages(analyse(config))[0]
    allowed = row.fixed_bytes + 4 * 4 * 256 * 256 + SLACK
    assert allowed < 4 * row.parameters, "the parameters alone must not fit"
    pool = Workers(8)
    try:
        losses = pool.run(build, 8, config, allowed)
        assert len(set(losses)) == 1 and 0 < losses[0] < 10
        with pytest.raises(AssertionError, match="can't allocate memory"):
            pool.run(build, 1, alone, allowed)
    finally:
        pool.close()

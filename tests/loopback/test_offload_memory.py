"""Bytes that are really there, by tier: storages found alive in the process, and files of the process. No
slot is asked.

On a CPU device and host are the same memory, but separate tensors: what holds one says which it is.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.harness import batches, tiny
from tests.loopback.test_memory import Storages, reach, storages, tensors
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.features.offload.run import OffloadRun
from threed.features.zero.units import UnitState
from threed.planner import analyse, make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import Op
from threed.program.summary import stages

MODEL = ["model.layers=4", "model.hidden=128", "model.position=learned", "parallel.dp=2", "model.vocab=512",
         "train.global_batch_size=4"]
CPU, NVME, BF16 = "offload.optimizer=cpu", "offload.optimizer=nvme", "precision.dtype=bf16"
MUON, ONES = "optimizer.name=muon", "offload.parameters=cpu"
CASES = {
    "cpu-0": ["zero.stage=0", CPU],
    "cpu-1-bf16-pp": ["zero.stage=1", CPU, BF16, "parallel.pp=2"],
    "cpu-2": ["zero.stage=2", CPU],
    "cpu-2-bf16": ["zero.stage=2", CPU, BF16],
    "cpu-2-no-overlap": ["zero.stage=2", CPU, BF16, "offload.overlap=none"],
    "cpu-2-gradients": ["zero.stage=2", CPU, BF16, "offload.gradients=host"],
    "cpu-3-gradients-pp": ["zero.stage=3", CPU, ONES, "parallel.pp=2", "offload.gradients=host",
                           "zero.reduce_every=1"],
    "nvme-1-no-overlap-pp": ["zero.stage=1", NVME, "parallel.pp=2", "offload.overlap=none"],
    "nvme-1-pp": ["zero.stage=1", NVME, "parallel.pp=2"],
    "cpu-2-half": ["zero.stage=2", CPU, BF16, "offload.ratio=0.5"],
    "nvme-1": ["zero.stage=1", NVME],
    "nvme-2-bf16-pp": ["zero.stage=2", NVME, BF16, "parallel.pp=2"],
    "parameters-cpu": ["zero.stage=3", CPU, ONES],
    "parameters-cpu-pp": ["zero.stage=3", CPU, ONES, BF16, "parallel.pp=2", "parallel.schedule=zb-h1"],
    "parameters-nvme": ["zero.stage=3", NVME, "offload.parameters=nvme", BF16],
    "parameters-nvme-pp": ["zero.stage=3", NVME, "offload.parameters=nvme", "parallel.pp=2",
                           "zero.residency=2"],
    "weights-on-disk": ["zero.stage=3", CPU, "offload.parameters=nvme", BF16, "offload.ratio=0.5"],
    "recompute": ["zero.stage=3", CPU, ONES, "activation.policy=full", "activation.offload=cpu"],
    "muon-cpu-2-bf16": ["zero.stage=2", CPU, BF16, MUON],
    "muon-cpu-0-half": ["zero.stage=0", CPU, MUON, "optimizer.turn_dtype=fp32", "offload.ratio=0.5"],
    "muon-nvme-1-pp": ["zero.stage=1", NVME, MUON, "parallel.pp=2"],
}


KINDS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes", "host_bytes")


def by_tier(engine: Engine) -> dict[str, Storages]:
    """Storages of a rank, by what the plan counts them as."""
    shared, states = engine.storage, list(engine.states.values())
    of: dict[str, list] = {
        "buffer_bytes": [shared.params, shared.grads, shared.pshards, shared.gshards, engine.zero._staging],
        "host_bytes": [shared.host_weights, shared.host_states, shared.host_grads, shared.adding,
                       shared.host_matrices, shared.packing, kept(engine), *(
            thing for state in states for thing in on_host(state))],
        "parameter_bytes": [state.weights.at_home for state in states
                            if state.part.unit.weight_home == "device"],
        "gradient_bytes": [state.gradient.shard for state in states
                           if not shared.table.shards.streams(state.part.number)],
        "optimizer_bytes": [thing for state in states if state.part.unit.state_home == "device"
                            for thing in (state.optimizer_state._master, state.optimizer_state.buffers)]}
    return {name: reach(things) for name, things in of.items()}


def on_host(state: UnitState) -> Iterable:
    gradient, unit = state.gradient, state.part.unit
    yield from [gradient.host] * gradient.streams
    if unit.weight_home == "host":
        yield state.weights.at_home
    if unit.state_home == "host":
        yield state.optimizer_state.memory


def kept(engine: Engine):
    """The pool of kept inputs on the host."""
    handler = engine.handlers[Op.OFFLOAD].__self__  # pyright: ignore[reportFunctionMemberAccess]
    assert isinstance(handler, OffloadRun)
    return handler.kept


@pytest.mark.parametrize("name", CASES)
def test_bytes_alive(name, tmp_path):
    """State that is still on the device when it should be away, or on the host when it should be on disk; a
    pool that the plan does not know; a file that is larger than was said. Within 2% for each rank, tier and
    kind, and nothing left over."""
    files = [f"offload.nvme_path={tmp_path}"] if "nvme" in "".join(CASES[name]) else []
    config = tiny(*MODEL, *CASES[name], *files)
    plan, mesh = make_plan(config), make_mesh(config)
    rows = stages(Analysis(plan))
    torch.set_num_threads(1)
    gc.collect()
    before = tensors(gc.get_objects())  # kept, so that no address is used again

    def work(comm: Comm) -> Engine:
        engine = Engine(Analysis(plan), comm)
        for step in range(2):
            engine.train_step(batches(config, comm, step))
        return engine

    engines = run_loopback(plan, mesh, work)
    gc.collect()
    left = storages(gc.get_objects())
    for address in storages(before):
        left.pop(address, None)
    for rank, engine in enumerate(engines):
        row = rows[mesh.coordinate(rank).position]
        for kind, sizes in zip(KINDS, map(by_tier(engine).__getitem__, KINDS), strict=True):
            planned = pytest.approx(getattr(row, kind), rel=0.02, abs=4096 * len(sizes))
            assert sum(sizes.values()) == planned, (rank, kind)
            for address, size in sizes.items():
                assert left.pop(address) == size, f"{kind} of rank {rank} is in memory that counts as another"
        disk = engine.storage.disk
        on_disk = [os.fstat(file.fileno()) for file in disk._files.values()] if disk is not None else []
        planned = pytest.approx(row.disk_bytes, rel=0.02)
        assert sum(file.st_size for file in on_disk) == planned
        assert sum(file.st_blocks * 512 for file in on_disk) == planned, "not allocated"
        for state in engine.states.values():  # a file that is looked at is no memory
            if state.part.unit.state_home == "disk":
                assert state.optimizer_state.tier == "disk"
                left.pop(state.optimizer_state.memory.untyped_storage().data_ptr())
        small = {address: left.pop(address) for address in reach(engine).keys() & left.keys()}
        held = sum(getattr(row, kind) for kind in KINDS)
        assert sum(small.values()) < 0.001 * held, "nobody said what this is"
        engine.close()
    assert not left, f"{len(left)} storages, {sum(left.values())} bytes, belong to no rank"
    assert not any(Path(tmp_path).iterdir())


@pytest.mark.parametrize("name", CASES)
def test_what_is_away_is_saved(name):
    """Offload that saves nothing: on the device a unit whose state is away keeps none, nor its parameters
    where they are away."""
    path = ["offload.nvme_path=/disk"] if "nvme" in "".join(CASES[name]) else []
    rows = stages(analyse(tiny(*MODEL, *CASES[name], *path)))
    without = [text for text in CASES[name] if not text.startswith("offload.")]
    none = stages(analyse(tiny(*MODEL, *without)))
    for row, other in zip(rows, none, strict=True):
        share = 0.65 if "offload.ratio=0.5" in CASES[name] else 0
        assert row.optimizer_bytes <= share * other.optimizer_bytes
        if "zero.stage=3" in CASES[name]:
            assert row.parameter_bytes <= share * other.parameter_bytes

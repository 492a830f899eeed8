"""An engine that nobody refers to any more gives its memory back at once: it is in no circle of references,
which Python would find later, when a GPU has no room left for the next one."""

from __future__ import annotations

import gc
import weakref

import pytest

from tests.harness import batches, tiny
from tests.recorder import record_on_cpu
from threed.comm.group import Comm
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis

GRAPHS = "run.cuda_graphs=true"
CASES = {
    "graphs": [GRAPHS, "parallel.tp=2"],
    "plain": [],
    "pipeline": ["parallel.pp=2", "parallel.schedule=zb-h1", "precision.dtype=bf16"],
    "zero-3": ["parallel.dp=2", "zero.stage=3", "model.tie_embeddings=true"],
    "on the host": ["parallel.dp=2", "zero.stage=3", "offload.optimizer=cpu", "offload.parameters=cpu"],
    "on disk": ["zero.stage=2", "offload.optimizer=nvme", "offload.nvme_path={disk}"],
    "recomputed": ["parallel.tp=2", "activation.policy=full", "activation.partition=true"],
    "pieces": ["parallel.tp=2", "parallel.sequence_parallel=true", "activation.policy=selective"],
    "overlap": ["zero.stage=2", "offload.optimizer=cpu", "precision.dtype=bf16"],
    "no overlap": ["zero.stage=2", "offload.optimizer=cpu", "offload.overlap=none"],
    "gradients": ["zero.stage=2", "parallel.dp=2", "offload.optimizer=cpu", "offload.gradients=host"],
}


@pytest.mark.parametrize("case", CASES)
def test_an_engine_leaves_nothing(case, tmp_path, monkeypatch):
    if GRAPHS in CASES[case]:
        import torch._dynamo  # noqa: F401  (imported in a step, it would hold the step's frames)

        record_on_cpu(monkeypatch)
    config = tiny("model.layers=2", "parallel.dp=1", "parallel.tp=1", "parallel.pp=1",
                  *(word.format(disk=tmp_path) for word in CASES[case]))
    plan = make_plan(config)

    def work(comm: Comm) -> list[weakref.ref]:
        engine = Engine(Analysis(plan), comm)
        for step in range(3):
            engine.train_step(batches(config, comm, step))
        engine.close()
        return [weakref.ref(part) for part in (engine, engine.zero, engine.pipeline, *engine.states.values())]

    gc.collect()
    gc.disable()
    try:
        refs = [ref for each in run_loopback(plan, make_mesh(config), work) for ref in each]
        alive = [type(part).__name__ for ref in refs if (part := ref()) is not None]
    finally:
        gc.enable()
    assert refs and not alive

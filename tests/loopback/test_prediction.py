"""The sleeping model: compute that takes given times and no core, so that ranks as threads do not compete.

What is left is the executor: its step must take as long as the walk of the plan says, from the op costs of
that step.
"""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from tests.harness import batches, tiny
from threed.base.errors import RunError
from threed.devices.clock import HostClock
from threed.devices.cpu import Cpu
from threed.devices.cuda import Cuda
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.monitor.attribute import CAUSES, attribute
from threed.monitor.meter import HEAD, Meter, StepReport
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.effects import effects
from threed.program.instruction import COMPUTE, Op
from threed.program.simulate import predict

# Of a unit. Long beside what the executor itself does for an instruction (a fraction of a millisecond, more
# on a slow or busy machine): it was 4% of a step at a quarter of these times, and that is not what is tested.
TIMES = {Op.FORWARD: 0.024, Op.BACKWARD: 0.040, Op.BACKWARD_INPUT: 0.024, Op.BACKWARD_WEIGHT: 0.016}


def put_to_sleep(engine: Engine) -> None:
    """Compute instructions sleep, then make what `effects` says they make."""
    pipeline, table = engine.pipeline, engine.plan.table

    def handle(instruction, slots):
        time.sleep(TIMES[instruction.op])
        effect = effects(instruction, table, engine.position)
        for slot in (*effect.writes, *effect.adds):
            message = slot.kind in ("act", "grad")
            made = torch.zeros(1, dtype=torch.float64)
            if message:
                made = pipeline.stream(slot.unit).empty(slot.kind, torch.device("cpu")).zero_()
            slots.put(slot, made)

    engine.handlers.update(dict.fromkeys(COMPUTE, handle))


def rows(step: StepReport) -> list[dict[str, float]]:
    """By rank."""
    columns = [step.column(what).tolist() for what in HEAD]
    return [dict(zip(HEAD, row, strict=True)) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_step_time_is_the_predicted_one(schedule):
    """pp=4, m=8, two units a stage: within 5%, and the attribution adds up to the step within 1%."""
    config = tiny("parallel.pp=4", f"parallel.schedule={schedule}", "optimizer.clip_grad=1")
    plan = make_plan(config)
    torch.set_num_threads(1)

    def work(comm):
        engine = Engine(Analysis(plan), comm)
        put_to_sleep(engine)
        meter = Meter(config, Analysis(plan), comm, engine.arrivals)
        steps = []
        for step in range(4):
            _, trace = engine.train_step(batches(config, comm, step))
            steps.append(meter.report(trace, trace.total_s))
        return steps

    steps = run_loopback(plan, make_mesh(config), work)[0]
    analysis = Analysis(plan)
    ratios = [float(step.column("step_s").max()) / predict(analysis, step.costs).step_s for step in steps]
    assert 0.99 < statistics.median(ratios) < 1.05, ratios
    for step in steps:
        for row in rows(step):
            causes = attribute(row, step.clip_s, row["step_s"])
            assert tuple(causes) == CAUSES and min(causes.values()) >= 0
            assert sum(causes.values()) == pytest.approx(row["step_s"], rel=0.01)
    # Work is the same at each position, and nobody has a dp peer: the bubble is waiting for messages, and the
    # drain.
    last = steps[-1]
    for position, row in enumerate(rows(last)):
        causes = attribute(row, last.clip_s, row["step_s"])
        assert causes["dp_wait"] + causes["optimizer"] < 0.1 * row["step_s"], (position, causes)
        assert causes["p2p_wait"] + causes["idle"] < 0.5 * row["step_s"], (position, causes)


def test_a_failure_names_where_the_work_is(monkeypatch):
    """On a GPU the host runs ahead of the work: what is named, where the GPU has failed, is the first
    instruction that has not ended."""
    config = tiny("parallel.pp=1")
    plan = make_plan(config)
    reached = 7
    monkeypatch.setattr(Cpu, "has_failed", Cuda.has_failed)

    def work(comm):
        engine = Engine(Analysis(plan), comm)
        marks = {}

        class Behind(HostClock):
            def passed(self, mark):
                return marks.setdefault(mark, engine._ended.index(mark)) < reached

        engine.clock = Behind()

        def broken(instruction, slots):
            raise RuntimeError("CUDA error: the device is gone")

        engine.handlers[Op.CLIP] = broken
        with pytest.raises(RunError) as caught:
            engine.train_step(batches(config, comm, 0))
        return str(caught.value)

    (message,) = run_loopback(plan, make_mesh(config), work)
    assert f"at '{plan.programs['train'][0][reached]}'" in message and "the device is gone" in message

"""A device whose times are read late: nobody waits for the end of a step but who asks for it."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.harness import batches, tiny
from threed.base.errors import RunError
from threed.comm.group import Comm
from threed.devices.clock import HostClock, HostReader
from threed.devices.cpu import Cpu
from threed.devices.cuda import Cuda
from threed.engine.engine import Engine
from threed.engine.loopback import run_loopback
from threed.monitor.meter import Meter
from threed.planner import make_mesh, make_plan
from threed.program.analysis import Analysis
from threed.program.instruction import Instruction, Op
from threed.program.slots import Slots
from threed.program.trace import Trace


class LateReader(HostReader):
    at_once = False
    waits = 0

    def __enter__(self) -> Any:
        LateReader.waits += 1
        return super().__enter__()


class LateClock(HostClock):
    def reader(self, begin: float, end: float) -> LateReader:
        return LateReader(begin)


def use(monkeypatch: pytest.MonkeyPatch, clock: type[LateClock]) -> None:
    """On a processor, and on a GPU or what stands for one."""
    for device in (Cpu, Cuda):
        monkeypatch.setattr(device, "clock", lambda device: clock())


@pytest.fixture(autouse=True)
def late(monkeypatch):
    LateReader.waits = 0
    use(monkeypatch, LateClock)


@pytest.mark.parametrize("field", ["issued", "started", "ended", "waits", "total_s"])
def test_each_field_may_be_asked_for_first(field):
    values = {"issued": [0.0], "started": [0.25], "ended": [0.5], "waits": [], "total_s": 0.75}
    assert getattr(Trace.late("train", 0.0, lambda: values), field) == values[field]


def test_a_trace_is_read_once():
    def work(comm: Comm) -> Trace:
        engine = Engine(Analysis(plan), comm)
        _, trace = engine.train_step(batches(config, comm, 0))
        assert trace.is_late and trace.name == "train" and LateReader.waits == 0
        assert len(trace.issued) == len(plan.programs["train"][0]) and trace.total_s >= trace.ended[-1]
        assert not trace.is_late and LateReader.waits == 1
        with pytest.raises(AttributeError):
            trace.nothing  # noqa: B018
        return trace

    config = tiny("model.layers=2")
    plan = make_plan(config)
    (trace,) = run_loopback(plan, make_mesh(config), work)
    assert pickle.loads(pickle.dumps(trace)) == trace
    unread = Trace.late("train", 1.0, lambda: vars(Trace("train", total_s=2.0)))
    assert pickle.loads(pickle.dumps(unread)).total_s == 2.0


def test_metrics_are_those_of_the_step_before():
    """The first step alone is waited for: there is none before it."""
    config = tiny("model.layers=2")
    plan = make_plan(config)

    def work(comm: Comm) -> None:
        engine = Engine(Analysis(plan), comm)
        meter = Meter(config, Analysis(plan), comm, engine.arrivals)
        seen, waits = [], []
        for step in range(4):
            meter.begin()
            _, trace = engine.train_step(batches(config, comm, step))
            measured = meter.report(trace, float(step))
            seen.append(float(measured.column("step_s")))
            waits.append((LateReader.waits, trace.is_late))
        assert seen == [0.0, 0.0, 1.0, 2.0]
        # What is read is always of a step that CLIP's numbers have shown to be over.
        assert waits == [(1, False), (1, True), (2, True), (3, True)]

    run_loopback(plan, make_mesh(config), work)


@pytest.mark.parametrize("parameters", ["none", "cpu"])
def test_lanes_say_when_they_worked(parameters):
    """Each copy between tiers and each step on the host, within the program; the metrics are their sums."""
    config = tiny("model.layers=2", "parallel.dp=2", "zero.stage=3", "offload.optimizer=cpu",
                  f"offload.parameters={parameters}")
    plan = make_plan(config)

    def work(comm: Comm) -> None:
        engine = Engine(Analysis(plan), comm)
        meter = Meter(config, Analysis(plan), comm, engine.arrivals)
        for step in range(3):
            meter.begin()
            _, trace = engine.train_step(batches(config, comm, step))
            measured = meter.report(trace, 1.0)
        items = plan.programs["train"][0]
        assert trace.name == "train" and sorted(index for index, *_ in trace.ran) == [
            index for index, item in enumerate(items) if item.op in (Op.OFFLOAD, Op.FETCH, Op.STEP)]
        assert all(start >= 0 and ran_s >= 0 and start + ran_s <= trace.total_s
                   for _, start, ran_s in trace.ran)
        on_host = sum(ran_s for index, _, ran_s in trace.ran if items[index].op == Op.STEP)
        assert on_host > 0 and on_host == pytest.approx(trace_sum(trace, items, Op.STEP))
        found = {name for name in meter.metrics(measured, 1.0) if name.startswith("offload/")}
        assert found == {f"offload/{what}_s" for what in ("d2h", "h2d", "host", "waited")}
        engine.close()

    run_loopback(plan, make_mesh(config), work)


def trace_sum(trace: Trace, program: Sequence[Instruction], op: Op) -> float:
    return sum(took for item, took in zip(program, trace.took(), strict=True) if item.op == op)


def test_no_metrics_of_offload_without_it():
    config = tiny("model.layers=2", "parallel.dp=2")
    plan = make_plan(config)

    def work(comm: Comm) -> None:
        engine = Engine(Analysis(plan), comm)
        meter = Meter(config, Analysis(plan), comm, engine.arrivals)
        meter.begin()
        _, trace = engine.train_step(batches(config, comm, 0))
        measured = meter.report(trace, 1.0)
        assert not trace.ran
        assert not [name for name in meter.metrics(measured, 1.0) if name.startswith("offload/")]

    run_loopback(plan, make_mesh(config), work)


class BusyClock(LateClock):
    """Of a device that has finished nothing yet."""

    def passed(self, mark: float) -> bool:
        return False


def test_where_a_host_that_runs_ahead_has_failed(monkeypatch):
    """At the instruction that the host has reached, and because of no other rank. (A watchdog asks where the
    device is.)"""
    use(monkeypatch, BusyClock)
    config = tiny("model.layers=2", "parallel.dp=2", "zero.stage=3")
    plan, said = make_plan(config), {}

    def work(comm: Comm) -> None:
        engine = Engine(Analysis(plan), comm)
        forward = engine.handlers[Op.FORWARD]

        def fails(instruction: Instruction, slots: Slots) -> None:
            if instruction.unit == 2:
                said[comm.rank] = engine.where()
                raise ValueError("of the host")
            forward(instruction, slots)

        engine.handlers[Op.FORWARD] = fails
        engine.train_step(batches(config, comm, 0))

    with pytest.raises(RunError) as failure:
        run_loopback(plan, make_mesh(config), work)
    first, *_, last = str(failure.value).splitlines()
    assert first.endswith("'FORWARD u2 m0'") and last.startswith("  blocks.1: ValueError: of the host")
    assert re.fullmatch(r"rank \d .* at 'GATHER p\d \(dp\)', with rank \d", said[0].splitlines()[0])

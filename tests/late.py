"""Late lanes: jobs that run at the last moment, or at once, at random, and leave nothing to luck.

Loopback's lanes usually end a job before anybody could miss a wait for it. Here a job is held until somebody
asks for it, or for HOLD_S; and what it will write is no number until then.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Sequence

import pytest
import torch

from threed.comm import group as comm
from threed.comm.lanes import Handle, Job, ThreadLane
from threed.engine.engine import Engine
from threed.program.instruction import Instruction, Op, Slot, Tier
from threed.program.slots import Slots

HOLD_S = 0.02  # long beside an instruction of a tiny model; other ranks may wait for what is held here


class Asked(Handle):
    """A job that is held until somebody waits for it."""

    def __init__(self, job: Handle, ask: Callable[[], None]):
        super().__init__(None)
        self._job, self._ask = job, ask

    def wait(self) -> None:
        self._ask()
        self._job.wait()

    def block(self) -> None:
        self._ask()
        self._job.block()


class LateLane(ThreadLane):
    def __init__(self, name: str, device: torch.device, rng: random.Random, late: float):
        self._rng, self._late = rng, late
        self._submitted, self._asked, self._change = 0, 0, threading.Condition()
        super().__init__(name, device)

    def submit(self, job: Job, after: Sequence[Handle] = ()) -> Handle:
        self._submitted += 1
        number, late = self._submitted, self._rng.random() < self._late
        spoil = getattr(job, "spoil", None)

        def held() -> None:
            if late:
                if spoil is not None:
                    spoil()
                with self._change:
                    self._change.wait_for(lambda: self._asked >= number, HOLD_S)
            job()

        return Asked(super().submit(held, after), lambda: self._ask(number))

    def _ask(self, number: int) -> None:
        """Let go of a job, and of those before it."""
        with self._change:
            self._asked = max(self._asked, number)
            self._change.notify_all()


def be_late(monkeypatch: pytest.MonkeyPatch, seed: int, late: float = 0.7,
            lanes: Collection[str] | None = None) -> None:
    """Let lanes of the engines that are made from now on be late, in that share of their jobs: these lanes,
    or all."""
    rng, init = random.Random(seed), Engine.__init__

    def spoiled(self: Engine, *args, **options) -> None:
        init(self, *args, **options)
        for op in (Op.GATHER, Op.FETCH, Op.STEP, Op.REDUCE, Op.OFFLOAD):  # what travels is no number yet
            self.handlers[op] = _spoiling(self, self.handlers[op])

    monkeypatch.setattr(Engine, "__init__", spoiled)
    monkeypatch.setattr(comm, "ThreadLane", lambda name, device: LateLane(
        name, device, rng, late if lanes is None or name in lanes else 0.0))


def _spoiling(engine: Engine, handler: Callable) -> Callable:
    """The handler, whose job has a `spoil`: it overwrites what the job will write."""
    def handle(instruction, slots: Slots):
        job = handler(instruction, slots)
        if job is None or instruction.of_slot:
            return job
        unit, kept = instruction.unit, slice(0, 0)
        if instruction.op == Op.GATHER:
            slot, state = Slot("param", unit), engine.states[unit]
            if state.part.unit.whole and state.part.unit.weight_home == Tier.DEVICE:
                kept = slice(*state.part.owned)  # the rank's own part is what it gathers from
        elif instruction.part == "begin":
            slot = Slot("update", unit, tier=Tier.HOST)
        elif instruction.op == Op.OFFLOAD and instruction.kind == "direction":
            slot = instruction.slot.below
        elif instruction.op == Op.STEP:
            slot = engine.plan.table.shards.weight(unit).on(Tier.HOST)
            kept = slice(0, None if slot == engine.plan.table.shards.weight(unit) else 0)
        elif instruction.op in (Op.REDUCE, Op.OFFLOAD):
            slot = None
        else:
            slot = instruction.slot
        value = slots.get(slot) if slot is not None else _on_the_way(engine, instruction)
        weights = engine.states[unit].weights
        if value is None or (instruction.op == Op.FETCH and weights.in_place and value is weights.at_home):
            return job  # it writes nothing: STEP has

        def late() -> None:
            job()

        def spoil() -> None:
            own = value[kept].clone()
            value.fill_(255 if value.dtype == torch.uint8 else torch.nan)
            value[kept] = own

        late.spoil = spoil  # pyright: ignore[reportFunctionMemberAccess]
        return late

    return handle


def _on_the_way(engine: Engine, instruction: Instruction) -> torch.Tensor | None:
    """The reduced gradient of a unit in a buffer of its own, on the device or on the host; None where it is
    added to what is there, and where its memory is one with that of the device."""
    gradient = engine.states[instruction.unit].gradient
    streams = engine.plan.table.shards.streams(instruction.unit)
    if instruction.op == Op.REDUCE:
        return gradient.shard if streams else None
    lowers = instruction.kind in ("gshard", "gprev") and not streams and gradient.host is not gradient.shard
    return gradient.host if lowers else None

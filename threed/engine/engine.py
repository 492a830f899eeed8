"""The engine: runs the programs of a plan on one rank, and records when each instruction ran.

It makes no decisions. For each instruction it waits for those that `order` lists, calls the handler, and
frees the slots that `effects` lists as freed. What runs beside the computation is a job of a lane, which does
its waiting by itself. Loopback runs the same engine on threads.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from threed.base.errors import RunError, ThreedError, line_of
from threed.base.mesh import GROUPS
from threed.comm.group import Comm
from threed.comm.lanes import Handle, so_far
from threed.devices import device_of
from threed.engine.device import attention, compiles
from threed.engine.graphs import GraphRun
from threed.engine.underway import UnderWay
from threed.features.activation.run import ActivationRun
from threed.features.offload.run import OffloadRun
from threed.features.pipeline.run import PipelineRun, built, streams
from threed.features.travel.run import TravelRun
from threed.features.zero.clip import Clipped
from threed.features.zero.run import ZeroRun
from threed.features.zero.storage import Storage
from threed.features.zero.units import UnitState, make_states, places
from threed.planner import layouts
from threed.planner.from_config import config_of
from threed.program.analysis import Analysis
from threed.program.check import describe
from threed.program.effects import effects
from threed.program.graphs import graphs
from threed.program.instruction import COMPUTE, MESSAGES, PARTS, Instruction, Op, Slot, SlotKind
from threed.program.names import GENERATE, SETTLE, SNAPSHOT, TRAIN, VERIFY
from threed.program.seam import seam_of
from threed.program.slots import Slots
from threed.program.table import Table
from threed.program.trace import Trace
from threed.tensor.context import Batch, Context
from threed.tensor.fused import Fused
from threed.tensor.layers import WeightGrads
from threed.tensor.random import Draw, draw
from threed.tensor.saving import SavingPolicy, UnsavedMemory


class Engine:
    def __init__(self, analysis: Analysis, comm: Comm, draw: Draw = draw):
        """`draw`: how initial values come into the weights. InputError where the plan does not know its
        config."""
        self.analysis, self.plan, self.comm = analysis, analysis.plan, comm
        self.config = config = config_of(analysis.plan)
        plan, table, position = analysis.plan, analysis.table, comm.here.position
        self.position = position
        weight_grads = WeightGrads()
        shared = analysis.buffers(position)
        self.storage = Storage.make(config, table, shared, comm, weight_grads)
        self.states = make_states(config, comm, layouts(config), self.storage, draw)
        self.zero = ZeroRun(config, comm, table, self.states, shared)
        parameters = {name: p for state in self.states.values()
                      for name, p in state.weights.parameters.items()}
        dtype = self.zero.precision.compute
        self.saving = SavingPolicy(config.pieces)
        offload = OffloadRun(comm, table, shared, dtype, self.states, self.storage.host_matrices)
        self.graphs = GraphRun(graphs(analysis, position).turns, self.states, weight_grads,
                               comm.device) if config.run.cuda_graphs else None
        groups = self.graphs.groups(comm.groups) if self.graphs is not None else comm.groups
        context = Context(config.model, groups, config.parallel.sequence_parallel, dtype,
                          weight_grads, self.saving,
                          Fused(compiles(config, comm.device), config.model.fused == "auto"),
                          config.data.document_mask and attention(config, comm.device) == "varlen",
                          config.train.seed, comm.device, comm.mesh.tokens_of(comm.here), config.by_heads,
                          config.parallel.cp_order)
        self.places, self.fused = context.places, context.fused
        layers = built(config, table, table.units_of(position), context, parameters)
        stream, keeping = streams(config, table, context), partial(_keeping, table, self.states, self.saving)
        self.activation = activation = ActivationRun(comm, table, shared, dtype, stream)
        self.pipeline = PipelineRun(comm, table, layers, context, stream, keeping, activation)
        if self.graphs is not None:
            self.pipeline.runner = self.zero.updater = self.graphs
        travel = TravelRun(comm, table)
        self.arrivals = travel.arrivals
        sharing = [self.zero.handlers(), activation.handlers(), travel.handlers()]
        ops = dict.fromkeys(op for each in sharing for op in each)
        self.handlers = {**self.pipeline.handlers(), **offload.handlers(),
                         **{op: _by_kind(*(each.get(op) for each in sharing)) for op in ops}}
        self.orders = {name: analysis.order(name, position) for name in plan.programs}
        # Behind a FETCH also a collective of a single rank would hold up the computation before it.
        for name in {GROUPS[item.group].lane for programs in plan.programs.values()
                     for item in programs[position] if item.op in (Op.GATHER, Op.EXCHANGE)
                     and not item.of_slot and table.shards.away(item.unit)}:
            comm.lane(name, beside=True)
        self.clock = device_of(comm.device).clock()
        self._ended: list[Any] = []  # marks of the program under way: the end of each instruction
        self._under: UnderWay | None = None
        # slot -> the copy for a checkpoint that is under way: the next STEP waits for it
        self._copies: dict[Slot, Handle] = {}
        self.slots = Slots()
        # (program, index of the instruction, time of its start), for the watchdog
        self.current: tuple[str, int, float] | None = None
        # called after each instruction
        self.after: Callable[[Instruction, Slots], None] | None = None

    def train_step(self, batch: Callable[[int], Batch]) -> tuple[Clipped, Trace]:
        """One optimizer step; `batch` gives the data of a micro-batch of this rank. A GPU need not have done
        it: who reads the result waits."""
        self.pipeline.loss_grad.fill_(self.zero.scaler.scale)
        clipped, trace = self.run(self.zero.program(), batch)
        self.zero.finish_step(clipped)
        return clipped, trace

    def snapshot(self) -> None:
        """Apply what waits, then begin to copy the content of a checkpoint to the host, if the plan has a
        program for it. The next step runs meanwhile."""
        self.settle()
        if self.plan.table.update.snapshots:
            self._run(SNAPSHOT, self.pipeline.feed.read)

    def settle(self) -> None:
        """Apply the update that waits for the next step, if any (offload.overlap): then weights and optimizer
        state are those after the last step. Every program but the next step begins with it; who reads weights
        between two steps calls it before. All ranks call it together."""
        if self.zero.waiting is not None:
            self._run(SETTLE, self.pipeline.feed.read)
            self.zero.waiting = None

    def generate(self, batch: Callable[[int], Batch]) -> dict[int, torch.Tensor]:
        """Run the program `generate`. Micro-batch -> the logits of each sequence's token `last_B`, [B, V], V
        with padding; nothing on a position without the head. RunError as from `_run`."""
        self._run(GENERATE, batch)
        table, parts = self.plan.table, dict[int, list[torch.Tensor]]()
        for slot in self.slots.alive():  # sorted by unit: the tiles of a head are in the order of their ids
            if slot.kind == SlotKind.LOGITS:
                parts.setdefault(slot.microbatch, []).append(self.slots.get(slot))
        self.slots.keep(seam_of(table, self.position, GENERATE))
        return {microbatch: torch.cat(tiles, -1) for microbatch, tiles in parts.items()}

    def run(self, name: str, batch: Callable[[int], Batch]) -> tuple[Clipped, Trace]:
        """Run a program that has a CLIP. RunError as from `_run`."""
        trace = self._run(name, batch)
        clipped = self.slots.get(Slot(SlotKind.SCALE))
        clipped.waits = partial(_waits, weakref.ref(self), name)  # (the engine's slots have the result)
        return clipped, trace

    def _run(self, name: str, batch: Callable[[int], Batch]) -> Trace:
        """Run a program once. A failure is raised as RunError, with the instruction, its neighbours and the
        slots that are alive."""
        if name not in (TRAIN, SETTLE):
            self.settle()
        program, order = self.plan.programs[name][self.position], self.orders[name]
        slots, handlers, mark = self.slots, self.handlers, self.clock.mark
        slots.keep(seam_of(self.plan.table, self.position, name))
        self.storage.rewind()
        if self.graphs is not None:
            self.graphs.begin(name)
        issued, started, ended = [], [], []  # marks, which are read after the step
        self.pipeline.feed.begin(batch, program)
        under = self._under = UnderWay(order, self.clock, self.comm.device, self._copies)
        self._ended = ended
        epoch, begin = time.time(), mark()
        try:
            for index, instruction in enumerate(program):
                self.current = (name, index, time.monotonic())
                if self.graphs is not None:
                    self.graphs.at(index)
                issued.append(mark())
                effect, handler, number = order.effects[index], handlers[instruction.op], len(under.waits)
                lane = self.comm.lane(effect.lane) if index in order.jobs else None
                if lane is None or lane.at_once:
                    under.wait(index)
                started.append(under.waits[-1][-1] if len(under.waits) > number else issued[-1])
                if lane is not None:
                    under.submit(index, lane, handler(instruction, slots))
                elif (handle := handler(instruction, slots)) is not None:
                    under.put(index, handle)
                ended.append(mark())
                if self.after is not None:
                    self.after(instruction, slots)
                if lane is None and index in order.awaited and instruction.op not in MESSAGES:
                    under.put(index, so_far(self.comm.device))
                for slot in effect.frees:
                    slots.free(slot)
            self.pipeline.finish()
            under.finish()
            end = mark()
        except ThreedError:
            raise
        except Exception as error:
            raise self._failure(error) from error
        finally:
            self.current = None
        reader = self.clock.reader(begin, end)

        def read() -> dict[str, Any]:
            with reader as since:
                return {"issued": list(map(since, issued)), "started": list(map(since, started)),
                        "ended": list(map(since, ended)), "waits": under.recorded(since),
                        "total_s": since(end), "ran": under.ran(since)}

        return Trace(name, epoch, **read()) if reader.at_once else Trace.late(name, epoch, read)

    def _failure(self, error: Exception) -> RunError:
        # What a GPU has met is raised at a later instruction of the host.
        raised = not device_of(self.comm.device).has_failed(error)
        return RunError(f"{self.where(raised)}\n  {self._unit()}{type(error).__name__}: {error}"
                        f"{line_of(error)}{self.arrivals.advice(error)}")

    def rehearse(self, batch: Callable[[int], Batch]) -> Trace:
        """Run the next step without its update. Weights and optimizer state do not change."""
        self.pipeline.loss_grad.fill_(self.zero.scaler.scale)
        return self.run(VERIFY, batch)[1]

    @contextmanager
    def inspected(self, look: Callable[[Instruction, Slots], None]) -> Iterator[None]:
        """Within the context, `look` is called after each instruction, before its slots are freed."""
        before = self.after

        def both(instruction: Instruction, slots: Slots) -> None:
            if before is not None:
                before(instruction, slots)
            look(instruction, slots)

        self.after = both
        try:
            yield
        finally:
            self.after = before

    def close(self) -> None:
        """Remove the engine's files on disk."""
        if self.storage.disk is not None:
            self.storage.disk.close()

    def where(self, raised: bool = False) -> str:
        """The rank's current instruction, the ranks that it waits for, the instructions around it, and the
        slots that are alive. On a GPU the host runs ahead: the current instruction is the first that the GPU
        has not finished. `raised`: it is the one that the host has reached, which has raised an error."""
        me = f"rank {self.comm.rank} ({self.comm.here})"
        if self.current is None:
            return f"{me} is between programs"
        name, index, since = self.current
        if not raised:
            index = next((i for i, mark in enumerate(self._ended) if not self.clock.passed(mark)), index)
        programs = self.plan.programs[name]
        instruction = programs[self.position][index]
        awaited = self._awaited(name, index, raised)
        waiting = f"for {time.monotonic() - since:.1f} s at '{instruction}'{awaited}"
        alive = [str(slot) for slot in self.slots.alive()
                 if slot not in seam_of(self.plan.table, self.position, name)]
        shown = ", ".join(alive[:12]) + (f" and {len(alive) - 12} more" if len(alive) > 12 else "")
        place = describe(name, programs, self.position, index, "here")
        return f"{me} {waiting}\n{place}\n  alive: {shown or 'nothing'}"

    def _unit(self) -> str:
        """The name of the unit that is being computed, before a failure: "blocks.3: "."""
        if self._under is not None and self._under.waiting is not None:  # what it waits for has failed
            return ""
        name, index, _ = self.current or ("", 0, 0.0)
        instruction = self.plan.programs[name][self.position][index] if name else None
        if instruction is None or instruction.op not in COMPUTE:
            return ""
        return f"{self.plan.table.units[instruction.unit].name}: "

    def _awaited(self, name: str, index: int, raised: bool = False) -> str:
        """The ranks that an instruction waits for, in words: those that take part in it, or in the
        instruction that it waits for."""
        program, mesh = self.plan.programs[name][self.position], self.comm.mesh
        instruction, text = program[index], ""
        under = self._under
        source = under.waiting if under is not None else None  # that the host waits for
        if under is not None and source is None and not raised:
            source = next((source for at, source, _, to in under.waits
                           if at == index and not self.clock.passed(to)), None)
        job = index if source is None else source
        if source is not None and source >= 0:
            instruction = program[source]
            text = f", which needs '{instruction}'"
        if under is not None and (first := under.ahead_of(job, raised)) != job:
            instruction = program[first]
            text += f", behind '{instruction}'"
        if instruction.op in MESSAGES:
            return f"{text}, with rank {mesh.group('pp', self.comm.rank)[instruction.peer]}"
        groups = effects(instruction, self.plan.table, self.position).groups
        others = sorted({rank for group in groups
                         for rank in self.comm.groups[group].ranks} - {self.comm.rank})
        return f"{text}, with rank{'s' if len(others) > 1 else ''} {_some(others)}" if others else text


_Handler = Callable[[Instruction, Slots], Any]


def _by_kind(of_unit: _Handler | None, cut: _Handler | None,
             travels: _Handler | None) -> _Handler:
    """The handler of an op: of a parameter unit, of a slot that is cut over ranks, of one that travels."""
    if cut is None and travels is None:
        assert of_unit is not None
        return of_unit

    def handle(item: Instruction, slots: Slots) -> Any:
        handler = of_unit if not item.of_slot else cut if item.kind in PARTS else travels
        assert handler is not None, item
        return handler(item, slots)

    return handle


def _keeping(table: Table, states: Mapping[int, UnitState], saving: SavingPolicy, unit: int,
             others: Sequence[UnsavedMemory]) -> AbstractContextManager[Any]:
    return saving.keeping([*places([states[p] for p in table.units[unit].parameters]), *others])


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


@contextmanager
def _waits(engine: weakref.ref[Engine], name: str) -> Iterator[None]:
    """The host waits for CLIP of a program that an engine has issued. A failure is raised as in `_run`."""
    of = engine()
    if of is None or of.current is not None:  # a program is under way, which says where the rank is
        yield
        return
    clip = next(index for index, item in enumerate(of.plan.programs[name][of.position]) if item.op == Op.CLIP)
    of.current = name, clip, time.monotonic()
    try:
        yield
    except Exception as error:
        raise of._failure(error) from error
    finally:
        of.current = None

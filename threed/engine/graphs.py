"""CUDA graphs at run time: the computation of a unit is recorded once, and replayed after that; so is its
update, where the device has the numbers of it.

A host issues a kernel in some microseconds; where kernels are shorter than that, the GPU waits for the host.
A graph issues all kernels of a unit's forward or backward at once. What is recorded is what the handlers of
`features/pipeline/run` compute; which instructions share a graph, and in which memory, the plan says
(program/graphs).

A graph holds no collective: where a unit calls one, its record is cut in two, with the collective in between.
Nor does it hold what Python does beside the kernels: a gradient's buffer is taken anew in each replay.

Tensors in a set's memory are freed as they are without graphs, so that later graphs of the pass reuse their
memory. What is kept here of them is where they are; passes of a variant run in one order, so that what has
been recorded there is there again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from threed.base.errors import RunError
from threed.comm.group import Group
from threed.comm.lanes import Handle
from threed.devices import device_of
from threed.devices.device import GraphPiece, Recorder
from threed.features.zero.gradient import Gradient
from threed.features.zero.units import UnitState
from threed.optim.base import OnDevice
from threed.program.graphs import PROGRAM, GraphKey, Turn
from threed.tensor.context import Batch
from threed.tensor.layers import WeightGrads

Tensors = Sequence[torch.Tensor | None]
UPDATES = -1, 0  # the set of updates, of no stage
WARM_STEPS = 1  # steps without graphs: libraries load, and pieces are compiled


@dataclass
class _Record:
    """What an instruction of the plan replays."""

    pool: Any
    recorder: Recorder
    steps: list[Callable[[], object]] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor | None] = field(default_factory=list)
    gradients: list[tuple[Gradient, int]] = field(default_factory=list)  # to which it adds, in order
    memory: Any = None  # where its parameters and gradients were
    _piece: GraphPiece | None = None

    def begin(self) -> None:
        self._piece = self.recorder.piece_of(self.pool)
        self._piece.begin()

    def end(self) -> None:
        assert self._piece is not None
        self._piece.end()
        if not self._piece.empty:
            self.steps.append(self._piece.replay)
        self._piece = None

    def call(self, collective: Callable[..., Handle], tensors: Sequence[torch.Tensor]) -> Handle:
        """Leave a collective between two graphs. It is issued when the record is replayed."""
        under_way: list[Handle] = []
        self.end()
        places = list(map(_unowned, tensors))
        self.steps.append(lambda: under_way.append(collective(*places)))
        self.begin()

        def wait() -> None:
            self.end()
            self.steps.append(lambda: under_way.pop().wait())
            self.begin()

        return Handle(wait, tensors)  # until then nothing else gets their memory

    def abandon(self) -> None:
        """End a recording that failed, so that the device can be used to say why."""
        if self._piece is not None:
            with suppress(RuntimeError):  # the failure may have ended it
                self._piece.end()


class GraphRun:
    """Runs the computation of instructions by graphs (as features/pipeline/run.Runner), and updates on the
    device (as features/zero/run.Updater)."""

    def __init__(self, turns: Mapping[int, Turn], states: dict[int, UnitState], weight_grads: WeightGrads,
                 device: torch.device):
        """`turns`: of the program PROGRAM of this position."""
        self.turns, self.states, self.weight_grads = turns, states, weight_grads
        self.recorder = device_of(device).recorder()
        self._pools: dict[tuple[int, int], Any] = {}
        self._records: dict[GraphKey, _Record] = {}
        self._origin: dict[int, tuple[int, int, int]] = {}  # address -> stage, set and variant of an output
        self._batches: dict[tuple[int, int], tuple[int, Batch]] = {}  # set -> micro-batch, its data
        self._updates: dict[tuple[int, bool], _Record] = {}  # unit, whether its gradient is divided
        self._numbers: dict[str, torch.Tensor] = {}  # of updates, where graphs read them
        self._program, self._steps = "", 0
        self._turn: Turn | None = None
        self.recording: _Record | None = None

    def begin(self, program: str) -> None:
        """A program begins."""
        self._steps += program == PROGRAM
        self._program = program
        if not self._records and self._steps > WARM_STEPS:
            self.recorder.ready()
        self._batches = {home: (-1, batch) for home, (_, batch) in self._batches.items()}

    def at(self, index: int) -> None:
        """This instruction of the program comes next."""
        self._turn = self.turns.get(index) if self._active else None

    @property
    def _active(self) -> bool:
        return self._program == PROGRAM and self._steps > WARM_STEPS

    def groups(self, groups: dict[str, Group]) -> dict[str, Any]:
        """The groups with which layers are built."""
        return {name: _Outside(group, self) for name, group in groups.items()}

    def run(self, inputs: Sequence[torch.Tensor],
            body: Callable[..., tuple[Tensors, Any]]) -> tuple[Tensors, Any]:
        """body(*inputs): the tensors that it makes, and what else it makes while it is recorded. RunError
        where a replay would not find what it needs where it was."""
        turn = self._turn
        if turn is None:
            return body(*inputs)
        for unit in turn.grads:  # in the plan's order, not in autograd's
            self.states[unit].gradient.whole()
        record, kept = self._records.get(turn.key), None
        if record is not None:
            _check(f"{turn.key.op} u{turn.key.unit}", record.memory, self._memory(turn))
            outputs: Tensors = record.outputs
        else:
            record, outputs, kept = self._record(turn, inputs, body)
        for place, given in zip(record.inputs, inputs, strict=True):
            if place.data_ptr() != given.data_ptr():
                place.copy_(given)
        for step in record.steps:
            step()
        for gradient, number in record.gradients:
            gradient.into(number)
        return outputs, kept

    def fixed(self, microbatch: int, batch: Batch) -> Batch:
        """The data of a micro-batch, where graphs read it."""
        if self._turn is None:
            return batch
        key = self._turn.key
        last, copy = self._batches.get((key.stage, key.set), (-1, None))
        if copy is None:
            copy = batch.of({name: self.recorder.fixed(part) for name, part in batch.parts().items()})
        if last != microbatch:
            parts = batch.parts()
            for name, place in copy.parts().items():
                place.copy_(parts[name])
            self._batches[key.stage, key.set] = microbatch, copy
        return copy

    def numbers(self, given: OnDevice) -> OnDevice:
        """The numbers of a step's updates, where graphs read them."""
        for name, value in given._asdict().items():
            if value is not None:
                if name not in self._numbers:
                    self._numbers[name] = self.recorder.fixed(value)
                self._numbers[name].copy_(value)
        return OnDevice(*(None if value is None else self._numbers[name]
                          for name, value in given._asdict().items()))  # pyright: ignore[reportArgumentType]

    def update(self, unit: int, numbers: OnDevice, body: Callable[[], None]) -> None:
        """The update of a unit. What it makes meanwhile has memory of its own, which updates share."""
        if not self._active:
            body()
            return
        key, state = (unit, numbers.divisor is not None), self.states[unit]
        kept = state.optimizer_state
        memory = [each.data_ptr() for each in (kept.master, *kept.buffers.values(), state.gradient.values,
                                               state.weights.at_home)]
        if key not in self._updates:
            with self._recording(UPDATES) as record:
                body()
            record.memory, self._updates[key] = memory, record
        _check(f"the update of p{unit}", self._updates[key].memory, memory)
        for step in self._updates[key].steps:
            step()

    def leaving(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is used beside the computation: a copy, if it is in the memory of a set, which no
        copy or message under way holds back from its next use."""
        return tensor.clone() if tensor.data_ptr() in self._origin else tensor

    def _record(self, turn: Turn, inputs: Sequence[torch.Tensor],
                body: Callable[..., tuple[Tensors, Any]]) -> tuple[_Record, Tensors, Any]:
        memory = self._memory(turn)
        with self._recording((turn.key.stage, turn.key.set)) as record:
            places = [self._place(each, turn) for each in inputs]
            outputs, kept = body(*places)
        record.memory = memory
        record.inputs = [_unowned(each) for each in places]
        record.outputs = [_unowned(each) if each is not None else None for each in outputs]
        self._origin |= {each.data_ptr(): turn.key.pool for each in outputs if each is not None}
        self._records[turn.key] = record
        return record, outputs, kept

    @contextmanager
    def _recording(self, home: tuple[int, int]) -> Iterator[_Record]:
        """What runs within the context is recorded, with its memory in a set."""
        if home not in self._pools:
            self._pools[home] = self.recorder.pool()
        record = _Record(self._pools[home], self.recorder)
        self.recording, self.weight_grads.taken = record, record.gradients
        try:
            record.begin()
            yield record
            record.end()
        except Exception as error:
            record.abandon()
            raise RuntimeError(f"{error} (while a CUDA graph was recorded; run.cuda_graphs=false runs "
                               "without)") from error
        finally:
            self.recording, self.weight_grads.taken = None, None

    def _place(self, given: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Where a graph reads an input: where it is, if the graph before in this pass has made it, else in a
        tensor of its own."""
        if self._origin.get(given.data_ptr()) == turn.key.pool:
            return given
        place = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
        self.recorder.fill(place, given)
        return place

    def _memory(self, turn: Turn) -> Any:
        """The addresses of parameters and gradients, and which gradients begin anew."""
        params = [self.states[unit].weights.whole().data_ptr() for unit in turn.params]
        return params, [self.states[unit].gradient.place() for unit in turn.grads]


class _Outside:
    """A group whose collectives are left out of graphs."""

    def __init__(self, group: Group, run: GraphRun):
        self._group, self._run = group, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> Handle:
        return self._call(partial(self._group.all_reduce, op=op), tensor)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        return self._call(self._group.reduce_scatter, output, tensor)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        return self._call(self._group.all_gather, output, tensor)

    def exchange(self, output: torch.Tensor, tensor: torch.Tensor, gives: Sequence[int],
                 takes: Sequence[int]) -> Handle:
        return self._call(partial(self._group.exchange, gives=gives, takes=takes), output, tensor)

    def _call(self, collective: Callable[..., Handle], *tensors: torch.Tensor) -> Handle:
        record = self._run.recording
        if record is None or self._group.size() == 1:
            return collective(*tensors)
        return record.call(collective, tensors)


def _check(what: str, recorded: object, memory: object) -> None:
    if memory != recorded:
        raise RunError(f"the CUDA graph of {what} was recorded with its parameters and gradients at "
                       f"{recorded}, and now they are at {memory}; set run.cuda_graphs=false, and report "
                       "this with the config")


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which its owners free when they will."""
    whole = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(whole.data_ptr(), tensor.device, whole.nbytes())
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # pyright: ignore

"""What FORWARD, BACKWARD, SEND and RECV do to tensors.

Each compute unit is an island of autograd: its input is detached, and BACKWARD runs the graph of that one
unit with the gradient that came for its output. What a unit hands on to later ones besides is another output
to it, and another input to each of them, to whose gradient it adds. Tiles of a layer share their norm's
output so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from threed.comm import Comm
from threed.lanes import Handle
from threed.models.layers.base import Layer, Out
from threed.models.tiling import layers_of
from threed.program.instruction import Instruction, Op, Slot
from threed.program.table import Table, gradient_kind
from threed.schema import Config
from threed.slots import Slots
from threed.tensor.context import Batch, Context


class KeptInputs(Protocol):
    """Where the residual stream that a unit reads lies between FORWARD and RECOMPUTE."""

    def keep(self, x: torch.Tensor) -> torch.Tensor: ...
    def give_back(self, x: torch.Tensor) -> torch.Tensor: ...


class Saved(NamedTuple):
    """What BACKWARD needs of a unit: its graph's leaves and roots. (Its outputs belong to others.)"""

    x: torch.Tensor | None  # its input; None where no gradient is asked of the graph: tokens, or a sum that
    # is only added to
    reads: dict[Slot, torch.Tensor]  # what earlier units have handed it -> its leaf
    output: Any  # None for the last unit
    makes: dict[Slot, Any]  # what it hands on
    loss: Any  # None where it adds nothing to it


class PipelineRun:
    """The layers of one rank and the handlers that run them."""

    def __init__(self, config: Config, comm: Comm, table: Table, parameters: Mapping[str, nn.Parameter],
                 context: Context, keeping: Callable[[int], AbstractContextManager[Any]], inputs: KeptInputs):
        """`parameters`: key -> parameter, for every unit that the rank holds. `keeping`: the context in which
        FORWARD of a unit runs, which says how autograd keeps its parameters. `inputs`: where inputs are kept
        for RECOMPUTE."""
        self.comm, self.table, self.weight_grads = comm, table, context.weight_grads
        self.position = comm.here.position
        self.dtype = context.dtype
        self.keeping, self.inputs = keeping, inputs
        self.loss_scale = 1.0  # what backward begins with
        _, length = context.sequence()
        self.shape = length, config.train.micro_batch_size, config.model.hidden
        layers = layers_of(config)
        self.layers: dict[int, list[Layer]] = {
            unit: [layer.build(context, parameters) for layer in layers[slice(*table.units[unit].layers)]]
            for unit in table.units_of(self.position)}
        self.batch: Callable[[int], Batch] = _no_batch  # micro-batch -> its data; set before each program
        self._sends: deque[Handle] = deque()
        self.handlers: dict[Op, Callable[[Instruction, Slots], None]] = {
            Op.FORWARD: self.forward, Op.RECOMPUTE: self.recompute, Op.BACKWARD: self.backward,
            Op.BACKWARD_INPUT: self.backward_input, Op.BACKWARD_WEIGHT: self.backward_weight,
            Op.SEND: self.send,
            Op.RECV: self.recv}

    def forward(self, instruction: Instruction, slots: Slots) -> None:
        _, unit, microbatch, *_ = instruction
        x = slots.get(Slot("act", unit - 1, microbatch)).detach() if unit > 0 else None
        if instruction.keep == "all":
            output, saved = self._with_graph(unit, microbatch, x, slots)
            slots.put(Slot("saved", unit, microbatch), saved)
        else:
            with torch.no_grad():
                output = self._compute(unit, microbatch, x, self._read(unit, microbatch, slots))
            self._hand(unit, microbatch, output, slots)
            if instruction.keep == "input":
                kept = None if self.table.units[unit].adds else x
                if kept is not None and self.table.keeps_stream(unit):
                    kept = self.inputs.keep(kept)
                slots.put(Slot("kept", unit, microbatch), kept)
        if unit < self.table.last:
            assert output.x is not None, f"{self.table.units[unit].name} has returned no residual stream"
            slots.put(Slot("act", unit, microbatch), output.x.detach())
        if output.loss is not None:
            loss = Slot("loss")
            before = slots.get(loss) if loss in slots else 0.0
            slots.put(loss, before + output.loss.detach().double())

    def recompute(self, instruction: Instruction, slots: Slots) -> None:
        """FORWARD once more, for its graph. (Dropout is a function of sample and place, so the numbers are
        the same.)"""
        _, unit, microbatch, *_ = instruction
        x = slots.get(Slot("kept", unit, microbatch))
        if self.table.keeps_stream(unit):
            x = self.inputs.give_back(x).view(self.shape)
        _, saved = self._with_graph(unit, microbatch, x, slots)
        slots.put(Slot("saved", unit, microbatch), saved)

    def _with_graph(self, unit: int, microbatch: int, x: torch.Tensor | None,
                    slots: Slots) -> tuple[Out, Saved]:
        """What a unit computes, and what BACKWARD needs of it."""
        leaf = None if x is None or self.table.units[unit].adds else x.detach().requires_grad_()
        given = self._read(unit, microbatch, slots)
        reads = {slot: value.detach().requires_grad_() for slot, value in given.items()}
        with torch.enable_grad(), self.keeping(unit):
            output = self._compute(unit, microbatch, x if leaf is None else leaf, reads)
        self._hand(unit, microbatch, output, slots)
        edge = torch.autograd.graph.get_gradient_edge
        makes = {Slot(name, unit, microbatch): edge(value) for name, value in output.makes.items()}
        return output, Saved(leaf, reads, edge(output.x) if output.x is not None else None, makes,
                             edge(output.loss) if output.loss is not None else None)

    def _compute(self, unit: int, microbatch: int, x: torch.Tensor | None,
                 reads: dict[Slot, torch.Tensor]) -> Out:
        """Its layers one after the other, each with the tensors that it reads, of this unit or earlier
        ones."""
        batch, output = self.batch(microbatch), Out(x)
        given = {slot.kind: value for slot, value in reads.items()}
        for layer in self.layers[unit]:
            out = layer(output.x, batch, **{name: given[name] for name in layer.reads})
            out = out if isinstance(out, Out) else Out(out)
            given.update(out.makes)
            losses = [loss for loss in (output.loss, out.loss) if loss is not None]
            loss = sum(losses[1:], losses[0]) if losses else None
            output = Out(out.x, {**output.makes, **out.makes}, loss)
        wanted = {handed.name for handed in self.table.units[unit].makes}
        return output._replace(makes={name: value for name, value in output.makes.items() if name in wanted})

    def _read(self, unit: int, microbatch: int, slots: Slots) -> dict[Slot, torch.Tensor]:
        """What earlier units have handed a unit."""
        wanted = [Slot(read.name, read.unit, microbatch) for read in self.table.units[unit].reads]
        return {slot: slots.get(slot) for slot in wanted}

    def _hand(self, unit: int, microbatch: int, output: Out, slots: Slots) -> None:
        """What a unit hands on."""
        for name, value in output.makes.items():
            slots.put(Slot(name, unit, microbatch), value.detach())

    def backward(self, instruction: Instruction, slots: Slots) -> None:
        _, unit, microbatch, *_ = instruction
        self._propagate(unit, microbatch, slots)  # weight gradients go where zero/state's hooks put them
        self._mark(unit, slots)

    def backward_input(self, instruction: Instruction, slots: Slots) -> None:
        """The gradient of the unit's input; its weights' products are put off. The embedding's input is
        tokens: all of its backward is put off."""
        _, unit, microbatch, *_ = instruction
        saved: Saved = slots.get(Slot("saved", unit, microbatch))
        operands: list[Callable[[], None]] = []
        if saved.x is None and not saved.reads:
            roots = self._roots(unit, microbatch, saved, slots)
            operands.append(lambda: torch.autograd.backward(*roots))
            self._hand_on(unit, microbatch, saved, slots)
        else:
            self.weight_grads.put_off = operands
            try:
                self._propagate(unit, microbatch, slots)
            finally:
                self.weight_grads.put_off = None
        slots.put(Slot("operands", unit, microbatch), operands)

    @torch.no_grad()
    def backward_weight(self, instruction: Instruction, slots: Slots) -> None:
        _, unit, microbatch, *_ = instruction
        operands = slots.get(Slot("operands", unit, microbatch))
        while operands:  # each lets go of its tensors when done
            operands.pop(0)()
        self._mark(unit, slots)

    def _propagate(self, unit: int, microbatch: int, slots: Slots) -> None:
        """Run a unit's graph: gradients of its input, of what it has read, and of its weights (by hooks)."""
        saved: Saved = slots.get(Slot("saved", unit, microbatch))
        sums = {_gradient(slot): leaf for slot, leaf in saved.reads.items()}
        for slot, leaf in sums.items():
            leaf.grad = slots.get(slot) if slot in slots else None  # autograd adds to it where it lies
        torch.autograd.backward(*self._roots(unit, microbatch, saved, slots))
        for slot, leaf in sums.items():
            slots.put(slot, leaf.grad if leaf.grad is not None else torch.zeros_like(leaf))
            leaf.grad = None
        self._hand_on(unit, microbatch, saved, slots)
        if saved.x is not None:
            saved.x.grad = None

    def _roots(self, unit: int, microbatch: int, saved: Saved,
               slots: Slots) -> tuple[list[Any], list[torch.Tensor]]:
        """Where a unit's backward begins, and with which gradients."""
        roots, grads = [], []
        if saved.output is not None:
            roots.append(saved.output)
            grads.append(slots.get(Slot("grad", unit, microbatch)))
        for slot, root in saved.makes.items():
            roots.append(root)
            grads.append(slots.get(_gradient(slot)))
        if saved.loss is not None:
            roots.append(saved.loss)
            grads.append(torch.full((), self.loss_scale, device=self.comm.device))
        return roots, grads

    def _hand_on(self, unit: int, microbatch: int, saved: Saved, slots: Slots) -> None:
        """The gradient of a unit's input, to the unit before it. To a sum it passes as it is."""
        if unit > 0:
            slots.put(Slot("grad", unit - 1, microbatch),
                      slots.get(Slot("grad", unit, microbatch)) if saved.x is None else saved.x.grad)

    def _mark(self, unit: int, slots: Slots) -> None:
        for parameter_unit in self.table.units[unit].parameters:
            slots.put(Slot("wgrad", parameter_unit), True)

    def send(self, instruction: Instruction, slots: Slots) -> None:
        while self._sends and self._sends[0].done():
            self._sends.popleft()
        channel = self.comm.channels[self.position, instruction.peer, instruction.kind]
        self._sends.append(channel.send(slots.get(instruction.slot)))

    def recv(self, instruction: Instruction, slots: Slots) -> None:
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.comm.device)
        channel = self.comm.channels[instruction.peer, self.position, instruction.kind]
        slots.put(instruction.slot, buffer, channel.recv(buffer))

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._sends:
            self._sends.popleft().wait()


def _gradient(handed: Slot) -> Slot:
    return handed._replace(kind=gradient_kind(handed.kind))


def _no_batch(microbatch: int) -> Batch:
    raise AssertionError("no data was set for this program")

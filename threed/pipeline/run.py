"""What FORWARD, BACKWARD, SEND and RECV do to tensors.

Each compute unit has an autograd graph of its own: its input is detached, and BACKWARD runs the graph of that
unit with the gradient of its output. A unit may hand further tensors to later units: each is another output
of the unit, and another input of its readers, which add up its gradient. This is how tiles of a layer share
the output of their norm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from threed.comm import Comm
from threed.lanes import Handle
from threed.models.layers.base import Layer, Out
from threed.models.tiling import layers_of
from threed.pipeline.feed import Feed
from threed.program.instruction import Instruction, Op, Slot
from threed.program.table import Table, gradient_kind
from threed.schema import Config
from threed.slots import Slots
from threed.tensor.context import Context


class KeptInputs(Protocol):
    """Storage between FORWARD and RECOMPUTE for the residual stream that a unit reads."""

    def keep(self, x: torch.Tensor) -> torch.Tensor: ...
    def give_back(self, x: torch.Tensor) -> torch.Tensor: ...


class Saved(NamedTuple):
    """The leaves and roots of a unit's graph, which BACKWARD needs. (The outputs are slots of their own.)"""

    # The unit's input; None where it gets no gradient: tokens, or a sum that the unit only adds to.
    x: torch.Tensor | None
    reads: dict[Slot, torch.Tensor]  # tensor of an earlier unit -> its leaf
    output: Any  # None for the last unit
    makes: dict[Slot, Any]  # tensor for later units -> its root
    loss: Any  # None where the unit adds nothing to the loss


def built(config: Config, table: Table, units: Iterable[int], context: Context,
          parameters: Mapping[str, nn.Parameter]) -> dict[int, list[Layer]]:
    """The layers of some units, bound to the parameters of a rank (key -> parameter)."""
    layers = layers_of(config)
    return {unit: [layer.build(context, parameters) for layer in layers[slice(*table.units[unit].layers)]]
            for unit in units}


class PipelineRun:
    """The layers of one rank and the handlers that run them."""

    def __init__(self, config: Config, comm: Comm, table: Table, layers: Mapping[int, list[Layer]],
                 context: Context, keeping: Callable[[int], AbstractContextManager[Any]], inputs: KeptInputs):
        """`layers`: unit -> its layers, as `built`. `keeping`: a unit -> the context in which its FORWARD
        runs, which says how autograd keeps its parameters. `inputs`: storage of kept inputs."""
        self.comm, self.table, self.layers, self.weight_grads = comm, table, layers, context.weight_grads
        self.position = comm.here.position
        self.dtype = context.dtype
        self.keeping, self.inputs = keeping, inputs
        self.loss_scale = 1.0  # the gradient of the loss with which backward begins
        _, length = context.sequence()
        self.shape = length, config.train.micro_batch_size, config.model.hidden
        self.feed = Feed(comm.device)
        self._sends: deque[Handle] = deque()
        self.handlers: dict[Op, Callable[[Instruction, Slots], Handle | None]] = {
            Op.FORWARD: self.forward, Op.RECOMPUTE: self.recompute, Op.BACKWARD: self.backward,
            Op.BACKWARD_INPUT: self.backward_input, Op.BACKWARD_WEIGHT: self.backward_weight,
            Op.SEND: self.send, Op.RECV: self.recv}

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
        """FORWARD once more, for its graph. (Dropout depends only on the sample and the element's place, so
        the numbers are the same.)"""
        _, unit, microbatch, *_ = instruction
        x = slots.get(Slot("kept", unit, microbatch))
        if self.table.keeps_stream(unit):
            x = self.inputs.give_back(x).view(self.shape)
        _, saved = self._with_graph(unit, microbatch, x, slots)
        slots.put(Slot("saved", unit, microbatch), saved)

    def _with_graph(self, unit: int, microbatch: int, x: torch.Tensor | None,
                    slots: Slots) -> tuple[Out, Saved]:
        """The output of a unit, and what its BACKWARD needs."""
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
        """Run a unit's layers one after the other, each with the tensors of this or earlier units that it
        reads."""
        batch, output = self.feed.take(microbatch), Out(x)
        given = {slot.kind: value for slot, value in reads.items()}
        for layer in self.layers[unit]:
            out = layer(output.x, batch, **{name: given[name] for name in layer.reads})
            out = out if isinstance(out, Out) else Out(out)
            given.update(out.makes)
            losses = [loss for loss in (output.loss, out.loss) if loss is not None]
            loss = sum(losses[1:], losses[0]) if losses else None
            output = Out(out.x, {**output.makes, **out.makes}, loss)
        self.feed.ahead(microbatch)
        wanted = {handed.name for handed in self.table.units[unit].makes}
        return output._replace(makes={name: value for name, value in output.makes.items() if name in wanted})

    def _read(self, unit: int, microbatch: int, slots: Slots) -> dict[Slot, torch.Tensor]:
        """The tensors of earlier units that a unit reads."""
        wanted = [Slot(read.name, read.unit, microbatch) for read in self.table.units[unit].reads]
        return {slot: slots.get(slot) for slot in wanted}

    def _hand(self, unit: int, microbatch: int, output: Out, slots: Slots) -> None:
        """Store the tensors that a unit makes for later units."""
        for name, value in output.makes.items():
            slots.put(Slot(name, unit, microbatch), value.detach())

    def backward(self, instruction: Instruction, slots: Slots) -> None:
        _, unit, microbatch, *_ = instruction
        self._propagate(unit, microbatch, slots)  # weight gradients go where zero/state's hooks put them
        self._mark(unit, slots)

    def backward_input(self, instruction: Instruction, slots: Slots) -> None:
        """The gradient of the unit's input; the products of its weight gradients are delayed. The embedding's
        input is tokens, so all of its backward is delayed."""
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
        while operands:  # each product frees its operands when it is done
            operands.pop(0)()
        self._mark(unit, slots)

    def _propagate(self, unit: int, microbatch: int, slots: Slots) -> None:
        """Run a unit's graph: gradients of its input, of the tensors it read, and (by hooks) of its
        weights."""
        saved: Saved = slots.get(Slot("saved", unit, microbatch))
        sums = {_gradient(slot): leaf for slot, leaf in saved.reads.items()}
        for slot, leaf in sums.items():
            leaf.grad = slots.get(slot) if slot in slots else None  # autograd adds to it in place
        torch.autograd.backward(*self._roots(unit, microbatch, saved, slots))
        for slot, leaf in sums.items():
            slots.put(slot, leaf.grad if leaf.grad is not None else torch.zeros_like(leaf))
            leaf.grad = None
        self._hand_on(unit, microbatch, saved, slots)
        if saved.x is not None:
            saved.x.grad = None

    def _roots(self, unit: int, microbatch: int, saved: Saved,
               slots: Slots) -> tuple[list[Any], list[torch.Tensor]]:
        """The roots of a unit's graph, and the gradients with which backward begins there."""
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
        """Pass the gradient of a unit's input to the unit before it. A unit that only adds to its input
        passes the gradient of its output on unchanged."""
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

    def recv(self, instruction: Instruction, slots: Slots) -> Handle:
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.comm.device)
        channel = self.comm.channels[instruction.peer, self.position, instruction.kind]
        slots.put(instruction.slot, buffer)
        return channel.recv(buffer)

    def finish(self) -> None:
        """Wait until every message has left."""
        while self._sends:
            self._sends.popleft().wait()


def _gradient(handed: Slot) -> Slot:
    return handed._replace(kind=gradient_kind(handed.kind))

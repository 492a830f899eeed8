"""What FORWARD, BACKWARD, SEND and RECV do to tensors.

Each compute unit has an autograd graph of its own: its input is detached, and BACKWARD runs the graph of that
unit with the gradient of its output. A unit may hand further tensors to later units: each is another output
of the unit, and another input of its readers, which add up its gradient. This is how tiles of a layer share
the output of their norm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from threed.base.errors import RunError
from threed.comm.group import Comm
from threed.comm.lanes import Handle
from threed.features.pipeline.feed import Feed
from threed.models.layers.base import Layer, Out
from threed.models.layers.handing import handing
from threed.models.tiling import layers_of, new_layers, share_of
from threed.program.entries import gradient_of
from threed.program.instruction import WHOLES, Instruction, Op, Slot, SlotKind
from threed.program.slots import Late, Slots
from threed.program.table import Table
from threed.schema import Config
from threed.tensor import leaves as leaves_of
from threed.tensor.context import Batch, Context
from threed.tensor.halves import ByGraph, Halves
from threed.tensor.loss_sum import addend
from threed.tensor.packing import Packed, PackedStream, Packs, Whole
from threed.tensor.saving import UnsavedMemory


class KeptInputs(Protocol):
    """Storage between FORWARD and RECOMPUTE for the residual stream that a unit reads."""

    def keep(self, x: torch.Tensor) -> torch.Tensor: ...
    def give_back(self, x: torch.Tensor) -> torch.Tensor: ...


Tensors = Sequence[torch.Tensor | None]


class Runner(Protocol):
    """How the computation of an instruction is run."""

    def run(self, inputs: Sequence[torch.Tensor],
            body: Callable[..., tuple[Tensors, Any]]) -> tuple[Tensors, Any]:
        """body(*inputs): the tensors that it makes, and whatever else its backward needs. In place of the
        inputs it may get tensors with the same values."""
        ...

    def fixed(self, microbatch: int, batch: Batch) -> Batch:
        """The same data, at the addresses that the computation reads: CUDA graphs need fixed ones."""
        ...

    def leaving(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, for a use beside the computation."""
        ...


class Plain:
    """Runs the computation as it is."""

    def run(self, inputs: Sequence[torch.Tensor],
            body: Callable[..., tuple[Tensors, Any]]) -> tuple[Tensors, Any]:
        return body(*inputs)

    def fixed(self, microbatch: int, batch: Batch) -> Batch:
        return batch

    def leaving(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class SavedGraph(NamedTuple):
    """The leaves and roots of a unit's graph, which BACKWARD needs. (The outputs are slots of their own.)"""

    # Of the unit's input; none where it gets no gradient: tokens, or a sum that the unit only adds to.
    x: list[torch.Tensor]
    reads: dict[Slot, torch.Tensor]  # tensor of an earlier unit that gets a gradient -> its leaf
    # Roots of its output, of the tensors for later units, and of its loss, those that it has; None where no
    # parameter trains, and no input has a gradient.
    roots: list[Any]
    # Of what has come, and comes again: where the graph finds it while BACKWARD runs.
    again: dict[Slot, Late]


def built(config: Config, table: Table, units: Iterable[int], context: Context,
          parameters: Mapping[str, nn.Parameter]) -> dict[int, list[Layer]]:
    """The layers of some units, bound to the parameters of a rank (key -> parameter)."""
    layers = new_layers(config)
    return {unit: [layer.build(context, parameters) for layer in layers[slice(*table.units[unit].layers)]]
            for unit in units}


class PipelineRun:
    """The layers of one rank and the handlers that run them."""

    def __init__(self, comm: Comm, table: Table, layers: Mapping[int, list[Layer]], context: Context,
                 stream: Callable[[int], PackedStream],
                 keeping: Callable[[int, Sequence[UnsavedMemory]], AbstractContextManager[Any]],
                 inputs: KeptInputs):
        """`layers`: unit -> its layers, as `built`. `stream`: as `streams`. `keeping`: a unit, and memory
        that is reused before its backward -> the context in which its FORWARD runs, which says how autograd
        keeps that and its parameters. `inputs`: storage of kept inputs."""
        self.comm, self.table, self.layers, self.weight_grads = comm, table, layers, context.weight_grads
        self.position = comm.here.position
        self.dtype = context.dtype
        self.keeping, self.inputs = keeping, inputs
        self.runner: Runner = Plain()
        self.loss_grad = torch.ones((), device=comm.device)  # with which backward begins: the loss scale
        self._constants = torch.arange(2, dtype=torch.float64, device=comm.device)
        self.saving = context.saving
        self.stream = stream
        self.feed = Feed(comm.device, context.places)
        self._sends: deque[Handle] = deque()

    def handlers(self) -> dict[Op, Callable[[Instruction, Slots], Handle | None]]:
        return {Op.FORWARD: self.forward, Op.RECOMPUTE: self.recompute, Op.BACKWARD: self.backward,
                Op.BACKWARD_INPUT: self.backward_input, Op.BACKWARD_WEIGHT: self.backward_weight,
                Op.SEND: self.send, Op.RECV: self.recv}

    def forward(self, instruction: Instruction, slots: Slots) -> None:
        unit, microbatch = instruction.turn
        x = slots.get(Slot(SlotKind.ACT, unit - 1, microbatch)).detach() if unit > 0 else None
        output, saved = self._run(unit, microbatch, x, slots, instruction.keep == "all")
        if instruction.keep == "all":
            slots.put(Slot(SlotKind.SAVED, unit, microbatch), saved)
        elif instruction.keep == "input":
            kept = None if self.table.units[unit].adds else x
            if kept is not None and self.table.keeps_stream(unit):
                kept = self.inputs.keep(kept)
                if self.table.activation.offload:
                    kept = self.runner.leaving(kept)
            slots.put(Slot(SlotKind.KEPT, unit, microbatch), kept)
        if unit < self.table.last:
            slots.put(Slot(SlotKind.ACT, unit, microbatch), not_none(output.x).detach())
        if output.logits is not None:
            slots.put(Slot(SlotKind.LOGITS, unit, microbatch), output.logits)
        if not self.table.units[unit].loss and (output.loss is not None or output.penalty is not None):
            raise RunError(f"{self.table.units[unit].name} has returned a loss or a penalty, and none of its "
                           "layers has said so: set `loss = True` on the layer that returns it")
        if self.table.units[unit].loss and instruction.keep != "logits":
            loss = Slot(SlotKind.LOSS)
            more = addend(output.loss, output.count, output.penalty, self._constants)
            slots.put(loss, slots.get(loss) + more if loss in slots else more)

    def recompute(self, instruction: Instruction, slots: Slots) -> None:
        """FORWARD once more, for its graph. (Dropout depends only on the sample and the element's place, so
        the numbers are the same.)"""
        unit, microbatch = instruction.turn
        x = slots.get(Slot(SlotKind.KEPT, unit, microbatch))
        if self.table.keeps_stream(unit):
            x = self.stream(unit - 1).whole(self.inputs.give_back(x))
        _, saved = self._run(unit, microbatch, x, slots, True, again=True)
        slots.put(Slot(SlotKind.SAVED, unit, microbatch), saved)

    def _run(self, unit: int, microbatch: int, x: torch.Tensor | None, slots: Slots, backward: bool,
             again: bool = False) -> tuple[Out, SavedGraph | None]:
        """The output of a unit; and what its BACKWARD needs, if there is one. Stores what the unit hands on.
        `again`: it has been computed before, and what it made without a gradient stays."""
        given, compute = self._read(unit, microbatch, slots), self._with_graph if backward else self._alone
        makes, name = self.table.units[unit].makes, self.table.units[unit].name
        fixed = [each.name for each in makes if again and not each.grad]
        given |= {slot: slots.get(slot) for slot in (Slot(name, unit, microbatch) for name in fixed)}
        batch = self.runner.fixed(microbatch, self.feed.take(microbatch))

        def body(*inputs: torch.Tensor) -> tuple[Tensors, SavedGraph | None]:
            first = inputs[0] if x is not None else None
            reads = dict(zip(given, inputs[len(inputs) - len(given):], strict=True))
            output, saved = compute(unit, microbatch, batch, first, reads)
            alone = again and self.table.units[unit].adds  # without the stream, to which it may add nothing
            made = (None if unit == self.table.last or (alone and output.x is None)
                    else self.stream(unit).close(output.x, name))
            handed = [output.makes[each.name] for each in makes]
            return [made, output.loss, output.logits, output.count, output.penalty, *handed], saved

        inputs = [x, *given.values()] if x is not None else [*given.values()]
        (made, loss, logits, count, penalty, *handed), saved = self.runner.run(inputs, body)
        self.feed.ahead(microbatch)
        named = {each.name: not_none(tensor) for each, tensor in zip(makes, handed, strict=True)}
        output = Out(made, named, loss, logits, count, penalty)
        for each in makes:
            if not again or (each.grad and not each.over):
                value = output.makes[each.name].detach()
                slots.put(Slot(each.name, unit, microbatch),
                          self.runner.leaving(value) if each.over else value)
        return output, saved

    @torch.no_grad()
    def _alone(self, unit: int, microbatch: int, batch: Batch, x: torch.Tensor | None,
               reads: dict[Slot, torch.Tensor]) -> tuple[Out, None]:
        value = self.stream(unit - 1).open(x, False)[0] if x is not None else None
        return self._compute(unit, batch, value, reads), None

    def _with_graph(self, unit: int, microbatch: int, batch: Batch, x: torch.Tensor | None,
                    given: dict[Slot, torch.Tensor]) -> tuple[Out, SavedGraph]:
        """The output of a unit, and what its BACKWARD needs."""
        value, leaves = x, list[torch.Tensor]()
        if x is not None and not self.table.units[unit].adds:
            value, leaves = self.stream(unit - 1).open(x, True)
        about = {Slot(each.name, each.unit, microbatch): each for each in self.table.units[unit].reads}
        graded = {slot for slot, each in about.items() if each.grad}
        spent = {slot for slot, each in about.items() if each.spent}
        again = {slot: Late() for slot, each in about.items() if each.again}
        reads = {slot: leaves_of.like(value) if slot in spent else leaves_of.wide(value) if slot in again else
                 value.detach().requires_grad_(slot in graded) for slot, value in given.items()}
        unsaved = [UnsavedMemory(given[slot], late.get) for slot, late in again.items()]
        with torch.enable_grad(), self.keeping(unit, unsaved):
            inputs = {slot: leaves_of.spent(leaf, given[slot]) if slot in spent else leaf
                      for slot, leaf in reads.items()}
            output = self._compute(unit, batch, value, inputs)
        for slot in again:  # its values may be freed, and come again
            leaves_of.free(reads[slot])
        roots = self.stream(unit).roots(output.x) if unit < self.table.last else []
        roots += [output.makes[each.name] for each in self.table.units[unit].makes if each.grad]
        roots += [] if (trained := _sum(output.loss, output.penalty)) is None else [trained]
        graded_leaves = {slot: leaf for slot, leaf in reads.items() if slot in graded}
        return output, SavedGraph(leaves, graded_leaves, list(map(_root, roots)), again)

    def _compute(self, unit: int, batch: Batch, x: Any,
                 reads: dict[Slot, torch.Tensor]) -> Out:
        """Run a unit's layers one after the other, each with the tensors of this or earlier units that it
        reads, and with what it has made before without a gradient."""
        output, given = Out(x), {slot.kind: value for slot, value in reads.items()}
        again = {slot.kind for slot in reads if slot.unit == unit}
        for layer in self.layers[unit]:
            hands = handing(layer)
            names = (*hands.reads, *(name for name in hands.without_grad if name in again))
            out = layer(output.x, batch, **{name: given[name] for name in names})
            out = out if isinstance(out, Out) else Out(out)
            given.update(out.makes)
            logits = out.logits if out.logits is not None else output.logits
            output = Out(out.x, {**output.makes, **out.makes}, _sum(output.loss, out.loss), logits, out.count,
                         _sum(output.penalty, out.penalty))
        wanted = {handed.name for handed in self.table.units[unit].makes}
        return output._replace(makes={name: value for name, value in output.makes.items() if name in wanted})

    def _read(self, unit: int, microbatch: int, slots: Slots) -> dict[Slot, torch.Tensor]:
        """The tensors of earlier units that a unit reads."""
        wanted = [Slot(read.name, read.unit, microbatch) for read in self.table.units[unit].reads]
        return {slot: slots.get(slot) for slot in wanted}

    def backward(self, instruction: Instruction, slots: Slots) -> None:
        unit, microbatch = instruction.turn
        self._propagate(unit, microbatch, slots)  # weight gradients go where zero's hooks put them
        self._mark(unit, slots)

    def backward_input(self, instruction: Instruction, slots: Slots) -> None:
        """The gradient of the unit's input; the products of its weight gradients are delayed. The embedding's
        input is tokens, so all of its backward is delayed."""
        unit, microbatch = instruction.turn
        operands = self._propagate(unit, microbatch, slots, delayed=True)
        slots.put(Slot(SlotKind.OPERANDS, unit, microbatch), operands)

    @torch.no_grad()
    def backward_weight(self, instruction: Instruction, slots: Slots) -> None:
        unit, microbatch = instruction.turn
        operands = slots.get(Slot(SlotKind.OPERANDS, unit, microbatch))

        def body() -> tuple[Tensors, None]:
            while operands:  # each product frees its operands when it is done
                operands.pop(0)()
            return [], None

        self.runner.run([], body)
        self._mark(unit, slots)

    def _propagate(self, unit: int, microbatch: int, slots: Slots,
                   delayed: bool = False) -> list[Callable[[], None]] | None:
        """Run a unit's graph: gradients of its input, of the tensors it read, and (by hooks) of its weights.
        `delayed`: returns functions that add the gradients of its weights."""
        saved: SavedGraph = slots.get(Slot(SlotKind.SAVED, unit, microbatch))
        sums = [gradient_of(Slot(read.name, read.unit, microbatch)) for read in self.table.units[unit].reads
                if read.grad]
        begun = [slots.get(slot) if slot in slots else None for slot in sums]
        passes_on = unit == 0 or self.table.units[unit].adds  # no gradient of the input is computed
        grads = self._grads(unit, microbatch, slots)
        again = [slots.get(Slot(read.name, read.unit, microbatch)) for read in self.table.units[unit].reads
                 if read.again]

        def body(*inputs: torch.Tensor) -> tuple[Tensors, Any]:
            before = iter(inputs[len(grads):])
            for late in saved.again.values():
                late.value = next(before)
            for leaf, sum_ in zip(saved.reads.values(), begun, strict=True):
                leaf.grad = next(before) if sum_ is not None else None  # autograd adds to it in place
            roots = [root for root in saved.roots if root is not None]
            given = [grad for root, grad in zip(saved.roots, inputs, strict=False) if root is not None]
            start = partial(torch.autograd.backward, roots, given) if roots else _nothing
            if delayed and (weights := self._by_graph(unit)):
                halves = Halves.of(roots, saved.x, weights)
                start = partial(halves.run, given, self.weight_grads, self.saving)
            elif delayed and passes_on and not sums:
                return [], [start]
            operands = self._delaying(start) if delayed else start()
            outputs = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
                       for leaf in saved.reads.values()]
            outputs += [self.stream(unit - 1).gradient(saved.x)] if saved.x else []
            for leaf in (*saved.reads.values(), *saved.x):
                leaf.grad = None
            for late in saved.again.values():
                late.value = None
            return outputs, operands

        tensors, operands = self.runner.run([*grads, *again, *(each for each in begun if each is not None)],
                                            body)
        came = [read.came for read in self.table.units[unit].reads if read.grad]
        for slot, value, leaves in zip(sums, tensors, came, strict=False):
            slots.put(slot, self.runner.leaving(not_none(value)) if leaves else value)
        if unit > 0:
            # A unit that only adds to its input passes the gradient of its output on unchanged.
            slots.put(Slot(SlotKind.GRAD, unit - 1, microbatch), grads[0] if passes_on else tensors[-1])
        return operands

    def _by_graph(self, unit: int) -> list[nn.Parameter]:
        """The weights of a unit whose halves of backward are found in its graph."""
        return [weight for layer in self.layers[unit] if isinstance(layer, ByGraph)
                for weight in layer.by_graph]

    def _delaying(self, start: Callable[[], None]) -> list[Callable[[], None]]:
        """Run a graph without the products of its weight gradients, which are returned."""
        operands: list[Callable[[], None]] = []
        self.weight_grads.put_off = operands
        try:
            start()
        finally:
            self.weight_grads.put_off = None
        return operands

    def _grads(self, unit: int, microbatch: int, slots: Slots) -> list[torch.Tensor]:
        """The gradients with which a unit's backward begins, in the order of `SavedGraph.roots`."""
        held = self.table.units[unit]
        grads = list[torch.Tensor]()
        if unit < self.table.last:
            grads = self.stream(unit).gradients(slots.get(Slot(SlotKind.GRAD, unit, microbatch)))
        made = [(Slot(each.name, unit, microbatch), each) for each in held.makes if each.grad]
        # The gradient of what travels twice is in fp32.
        grads += [slots.get(gradient_of(slot)).to(slots.get(slot).dtype) if each.again else
                  slots.get(gradient_of(slot)) for slot, each in made]
        return [*grads, *([self.loss_grad] if held.loss else [])]

    def _mark(self, unit: int, slots: Slots) -> None:
        for parameter_unit in self.table.units[unit].parameters:
            if self.table.parameters[parameter_unit].trains:
                slots.put(Slot(SlotKind.WEIGHT_GRAD, parameter_unit), True)

    def send(self, instruction: Instruction, slots: Slots) -> None:
        while self._sends and self._sends[0].done():
            self._sends.popleft()
        channel = self.comm.channels[self.position, instruction.peer, instruction.kind]
        self._sends.append(channel.send(self.runner.leaving(slots.get(instruction.slot))))

    def recv(self, instruction: Instruction, slots: Slots) -> Handle:
        kind, stream = instruction.kind, self.stream(instruction.unit)
        if kind in WHOLES:  # a part of it
            size = self.table.size(instruction.slot) // self.dtype.itemsize
            buffer = torch.empty(size, dtype=self.dtype, device=self.comm.device)
        else:
            buffer = stream.empty(kind, self.comm.device)
        channel = self.comm.channels[instruction.peer, self.position, instruction.kind]
        slots.put(instruction.slot, buffer)
        return channel.recv(buffer)

    def finish(self) -> None:
        """Wait until every message has left."""
        while self._sends:
            self._sends.popleft().wait()


def streams(config: Config, table: Table, context: Context) -> Callable[[int], PackedStream]:
    """Unit -> what it hands to the next unit."""
    layers, share = layers_of(config), share_of(config)
    whole = Whole((context.places().size, config.train.micro_batch_size, config.model.hidden), context.dtype)

    @cache
    def stream(unit: int) -> PackedStream:
        last = layers[table.units[unit].layers[1] - 1]
        schema = last.schema(share) if isinstance(last, Packs) else None
        return whole if schema is None else Packed(schema, context.dtype)

    return stream


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return one if other is None else other if one is None else one + other


def not_none(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def _root(tensor: torch.Tensor | None) -> Any:
    """The gradient edge of a tensor; None if it needs no gradient, as a stream that a unit passes on
    unchanged."""
    if tensor is None or not tensor.requires_grad:
        return None
    return torch.autograd.graph.get_gradient_edge(tensor)


def _nothing() -> None:
    pass

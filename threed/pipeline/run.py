"""What FORWARD, BACKWARD, SEND and RECV do to tensors.

Each compute unit is an island of autograd: its input is detached, and BACKWARD runs the graph of that one unit with the
gradient that came for its output. Tiles of a layer also read its norm's output, which the first makes: to the others it is an
input, to whose gradient each adds; to the first another output.
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
from threed.models.gpt import Batch, Context, build_layer, parameter_names
from threed.models.tiling import layers_of
from threed.program.instruction import Instruction, Op, Slot
from threed.program.table import Table
from threed.schema import Config
from threed.slots import Slots


class KeptInputs(Protocol):
    """Where the residual stream that a unit reads lies between FORWARD and RECOMPUTE."""

    def keep(self, x: torch.Tensor) -> torch.Tensor: ...
    def give_back(self, x: torch.Tensor) -> torch.Tensor: ...


class Saved(NamedTuple):
    """What BACKWARD needs of a unit: its graph's leaves and roots. (Its output itself belongs to the next unit.)"""

    x: torch.Tensor | None  # its input; None where no gradient is asked of the graph: tokens, or a sum that is only added to
    normed: torch.Tensor | None  # what its first tile has made
    root: Any
    made: Any  # of the norm's output, for the tiles after it


class PipelineRun:
    """The layers of one rank and the handlers that run them."""

    def __init__(self, config: Config, comm: Comm, table: Table, parameters: Mapping[str, nn.Parameter],
                 context: Context, keeping: Callable[[int], AbstractContextManager[Any]], inputs: KeptInputs):
        """`parameters`: key -> parameter, for every unit that the rank holds. `keeping`: the context in which FORWARD of
        a unit runs, which says how autograd keeps its parameters. `inputs`: where inputs are kept for RECOMPUTE."""
        self.comm, self.table, self.weight_grads = comm, table, context.weight_grads
        self.position = comm.here.position
        sp = config.parallel.sequence_parallel
        self.dtype = context.dtype
        self.keeping, self.inputs = keeping, inputs
        self.loss_scale = 1.0  # what backward begins with
        self.shape = (config.model.seq_len // (config.parallel.tp if sp else 1), config.train.micro_batch_size,
                      config.model.hidden)
        specs = layers_of(config)
        self.layers: dict[int, list[nn.Module]] = {}
        for unit in table.units_of(self.position):
            self.layers[unit] = []
            for spec in specs[slice(*table.units[unit].layers)]:
                layer = build_layer(spec, context)
                for inside, name in parameter_names(spec, layer, config.model).items():
                    _set_parameter(layer, inside, parameters[name])
                self.layers[unit].append(layer)
        self.batch: Callable[[int], Batch] = _no_batch  # micro-batch -> its data; set before each program
        self._sends: deque[Handle] = deque()
        self.handlers: dict[Op, Callable[[Instruction, Slots], None]] = {
            Op.FORWARD: self.forward, Op.RECOMPUTE: self.recompute, Op.BACKWARD: self.backward,
            Op.BACKWARD_INPUT: self.backward_input, Op.BACKWARD_WEIGHT: self.backward_weight, Op.SEND: self.send,
            Op.RECV: self.recv}

    def forward(self, instruction: Instruction, slots: Slots) -> None:
        _, unit, microbatch, *_ = instruction
        x = slots.get(Slot("act", unit - 1, microbatch)).detach() if unit > 0 else None
        if instruction.keep == "all":
            output, saved = self._with_graph(unit, microbatch, x, slots)
            slots.put(Slot("saved", unit, microbatch), saved)
        else:
            with torch.no_grad():
                output, normed = self._compute(unit, microbatch, x, self._shared(unit, microbatch, slots))
            self._share(unit, microbatch, normed, slots)
            if instruction.keep == "input":
                kept = None if self.table.units[unit].adds else x
                if kept is not None and self.table.keeps_stream(unit):
                    kept = self.inputs.keep(kept)
                slots.put(Slot("kept", unit, microbatch), kept)
        if unit < self.table.last:
            slots.put(Slot("act", unit, microbatch), output.detach())
        else:
            loss = Slot("loss")
            before = slots.get(loss) if loss in slots else 0.0
            slots.put(loss, before + output.detach().double())

    def recompute(self, instruction: Instruction, slots: Slots) -> None:
        """FORWARD once more, for its graph. (Dropout is a function of sample and place, so the numbers are the same.)"""
        _, unit, microbatch, *_ = instruction
        x = slots.get(Slot("kept", unit, microbatch))
        if self.table.keeps_stream(unit):
            x = self.inputs.give_back(x).view(self.shape)
        _, saved = self._with_graph(unit, microbatch, x, slots)
        slots.put(Slot("saved", unit, microbatch), saved)

    def _with_graph(self, unit: int, microbatch: int, x: torch.Tensor | None, slots: Slots) -> tuple[torch.Tensor, Saved]:
        """A unit's output, and what BACKWARD needs."""
        shared = self._shared(unit, microbatch, slots)
        if shared is not None:
            shared = shared.detach().requires_grad_()
        leaf = None if x is None or self.table.units[unit].adds else x.detach().requires_grad_()
        with torch.enable_grad(), self.keeping(unit):
            output, normed = self._compute(unit, microbatch, x if leaf is None else leaf, shared)
        self._share(unit, microbatch, normed, slots)
        edge = torch.autograd.graph.get_gradient_edge
        made = edge(normed) if normed is not None and shared is None else None
        return output, Saved(leaf, shared, edge(output), made)

    def _compute(self, unit: int, microbatch: int, x: torch.Tensor | None,
                 shared: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A unit's output, and where it is one of several tiles that share it, their norm's."""
        batch = self.batch(microbatch)
        if self.table.units[unit].normed_bytes:
            return self.layers[unit][0](x, batch, shared)
        output: Any = x
        for layer in self.layers[unit]:
            output = layer(output, batch)
        return output, None

    def _shared(self, unit: int, microbatch: int, slots: Slots) -> torch.Tensor | None:
        """What a tile reads of its first; None for other units."""
        tile = self.table.units[unit]
        return slots.get(Slot("normed", unit - tile.tile, microbatch)) if tile.tile > 0 and tile.normed_bytes else None

    def _share(self, unit: int, microbatch: int, normed: torch.Tensor | None, slots: Slots) -> None:
        """What the first tile has made, for the others."""
        if normed is not None and self.table.units[unit].tile == 0:
            slots.put(Slot("normed", unit, microbatch), normed.detach())

    def backward(self, instruction: Instruction, slots: Slots) -> None:
        _, unit, microbatch, *_ = instruction
        self._propagate(unit, microbatch, slots)  # weight gradients go where zero/state's hooks put them
        self._mark(unit, slots)

    def backward_input(self, instruction: Instruction, slots: Slots) -> None:
        """The gradient of the unit's input; its weights' products are put off. The embedding's input is tokens: all of its
        backward is put off."""
        _, unit, microbatch, *_ = instruction
        saved: Saved = slots.get(Slot("saved", unit, microbatch))
        operands: list[Callable[[], None]] = []
        if saved.x is None and saved.normed is None:
            grad = slots.get(Slot("grad", unit, microbatch))
            operands.append(lambda: torch.autograd.backward([saved.root], [grad]))
            self._hand_on(unit, microbatch, grad, slots)
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
        saved: Saved = slots.get(Slot("saved", unit, microbatch))
        if unit < self.table.last:
            grad = slots.get(Slot("grad", unit, microbatch))
        else:
            grad = torch.full((), self.loss_scale, device=self.comm.device)
        roots, grads = [saved.root], [grad]
        if saved.made is not None:
            roots.append(saved.made)
            grads.append(slots.get(Slot("gnormed", unit, microbatch)))
        of_norm = Slot("gnormed", unit - self.table.units[unit].tile, microbatch)
        if saved.normed is not None and of_norm in slots:
            saved.normed.grad = slots.get(of_norm)  # autograd adds to it where it lies
        torch.autograd.backward(roots, grads)
        if saved.normed is not None:
            slots.put(of_norm, saved.normed.grad)
            saved.normed.grad = None
        self._hand_on(unit, microbatch, grad if saved.x is None else saved.x.grad, slots)
        if saved.x is not None:
            saved.x.grad = None

    def _hand_on(self, unit: int, microbatch: int, grad: torch.Tensor | None, slots: Slots) -> None:
        """The gradient of a unit's input, to the unit before it."""
        if unit > 0:
            slots.put(Slot("grad", unit - 1, microbatch), grad)

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


def _set_parameter(layer: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, last = name.rpartition(".")
    owner = layer.get_submodule(path)
    made = owner.get_parameter(last)
    if made.shape != parameter.shape:
        raise AssertionError(f"{name}: the layer has shape {tuple(made.shape)}, its spec {tuple(parameter.shape)}")
    setattr(owner, last, parameter)


def _no_batch(microbatch: int) -> Batch:
    raise AssertionError("no data was set for this program")

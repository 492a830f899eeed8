"""What FORWARD, BACKWARD, SEND and RECV do to tensors.

Each compute unit is an island of autograd: its input is detached, and BACKWARD runs the graph of that one unit with the
gradient that came for its output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from threed.comm import Comm, Handle
from threed.models.gpt import Batch, Context, build_layer, parameter_names
from threed.program.instruction import Instruction, Op, Slot
from threed.program.table import Table
from threed.schema import Config
from threed.slots import Slots


class KeptInputs(Protocol):
    """Where the input of a unit lies between FORWARD and RECOMPUTE. (The first unit has none.)"""

    def keep(self, x: torch.Tensor | None) -> torch.Tensor | None: ...
    def give_back(self, x: torch.Tensor | None) -> torch.Tensor | None: ...


class PipelineRun:
    """The layers of one rank and the handlers that run them."""

    def __init__(self, config: Config, comm: Comm, table: Table, parameters: Mapping[str, nn.Parameter],
                 context: Context, keeping: Callable[[int], AbstractContextManager[Any]], inputs: KeptInputs):
        """`parameters`: global name -> parameter, for every unit that the rank holds. `keeping`: the context in which FORWARD of
        a unit runs, which says how autograd keeps its parameters. `inputs`: where inputs are kept for RECOMPUTE."""
        self.comm, self.table, self.weight_grads = comm, table, context.weight_grads
        self.position = comm.here.pp
        sp = config.parallel.sequence_parallel
        self.dtype = context.dtype
        self.keeping, self.inputs = keeping, inputs
        self.loss_scale = 1.0  # what backward begins with
        self.shape = (config.model.seq_len // (config.parallel.tp if sp else 1), config.train.micro_batch_size,
                      config.model.hidden)
        self.layers: dict[int, list[nn.Module]] = {}
        for unit in table.units_of(self.position):
            self.layers[unit] = []
            for index in range(*table.units[unit].layers):
                layer = build_layer(index, context)
                for inside, name in parameter_names(index, layer, config.model).items():
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
            output, saved = self._with_graph(unit, microbatch, x)
            slots.put(Slot("saved", unit, microbatch), saved)
        else:
            with torch.no_grad():
                output = self._compute(unit, microbatch, x)
            if instruction.keep == "input":
                slots.put(Slot("kept", unit, microbatch), self.inputs.keep(x))
        if unit < self.table.last:
            slots.put(Slot("act", unit, microbatch), output.detach())
        else:
            loss = Slot("loss")
            before = slots.get(loss) if loss in slots else 0.0
            slots.put(loss, before + output.detach().double())

    def recompute(self, instruction: Instruction, slots: Slots) -> None:
        """FORWARD once more, for its graph. (Dropout is a function of sample and place, so the numbers are the same.)"""
        _, unit, microbatch, *_ = instruction
        x = self.inputs.give_back(slots.get(Slot("kept", unit, microbatch)))
        _, saved = self._with_graph(unit, microbatch, x if x is None else x.view(self.shape))
        slots.put(Slot("saved", unit, microbatch), saved)

    def _with_graph(self, unit: int, microbatch: int, x: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        """A unit's output, and what BACKWARD needs: its input and the graph's root (the output itself belongs to the next)."""
        if x is not None:
            x = x.detach().requires_grad_()
        with torch.enable_grad(), self.keeping(unit):
            output = self._compute(unit, microbatch, x)
        return output, (x, torch.autograd.graph.get_gradient_edge(output))

    def _compute(self, unit: int, microbatch: int, x: torch.Tensor | None) -> torch.Tensor:
        output: Any = x
        batch = self.batch(microbatch)
        for layer in self.layers[unit]:
            output = layer(output, batch)
        return output

    def backward(self, instruction: Instruction, slots: Slots) -> None:
        _, unit, microbatch, *_ = instruction
        self._propagate(unit, microbatch, slots)  # weight gradients go where zero/state's hooks put them
        self._mark(unit, slots)

    def backward_input(self, instruction: Instruction, slots: Slots) -> None:
        """The gradient of the unit's input; its weights' products are put off. The first unit has no input: all of its
        backward is put off."""
        _, unit, microbatch, *_ = instruction
        operands: list[Callable[[], None]] = []
        if unit == 0:
            saved, grad = slots.get(Slot("saved", unit, microbatch)), slots.get(Slot("grad", unit, microbatch))
            operands.append(lambda: torch.autograd.backward([saved[1]], [grad]))
        else:
            self.weight_grads.put_off = operands
            try:
                self._propagate(unit, microbatch, slots)
            finally:
                self.weight_grads.put_off = None
        slots.put(Slot("operands", unit, microbatch), operands)

    def backward_weight(self, instruction: Instruction, slots: Slots) -> None:
        _, unit, microbatch, *_ = instruction
        operands = slots.get(Slot("operands", unit, microbatch))
        while operands:  # each lets go of its tensors when done
            product = operands.pop(0)
            if unit == 0:
                product()
            else:
                with torch.no_grad():
                    product()
        self._mark(unit, slots)

    def _propagate(self, unit: int, microbatch: int, slots: Slots) -> None:
        x, root = slots.get(Slot("saved", unit, microbatch))
        if unit < self.table.last:
            grad = slots.get(Slot("grad", unit, microbatch))
        else:
            grad = torch.full((), self.loss_scale, device=self.comm.device)
        torch.autograd.backward([root], [grad])
        if x is not None:
            slots.put(Slot("grad", unit - 1, microbatch), x.grad)
            x.grad = None

    def _mark(self, unit: int, slots: Slots) -> None:
        for parameter_unit in self.table.units[unit].parameters:
            slots.put(Slot("wgrad", parameter_unit), True)

    def send(self, instruction: Instruction, slots: Slots) -> None:
        _, unit, microbatch, kind, peer, _ = instruction
        while self._sends and self._sends[0].done():
            self._sends.popleft()
        tensor = slots.get(Slot(kind, unit, microbatch))
        self._sends.append(self.comm.channels[self.position, peer, kind].send(tensor))

    def recv(self, instruction: Instruction, slots: Slots) -> None:
        _, unit, microbatch, kind, peer, _ = instruction
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.comm.device)
        slots.put(Slot(kind, unit, microbatch), buffer, self.comm.channels[peer, self.position, kind].recv(buffer))

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

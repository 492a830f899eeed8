"""Diagnose: where did a number first stop being finite? The step is run again, every result inspected."""

from __future__ import annotations

from collections.abc import Callable

import torch

from threed.engine.engine import Engine
from threed.models.gpt import Batch
from threed.program.instruction import BACKWARDS, Instruction, Op, Slot
from threed.slots import Slots


def find_nonfinite(engine: Engine, batch: Callable[[int], Batch]) -> str:
    """Run the train program once more (its STEPs do nothing, since its CLIP finds the same) and say where it began. With delayed
    updates the gradients before these have been stepped meanwhile: then it is a run with the weights of the next step.

    All ranks call this together; all get the same answer: the first unit in the order of the data's way, forward before
    backward, and then the sums over ranks.
    """
    table, here = engine.plan.table, engine.comm.here
    found: list[tuple[int, int, int, str]] = []  # (forward, backward or sum, distance along the way, micro-batch, text)
    me = f"on rank {engine.comm.rank} (pp{here.pp} dp{here.dp} tp{here.tp})"
    for unit, state in engine.states.items():
        if not bool(torch.isfinite(state.weights).all()):
            name = table.parameters[unit].name
            found.append((-1, unit, 0, f"the weights of p{unit} ({name}) {me} were not finite before the step"))

    def inspect(instruction: Instruction, slots: Slots) -> None:
        op, unit, microbatch, *_ = instruction
        if op == Op.FORWARD:
            slot = Slot("act", unit, microbatch) if unit < table.last else Slot("loss")
            if not bool(torch.isfinite(slots.get(slot)).all()):
                what = "output" if unit < table.last else "loss"
                found.append((0, unit, microbatch, f"first in the {what} of u{unit} ({table.units[unit].name}), "
                                                   f"micro-batch {microbatch}, FORWARD {me}"))
        elif op in BACKWARDS:
            values = [grad for p in table.units[unit].parameters for grad in engine.states[p].written()]
            if unit > 0 and op != Op.BACKWARD_WEIGHT:
                values.append(slots.get(Slot("grad", unit - 1, microbatch)))
            if not all(bool(torch.isfinite(value).all()) for value in values):
                found.append((1, -unit, microbatch, f"first in the gradient of u{unit} ({table.units[unit].name}), "
                                                    f"micro-batch {microbatch}, {op} {me}"))
        elif op == Op.CLIP:
            for p, state in engine.states.items():
                gradient = state.gradient_prev if instruction.keep == "later" else state.gradient
                if not bool(torch.isfinite(gradient).all()):
                    found.append((2, p, 0, f"first in the sum over ranks of the gradient of p{p} ({table.parameters[p].name}) "
                                           f"{me}"))

    engine.after = inspect
    try:
        engine.run("enter" if table.delayed else "train", batch)
    finally:
        engine.after = None
    everywhere = [each for each in engine.comm.exchange(min(found, default=None)) if each is not None]
    if not everywhere and table.delayed:
        return "it did not happen again with the weights of the next step: run without offload.delayed_update to find where"
    return min(everywhere)[3] if everywhere else "it did not happen again when the step was repeated: look at the hardware"

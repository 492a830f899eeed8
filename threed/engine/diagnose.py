"""Diagnose: where did a number first stop being finite? The step is run again, every result inspected."""

from __future__ import annotations

from collections.abc import Callable

import torch

from threed.engine.engine import Engine
from threed.engine.inspect import Finding, first, made, me
from threed.program.instruction import Instruction
from threed.slots import Slots
from threed.tensor.context import Batch


def find_nonfinite(engine: Engine, batch: Callable[[int], Batch]) -> str:
    """Run the train program once more (its STEPs do nothing, since its CLIP finds the same) and say where it
    began. With delayed updates the gradients before these have been stepped meanwhile: then it is a run with
    the weights of the next step.

    All ranks call this together; all get the same answer.
    """
    table = engine.plan.table
    found: list[Finding] = []
    for unit, state in engine.states.items():
        if not bool(torch.isfinite(state.weights).all()):
            name = table.parameters[unit].name
            found.append(Finding(-1, unit, 0, f"the weights of p{unit} ({name}) on {me(engine)} were not "
                                              f"finite before the step"))

    def inspect(instruction: Instruction, slots: Slots) -> None:
        for phase, distance, what, values in made(engine, instruction, slots):
            if not bool(torch.isfinite(values).all()):
                found.append(Finding(phase, distance, instruction.microbatch,
                                     f"first in the {what} on {me(engine)}"))

    with engine.inspected(inspect):
        engine.run("enter" if table.update.delayed else "train", batch)
    where = first(engine, found)
    if where is None and table.update.delayed:
        return ("it did not happen again with the weights of the next step: run without "
                "offload.delayed_update to find where")
    return where.text if where else "it did not happen again when the step was repeated: look at the hardware"

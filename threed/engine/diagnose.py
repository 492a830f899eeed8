"""Diagnose: find where a number was first not finite, by running the step again and inspecting every
result."""

from __future__ import annotations

from collections.abc import Callable

import torch

from threed.engine.engine import Engine
from threed.engine.inspect import Finding, first, me, results
from threed.program.instruction import Instruction
from threed.program.names import ENTER, TRAIN
from threed.program.slots import Slots
from threed.tensor.context import Batch


def find_nonfinite(engine: Engine, batch: Callable[[int], Batch]) -> str:
    """Run the train program again and return where the first number was not finite. Its STEPs do nothing,
    since its CLIP is not finite again.

    All ranks call this together; all get the same answer.
    """
    table = engine.plan.table
    findings: list[Finding] = []
    for unit, state in engine.states.items():
        if not bool(torch.isfinite(state.optimizer_state.master).all()):
            name = table.parameters[unit].name
            findings.append(Finding(-1, unit, 0, f"the weights of p{unit} ({name}) on {me(engine)} were not "
                                                 "finite before the step"))

    def inspect(instruction: Instruction, slots: Slots) -> None:
        for phase, distance, what, values in results(engine, instruction, slots):
            if not bool(torch.isfinite(values).all()):
                findings.append(Finding(phase, distance, instruction.microbatch,
                                        f"first in the {what} on {me(engine)}"))

    with engine.inspected(inspect):
        engine.run(ENTER if table.update.overlap else TRAIN, batch)
    finding = first(engine, findings)
    if finding is None:
        return "it did not happen again when the step was repeated: look at the hardware"
    return finding.text

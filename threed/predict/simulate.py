"""Predict: walk the plan with a clock. The same walk that looks for deadlocks, with a cost for each instruction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.show import timeline
from threed.program.table import Plan
from threed.program.walk import Walk

Costs = Mapping[tuple[int, Op, int], float]  # (position, op, unit) -> seconds


@dataclass
class Prediction:
    step_s: float
    bubble: list[float]  # share of the step in which a position does not compute
    walk: Walk


def predict(plan: Plan, costs: Costs, name: str = "train") -> Prediction:
    """Step time and bubbles from the costs of instructions; those without a cost take no time.

    Transfers that overlap compute are taken as free here, so a measured bubble is at least the predicted one.
    """

    def cost(position: int, instruction: Instruction) -> float:
        unit = instruction.unit if instruction.op in COMPUTE or instruction.op == Op.STEP else -1
        return costs.get((position, instruction.op, unit), 0.0)

    walk = timeline(plan, name, cost)
    total = walk.total_s or 1.0
    bubble = []
    for position, program in enumerate(plan.programs[name]):
        busy = sum(cost(position, item) for item in program if item.op in COMPUTE or item.op == Op.STEP)
        bubble.append(max(0.0, 1.0 - busy / total))
    return Prediction(walk.total_s, bubble, walk)

"""Simulate a step: the walk that looks for deadlocks, with a clock and a cost for each instruction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from threed.base.errors import InputError
from threed.program.analysis import Analysis
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.show import timeline
from threed.program.walk import Cost, Walk

Costs = Mapping[tuple[int, Op, int], float]  # (position, op, unit) -> seconds


@dataclass
class Prediction:
    step_s: float
    bubble: list[float]  # share of the step in which a position does not compute
    walk: Walk


def cost_of(costs: Costs) -> Cost:
    """Measured costs as a function of (position, instruction). A cost that was not measured is derived from
    others: from the same unit at another position, half a backward from a whole one, or a whole one from its
    halves. Communication is free."""
    anywhere: dict[tuple[Op, int], float] = {(op, unit): seconds for (_, op, unit), seconds in costs.items()}
    for (op, unit), seconds in list(anywhere.items()):
        if op == Op.BACKWARD:
            anywhere.setdefault((Op.BACKWARD_INPUT, unit), seconds / 2)
            anywhere.setdefault((Op.BACKWARD_WEIGHT, unit), seconds / 2)
        elif op == Op.FORWARD:
            anywhere.setdefault((Op.RECOMPUTE, unit), seconds)
        elif op == Op.BACKWARD_INPUT:
            anywhere.setdefault((Op.BACKWARD, unit),
                                seconds + anywhere.get((Op.BACKWARD_WEIGHT, unit), seconds))

    def cost(position: int, instruction: Instruction) -> float:
        op = instruction.op
        works = op in COMPUTE or op == Op.STEP
        unit = instruction.unit if works else -1
        seconds = costs.get((position, op, unit))
        if seconds is None:
            seconds = anywhere.get((op, unit))
        if seconds is None and works:
            raise InputError(f"the costs have none for {op} of unit {unit}: they are of another model; "
                             "measure them with a run of this config, or leave --costs out for analytic ones")
        return seconds or 0.0

    return cost


def predict(analysis: Analysis, costs: Costs, name: str = "train") -> Prediction:
    """Step time and bubbles from the measured costs of instructions.

    Transfers that overlap compute are taken as free here, so a measured bubble is at least the predicted one.
    """
    cost = cost_of(costs)
    walk = timeline(analysis, name, cost)
    total = walk.total_s or 1.0
    bubble = []
    for position, program in enumerate(analysis.plan.programs[name]):
        busy = sum(cost(position, item) for item in program if item.op in COMPUTE or item.op == Op.STEP)
        bubble.append(max(0.0, 1.0 - busy / total))
    return Prediction(walk.total_s, bubble, walk)

"""Rescale: the costs that a run has measured, for a plan with another mesh, micro-batch size, schedule or
recomputation.

A unit takes what a unit like it has taken, times the ratio of what the prices of kernels say of the two.
(Units are like each other whose names differ by numbers alone, such as blocks.0 and blocks.7; the same name
comes first.) Communication, moves between tiers and the host's optimizer have their prices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from threed.base.errors import InputError
from threed.prediction.analytic import cost as analytic_cost
from threed.prediction.hardware import Hardware
from threed.program.instruction import COMPUTE, Instruction, Op
from threed.program.plan import Plan
from threed.program.simulate import Costs, cost_of
from threed.program.table import Table
from threed.program.turning import on_host
from threed.program.walk import Cost

NEAR, FAR = 1.02, 3.0  # factors up to which a time counts as measured, and from which on it is a guess


class Transferred(NamedTuple):
    cost: Cost
    measured: float  # share of the computation's time that was measured at the same sizes
    least: float  # factors by which the rest was scaled
    most: float

    def __str__(self) -> str:
        if self.measured == 1.0:
            return "all computation measured at these sizes"
        text = f"{self.measured:.0%} of the computation measured at these sizes, the rest scaled by "
        text += f"{self.least:.2g} to {self.most:.2g}"
        if max(self.most, 1 / self.least) >= FAR:
            text += ": far from what was measured, so use it to compare layouts, not for times"
        return text


def transferred(plan: Plan, hardware: Hardware, run: Plan, costs: Costs) -> Transferred:
    """`run`: the plan of the run that has measured `costs`. InputError where it had no unit like one of
    `plan`."""
    here, there, measured = analytic_cost(plan, hardware), analytic_cost(run, hardware), cost_of(costs)
    scaled: dict[tuple[int, Op, int], float] = {}
    total, same, factors = 0.0, 0.0, [1.0]
    for position, item, count in _works(plan):
        at, like = _like(item, plan.table, run.table)
        price = there(at, like)
        factor = here(position, item) / price if price else 1.0
        seconds = scaled[position, item.op, item.unit] = measured(at, like) * factor
        total += seconds * count
        if 1 / NEAR <= factor <= NEAR:
            same += seconds * count
        else:
            factors.append(factor)

    def cost(position: int, instruction: Instruction) -> float:
        seconds = scaled.get((position, instruction.op, instruction.unit))
        if seconds is None or on_host(instruction, plan.table):
            return here(position, instruction)
        return seconds

    return Transferred(cost, same / total if total else 1.0, min(factors), max(factors))


def _works(plan: Plan) -> Iterator[tuple[int, Instruction, int]]:
    """(position, instruction, how often) of what a run measures: computation, and STEP on the device."""
    for position, program in enumerate(plan.programs["train"]):
        counts = Counter((item.op, item.unit) for item in program if item.op in COMPUTE)
        yield from ((position, Instruction(op, unit, 0), count) for (op, unit), count in counts.items())
        steps = [item for item in program if item.op == Op.STEP and not on_host(item, plan.table)]
        away = plan.table.shards.away
        # (of a step in parts on the device a run measures the mean)
        yield from ((position, item if away(item.unit) else item._replace(part=""), 1) for item in steps)


def _like(item: Instruction, plan: Table, run: Table) -> tuple[int, Instruction]:
    """(position, instruction) of the run that is most like one of the plan."""
    if item.op == Op.STEP:
        names = {unit: each.name for unit, each in run.parameters.items()
                 if not on_host(item._replace(unit=unit), run)}
        unit = _named(plan.parameters[item.unit].name, names)
        return run.parameters[unit].positions[0], item._replace(unit=unit)
    unit = _named(plan.units[item.unit].name, {unit: each.name for unit, each in enumerate(run.units)})
    return run.position(unit), item._replace(unit=unit)


def _named(name: str, names: Mapping[int, str]) -> int:
    """The unit of this name, or the first whose name differs by numbers alone."""
    alike = [unit for unit, other in names.items() if _NUMBER.sub("", other) == _NUMBER.sub("", name)]
    if not alike:
        raise InputError(f"the costs have none for a unit like {name}: the run had "
                         f"{', '.join(names.values())}. "
                         "Measure them with a run of this model, or leave --costs out for prices of kernels")
    return next((unit for unit in alike if names[unit] == name), alike[0])


_NUMBER = re.compile(r"\d+")

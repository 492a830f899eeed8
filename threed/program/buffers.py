"""Buffers that several units share: how many of each size a position needs. No torch.

Whole parameters that do not stay whole (ZeRO-3) and whole gradients that are reduced as they come (ZeRO-2 and 3) live in buffers
that are made once and used again and again. Each is as large as the unit that it is for, so units of one size share.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from threed.program.effects import effects
from threed.program.instruction import Op
from threed.program.table import Plan, Table


class Buffers(NamedTuple):
    """Elements of a buffer -> how many of that size."""

    params: dict[int, int]
    grads: dict[int, int]
    staging: int  # bytes of the one buffer in which gradients arrive, or are cast

    def bytes(self, table: Table) -> int:
        return (sum(numel * count for numel, count in self.params.items()) * table.param_bytes
                + sum(numel * count for numel, count in self.grads.items()) * table.grad_bytes + self.staging)


def buffers(plan: Plan, position: int) -> Buffers:
    """What a rank of a position needs over all programs of the plan."""
    table = plan.table
    held = table.held(position)
    params, grads = Counter[int](), Counter[int]()
    for programs in plan.programs.values():
        alive = {"param": set[int](), "grad": set[int]()}
        for instruction in programs[position]:
            effect = effects(instruction, table, position)
            for slot in (*effect.writes, *effect.adds):
                if slot.kind == "param" and not table.parameters[slot.unit].whole:
                    alive["param"].add(slot.unit)
                elif slot.kind in ("wgrad", "wsum") and table.zero_stage >= 2:
                    alive["grad"].add(slot.unit)
            for most, units in ((params, alive["param"]), (grads, alive["grad"])):
                most |= Counter(table.parameters[unit].numel for unit in units)
            for slot in effect.frees:
                if slot.kind == "param":
                    alive["param"].discard(slot.unit)
                elif slot.kind in ("wgrad", "wsum") and instruction.op == Op.REDUCE and instruction.group == table.shard_group:
                    alive["grad"].discard(slot.unit)
    # One more of each size than are alive: the next gradient is added up while the one before it is still on its way.
    sizes = Counter(table.parameters[unit].numel for unit in held)
    grads = Counter({numel: min(count + 1, sizes[numel]) for numel, count in grads.items()})
    return Buffers(dict(params), dict(grads), _staging(table, held))


def _staging(table: Table, held: tuple[int, ...]) -> int:
    """Every part of a gradient arrives before the sum is taken; a gradient that travels in another dtype is cast first."""
    if table.dp == 1:
        return 0
    times = 1 if table.reduce_bytes == table.grad_bytes else 2
    return max((table.parameters[unit].numel for unit in held), default=0) * table.reduce_bytes * times

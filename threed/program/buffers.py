"""Buffers that several units share: how many of each size a position needs. No torch.

Whole parameters that do not stay whole (ZeRO-3) and whole gradients that are reduced as they come (ZeRO-2 and 3) live in buffers
that are made once and used again and again. Each is as large as the unit that it is for, so units of one size share.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from threed.program.effects import effects
from threed.program.instruction import Op, Slot
from threed.program.table import Plan, Table


class Buffers(NamedTuple):
    """Elements of a buffer -> how many of that size."""

    params: dict[int, int]
    grads: dict[int, int]
    staging: int  # bytes of the one buffer in which gradients arrive, or are cast
    kept: dict[int, int]  # the arena of kept inputs
    host_kept: dict[int, int]  # the same on the host

    def bytes(self, table: Table) -> int:
        """Of the device, but for the arena, whose content counts as activations."""
        return (sum(numel * count for numel, count in self.params.items()) * table.param_bytes
                + sum(numel * count for numel, count in self.grads.items()) * table.grad_bytes + self.staging)


def buffers(plan: Plan, position: int) -> Buffers:
    """What a rank of a position needs over all programs of the plan."""
    table = plan.table
    held = table.held(position)
    params, grads = Counter[int](), Counter[int]()
    kept, host_kept = Counter[int](), Counter[int]()
    for programs in plan.programs.values():
        alive = {"param": set[int](), "grad": set[int]()}
        inputs = set[Slot]()
        for instruction in programs[position]:
            effect = effects(instruction, table, position)
            for slot in (*effect.writes, *effect.adds):
                if slot.kind == "param" and not table.parameters[slot.unit].whole:
                    alive["param"].add(slot.unit)
                elif slot.kind in ("wgrad", "wsum") and table.zero_stage >= 2:
                    alive["grad"].add(slot.unit)
                elif slot.kind in _KEPT and slot.unit > 0:
                    inputs.add(slot)
            if effect.writes and effect.writes[-1].kind in _KEPT:
                for most, kinds in ((kept, _arena(table)), (host_kept, ("host_kept", "host_kpart"))):
                    most |= Counter(table.size(slot) // table.param_bytes for slot in inputs if slot.kind in kinds)
            for most, units in ((params, alive["param"]), (grads, alive["grad"])):
                most |= Counter(table.parameters[unit].numel for unit in units)
            inputs.difference_update(effect.frees)
            for slot in effect.frees:
                if slot.kind == "param":
                    alive["param"].discard(slot.unit)
                elif slot.kind in ("wgrad", "wsum") and instruction.op == Op.REDUCE and instruction.group == table.shard_group:
                    alive["grad"].discard(slot.unit)
    # One more of each size than are alive: the next gradient is added up while the one before it is still on its way.
    sizes = Counter(table.parameters[unit].numel for unit in held)
    grads = Counter({numel: min(count + 1, sizes[numel]) for numel, count in grads.items()})
    return Buffers(dict(params), dict(grads), _staging(table, held), dict(kept), dict(host_kept))


_KEPT = ("kept", "kpart", "host_kept", "host_kpart")


def _arena(table: Table) -> tuple[str, ...]:
    """Kinds of slots that lie in the device's arena: what is kept for long, once."""
    return () if not table.contiguous or table.offload_kept else ("kpart",) if table.partition else ("kept",)


def _staging(table: Table, held: tuple[int, ...]) -> int:
    """Every part of a gradient arrives before the sum is taken; a gradient that travels in another dtype is cast first."""
    if table.dp == 1:
        return 0
    times = 1 if table.reduce_bytes == table.grad_bytes else 2
    return max((table.parameters[unit].numel for unit in held), default=0) * table.reduce_bytes * times

"""The table: what units are, where they live, and how large everything is. With the programs it makes a plan.

Sizes are of one rank of a pipeline position (its dp and tp peers have the same), in bytes. Traffic is what a rank
sends, by the ring formulas: of a buffer of S bytes over n ranks, all-gather and reduce-scatter send S (n-1)/n,
all-reduce twice that.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

from threed.program.instruction import BACKWARDS, Instruction, Op, Slot

GRAD_BYTES = 4  # gradients are accumulated and reduced in fp32


@dataclass(frozen=True)
class ComputeUnit:
    name: str
    layers: tuple[int, int]  # first, one past the last
    stage: int
    parameters: tuple[int, ...]  # parameter units that it uses
    forward_flops: int  # of a micro-batch, this tp rank's share
    saved_bytes: int  # kept from FORWARD to BACKWARD, a micro-batch
    operand_bytes: int  # kept from BACKWARD_INPUT to BACKWARD_WEIGHT
    forward_tp_bytes: int  # sent over tp by a FORWARD
    input_tp_bytes: int  # by a BACKWARD_INPUT
    weight_tp_bytes: int  # by a BACKWARD_WEIGHT; BACKWARD sends both


@dataclass(frozen=True)
class ParameterUnit:
    name: str
    positions: tuple[int, ...]  # pipeline positions that hold it (two for a tied embedding)
    numel: int  # this tp rank's elements, padded to a multiple of the shard group
    padding: int  # of them, padding
    replicated: int  # of them, replicated over tp
    reductions: tuple[str, ...]  # groups its gradient is reduced over, in order


@dataclass(frozen=True)
class Table:
    units: tuple[ComputeUnit, ...]
    parameters: dict[int, ParameterUnit]
    stage_positions: tuple[int, ...]  # pipeline position of each stage
    num_microbatches: int
    dp: int
    tp: int
    zero_stage: int
    param_bytes: int  # of an element as compute reads it: 4 or 2
    act_bytes: int  # of one act slot (and of one grad slot)
    _held: dict[int, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)
    known: dict[Instruction, Any] = field(default_factory=dict, compare=False, repr=False)  # what `effects` remembers

    @property
    def num_positions(self) -> int:
        return max(self.stage_positions) + 1

    @property
    def last(self) -> int:
        """The last compute unit: the one that makes the loss."""
        return len(self.units) - 1

    def position(self, unit: int) -> int:
        """Pipeline position of a compute unit."""
        return self.stage_positions[self.units[unit].stage]

    def held(self, position: int) -> tuple[int, ...]:
        """Parameter units that a position holds."""
        if position not in self._held:
            self._held[position] = tuple(p for p, unit in self.parameters.items() if position in unit.positions)
        return self._held[position]

    def units_of(self, position: int) -> list[int]:
        return [u for u in range(len(self.units)) if self.position(u) == position]

    @property
    def sharded(self) -> bool:
        """Whether optimizer state, and so what STEP updates, is cut over dp."""
        return self.zero_stage >= 1

    @cached_property
    def separate_master(self) -> bool:
        """Whether STEP updates fp32 copies; with fp32 parameters it updates the parameters in place."""
        return self.param_bytes < 4

    def seam(self, position: int) -> set[Slot]:
        """Slots alive between two programs: what a checkpoint saves."""
        kinds = ["pshard", "state"] if self.sharded else ["param", "state"]
        return {Slot(kind, p) for kind in kinds for p in self.held(position)}

    def size(self, slot: Slot) -> int:
        """Bytes of a slot on one rank. The fp32 shard of an fp32 parameter is part of the parameter's own buffer."""
        if slot.kind in ("act", "grad"):
            return self.act_bytes
        if slot.kind == "saved":
            return self.units[slot.unit].saved_bytes
        if slot.kind == "operands":
            return self.units[slot.unit].operand_bytes
        if slot.kind in ("loss", "scale"):
            return 0
        numel = self.parameters[slot.unit].numel
        shard = numel // self.dp if self.sharded else numel
        if slot.kind == "param":
            return numel * self.param_bytes
        if slot.kind == "pshard":
            return 0
        if slot.kind == "state":  # two moments, and the fp32 master where it is a separate copy
            return shard * (12 if self.separate_master else 8)
        if slot.kind in ("wgrad", "wsum"):
            return numel * GRAD_BYTES
        if slot.kind in ("gpart", "gshard"):
            return shard * GRAD_BYTES
        raise KeyError(slot)

    def sent(self, instruction: Instruction) -> dict[str, int]:
        """Bytes that a rank sends for an instruction, by axis."""
        op, unit = instruction.op, instruction.unit
        if op == Op.FORWARD:
            return {"tp": self.units[unit].forward_tp_bytes}
        if op in BACKWARDS:
            sent = self.units[unit]
            return {"tp": (op != Op.BACKWARD_WEIGHT) * sent.input_tp_bytes + (op != Op.BACKWARD_INPUT) * sent.weight_tp_bytes}
        if op == Op.SEND:
            return {"pp": self.act_bytes}
        if op == Op.GATHER:
            return {"dp": ring(self.parameters[unit].numel * self.param_bytes, self.dp)}
        if op == Op.REDUCE and instruction.group == "dp":
            rounds = 1 if self.sharded else 2
            return {"dp": rounds * ring(self.parameters[unit].numel * GRAD_BYTES, self.dp)}
        if op == Op.REDUCE and instruction.group == "tp":
            return {"tp": 2 * ring(self.parameters[unit].replicated * GRAD_BYTES, self.tp)}
        if op == Op.REDUCE and instruction.group == "tie":
            return {"pp": 2 * ring(self.size(Slot("gshard", unit)), 2)}
        return {}


def ring(size: int, ranks: int) -> int:
    """Bytes a rank sends in a ring all-gather or reduce-scatter of a buffer of `size` bytes."""
    return size * (ranks - 1) // ranks


@dataclass(frozen=True)
class Plan:
    """All positions' programs, by name (`train`, `evaluate`), with the table. `programs[name][position]`."""

    table: Table
    programs: dict[str, list[tuple[Instruction, ...]]]

    @cached_property
    def digest(self) -> str:
        """Two ranks with equal digests will do the same thing."""
        values = {item.name: getattr(self.table, item.name) for item in fields(Table) if item.compare}
        values["units"] = [asdict(unit) for unit in self.table.units]
        values["parameters"] = {p: asdict(unit) for p, unit in self.table.parameters.items()}
        text = json.dumps([values, self.programs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return sum(len(program) for programs in self.programs.values() for program in programs)

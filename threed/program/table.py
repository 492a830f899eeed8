"""The table: what units are, where they live, and how large everything is. With the programs it makes a plan.

Sizes are of one rank of a pipeline position (its dp and tp peers have the same), in bytes. Traffic is what a rank
sends, by the ring formulas: of a buffer of S bytes over n ranks, all-gather and reduce-scatter send S (n-1)/n,
all-reduce twice that.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

from threed.optimizers.base import BYTES, Buffer
from threed.program.instruction import BACKWARDS, Instruction, Op, Slot, at, tier
from threed.quantity import ring

# Names of programs: one only runs forward; one trains and updates nothing; two copy what a checkpoint keeps.
EVALUATE, VERIFY, SNAPSHOT, WAITING = "evaluate", "verify", "snapshot", "snapshot_waiting"
# Programs of delayed updates -> whose gradients their STEPs are of: the step before (prev), this one ("").
DELAYED_STEPS: dict[str, tuple[str, ...]] = {"enter": (), "train": ("prev",), "drain": ("prev", "")}


class Handed(NamedTuple):
    """A tensor besides its output that a unit makes for later units of its stage: a slot of this kind.
    The slot of its gradient has a g before the name."""

    name: str
    bytes: int


class Read(NamedTuple):
    """A handed tensor that a unit reads. To its gradient every reader adds."""

    name: str
    unit: int  # that makes it
    last: bool  # whether no later unit reads it


@dataclass(frozen=True)
class ComputeUnit:
    name: str
    layers: tuple[int, int]  # first, one past the last
    stage: int
    parameters: tuple[int, ...]  # parameter units that it uses
    forward_flops: int  # of a micro-batch, this tp rank's share
    saved_bytes: int  # kept from FORWARD to BACKWARD, a micro-batch
    operand_bytes: int  # kept from BACKWARD_INPUT to BACKWARD_WEIGHT
    traffic: Mapping[tuple[str, str], int]  # (phase: forward, input or weight; axis) -> bytes sent
    recompute: bool = False  # whether FORWARD keeps its input alone, and RECOMPUTE makes the rest again
    makes: tuple[Handed, ...] = ()
    reads: tuple[Read, ...] = ()
    loss: bool = False  # whether it adds to the loss; the last unit does, and has no other output
    adds: bool = False  # only adds to its input: keeps nothing of it, and hands its output's gradient on as it is
    running_bytes: int = 0  # of its output, where that is a running softmax, not the residual stream

    def sent(self, *phases: str) -> dict[str, int]:
        """Bytes sent in these phases together, by axis."""
        total: Counter[str] = Counter()
        for (phase, axis), size in self.traffic.items():
            if phase in phases:
                total[axis] += size
        return dict(total)


@dataclass(frozen=True)
class ParameterUnit:
    name: str
    positions: tuple[int, ...]  # pipeline positions that hold it (two for a tied embedding)
    numel: int  # this tp rank's elements, padded to a multiple of the shard group
    padding: int  # of them, padding
    replicated: int  # of them, replicated over tp
    reductions: tuple[str, ...]  # groups its gradient is reduced over, in order
    state_home: str = "device"  # tier where its optimizer state lives, and is stepped (disk: through the host)
    weight_home: str = "device"  # tier where this rank's part of the parameters lives
    whole: bool = True  # stays whole from its first use in a step to its last, in a buffer of its own (not so in ZeRO-3)


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
    shard_size: int = 1  # ranks that share one copy of what is sharded: dp, or a divisor of it
    reduce_every: int = 1  # micro-batches between two reductions of a gradient
    residency: int | str = "step"  # units that are not whole and may be gathered at a time; stage: those of the largest stage
    prefetch: int = 0  # uses ahead of its own that a unit is gathered
    grad_bytes: int = 4  # of an element of an accumulated gradient
    reduce_bytes: int = 4  # of an element of a gradient on its way over dp
    master: bool = False  # whether STEP updates an fp32 copy of a 16-bit weight
    partition: bool = False  # whether a kept input is cut over tp
    offload_kept: bool = False  # whether it then goes to the host
    contiguous: bool = False  # whether kept inputs lie in one arena
    delayed: bool = False  # whether gradients are stepped in the step after theirs
    optimizer: tuple[Buffer, ...] = ()  # what it keeps of each element
    snapshots: bool = False  # whether checkpoints are written from a copy on the host, while the run goes on
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

    def makes_loss(self, position: int) -> bool:
        """Whether a unit of a position adds to the loss."""
        return any(self.units[unit].loss for unit in self.units_of(position))

    def keeps_stream(self, unit: int) -> bool:
        """Whether the input that a compute unit keeps for RECOMPUTE is the residual stream: the first unit reads tokens, which
        all ranks have; one that only adds keeps nothing; and some read a running softmax."""
        return unit > 0 and not self.units[unit].adds and not self.units[unit - 1].running_bytes

    @cached_property
    def handed(self) -> dict[str, str]:
        """Kinds of slots of the tensors that units hand on, and of their gradients -> the tensor's name."""
        names = {handed.name for unit in self.units for handed in unit.makes}
        return {**{name: name for name in names}, **{gradient_kind(name): name for name in names}}

    def units_of(self, position: int) -> list[int]:
        return [u for u in range(len(self.units)) if self.position(u) == position]

    @property
    def sharded(self) -> bool:
        """Whether optimizer state, and so what STEP updates, is cut over dp."""
        return self.zero_stage >= 1

    @property
    def shard_group(self) -> str:
        """The group over which state is sharded."""
        return "dp" if self.shard_size == self.dp else "shard"

    def shard_numel(self, unit: int) -> int:
        """Elements of a parameter unit that a rank steps."""
        return self.parameters[unit].numel // (self.shard_size if self.sharded else 1)

    def seam(self, position: int, program: str = "train", end: bool = False) -> set[Slot]:
        """Slots alive between two programs, before this one or after it: what a checkpoint saves."""
        stays = {slot for p in self.held(position) for slot in (self.weight(p), self.state(p))}
        if self.snapshots:  # the last one, which may still be under way
            stays |= {Slot("host_snapshot", p) for p in self.held(position) if self.saves(position, p)}
        if self.delayed and program in (("enter", "train", WAITING) if end else ("train", "drain", WAITING)):
            stays |= {Slot("host_gprev", p) for p in self.held(position)}
        return stays

    def saves(self, position: int, unit: int) -> bool:
        """Whether ranks of a position write a parameter unit into checkpoints: a tied embedding is written once."""
        return self.parameters[unit].positions[0] == position

    @property
    def kept_kinds(self) -> int:
        """Tensors that a checkpoint keeps of a parameter: weights, the optimizer's, and what waits for the next step."""
        return 1 + len(self.optimizer) + self.delayed

    def state_bytes(self, home: str) -> int:
        """Of an element of optimizer state on a tier: its buffers, and the fp32 master where that is a separate copy."""
        return sum(BYTES[buffer.dtype] for buffer in self.optimizer) + 4 * (self.master or home != "device")

    def weight(self, unit: int) -> Slot:
        """Where what STEP updates of a parameter unit lives."""
        return at(self.parameters[unit].weight_home, Slot("pshard" if self.sharded else "param", unit))

    def state(self, unit: int) -> Slot:
        """Where the optimizer state of a parameter unit lives."""
        return at(self.parameters[unit].state_home, Slot("state", unit))

    def streams(self, unit: int) -> bool:
        """Whether each reduced part of a gradient goes down at once and is added up there. (What is still to be summed over other
        groups is added up on the device, and goes down after that.)"""
        held = self.parameters[unit]
        return held.state_home != "device" and self.zero_stage >= 2 and held.reductions[-1] == self.shard_group

    def size(self, slot: Slot) -> int:
        """Bytes of a slot on one rank. The shard of a parameter that stays whole is part of the whole one's buffer; what is
        summed over tp lies where it was."""
        if slot.kind in ("act", "grad"):
            return self.units[slot.unit].running_bytes or self.act_bytes
        if slot.kind in self.handed:
            return dict(self.units[slot.unit].makes)[self.handed[slot.kind]]
        if slot.kind == "saved":
            return self.units[slot.unit].saved_bytes
        if slot.kind == "operands":
            return self.units[slot.unit].operand_bytes
        if slot.kind in ("kept", "kpart", "host_kept", "host_kpart"):
            if not self.keeps_stream(slot.unit):
                return self.units[slot.unit - 1].running_bytes if slot.unit > 0 else 0
            return self.act_bytes // (self.tp if slot.kind.endswith("kpart") else 1)
        if slot.kind in ("loss", "scale", "wsum"):
            return 0
        unit, home = self.parameters[slot.unit], tier(slot.kind)
        kind = slot.kind.removeprefix(f"{home}_")
        if kind == "param":
            return unit.numel * self.param_bytes
        if kind == "pshard":
            return 0 if unit.whole and home == "device" else self.shard_numel(slot.unit) * self.param_bytes
        if kind == "state":
            return self.shard_numel(slot.unit) * self.state_bytes(home)
        if kind == "wgrad":
            return unit.numel * self.grad_bytes
        if kind == "snapshot":  # in fp32; one of the groups that share a copy writes it, whatever the stage
            return unit.numel // self.shard_size * 4 * self.kept_kinds
        if kind in ("gpart", "gfull", "gshard", "gprev"):
            return self.shard_numel(slot.unit) * self.grad_bytes
        raise KeyError(slot)

    def sent(self, instruction: Instruction) -> dict[str, int]:
        """Bytes that a rank sends for an instruction, by axis."""
        op, unit = instruction.op, instruction.unit
        if op in (Op.FORWARD, Op.RECOMPUTE):
            return self.units[unit].sent("forward")
        if op == Op.JOIN:
            return {"tp": ring(self.size(Slot("kept", unit)), self.tp)}
        if op in BACKWARDS:
            return self.units[unit].sent(*_PHASES[op])
        if op == Op.SEND:
            return {"pp": self.act_bytes}
        if op == Op.GATHER:
            return {"dp": ring(self.parameters[unit].numel * self.param_bytes, self.shard_size)}
        if op == Op.REDUCE and instruction.group == self.shard_group:
            numel = self.parameters[unit].numel
            # Not sharded, the parts are gathered after they are summed.
            back = 0 if self.sharded else ring(numel * self.grad_bytes, self.dp)
            return {"dp": ring(numel * self.reduce_bytes, self.shard_size) + back}
        if op == Op.REDUCE and instruction.group == "replica":
            return {"dp": 2 * ring(self.shard_numel(unit) * self.reduce_bytes, self.dp // self.shard_size)}
        if op == Op.REDUCE and instruction.group == "tp":
            return {"tp": 2 * ring(self.parameters[unit].replicated * self.grad_bytes, self.tp)}
        if op == Op.REDUCE and instruction.group == "tie":
            return {"pp": 2 * ring(self.size(Slot("gshard", unit)), 2)}
        return {}

    def moved(self, instruction: Instruction) -> dict[str, int]:
        """Bytes that an instruction moves between tiers, by lane."""
        if instruction.op not in (Op.OFFLOAD, Op.FETCH):
            return {}
        if instruction.group == "snapshot":
            return {"d2h": self.size(Slot("host_snapshot", instruction.unit))}
        names = ("write", "read") if tier(instruction.group) == "host" else ("d2h", "h2d")
        size = self.size(Slot(instruction.group, instruction.unit, instruction.microbatch))
        if instruction.op == Op.FETCH and self.parameters.get(instruction.unit) and size == 0:  # into a part of the whole
            size = self.size(at("host", Slot(instruction.group, instruction.unit)))
        return {names[instruction.op == Op.FETCH]: size}


_PHASES = {Op.BACKWARD: ("input", "weight"), Op.BACKWARD_INPUT: ("input",), Op.BACKWARD_WEIGHT: ("weight",)}


def gradient_kind(name: str) -> str:
    """The kind of the slot in which the gradient of a handed tensor is added up."""
    return f"g{name}"


@dataclass(frozen=True)
class Plan:
    """All positions' programs, by name, with the table. `programs[name][position]`.

    train      a step of the run. With delayed updates it steps the gradients of the step before, and is one of four:
    plain      a step that is not delayed
    enter      the first one that is: it steps nothing
    drain      the last one: it steps what waits, and its own
    verify     a step without its update: what comes before one that is computed twice (run.verify_every)
    evaluate   forward only
    snapshot   between two steps: what a checkpoint keeps is copied to the host, beside what comes next
    snapshot_waiting   the same while gradients wait to be stepped
    """

    table: Table
    programs: dict[str, list[tuple[Instruction, ...]]]

    @cached_property
    def digest(self) -> str:
        """Two ranks with equal digests will do the same thing."""
        values = {item.name: getattr(self.table, item.name) for item in fields(Table) if item.compare}
        values["units"] = [{**asdict(unit), "traffic": sorted(unit.traffic.items())}
                           for unit in self.table.units]
        values["parameters"] = {p: asdict(unit) for p, unit in self.table.parameters.items()}
        text = json.dumps([values, self.programs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return sum(len(program) for programs in self.programs.values() for program in programs)

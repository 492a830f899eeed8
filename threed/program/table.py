"""The table: what units are, where they live, and how large everything is. With the programs it makes a plan.

Sizes are of one rank of a pipeline position (its dp and tp peers have the same), in bytes. Traffic is what a
rank sends, by the ring formulas: of a buffer of S bytes over n ranks, all-gather and reduce-scatter send S
(n-1)/n, all-reduce twice that.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from threed.mesh import GROUPS
from threed.optimizers.base import BYTES, Buffer
from threed.program.instruction import PARAMETER_KINDS, Instruction, Op, Slot, Tier
from threed.quantity import ring
from threed.schema import Config

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
    forward_flops: int  # of a micro-batch, this rank's share
    saved_bytes: int  # kept from FORWARD to BACKWARD, a micro-batch
    operand_bytes: int  # kept from BACKWARD_INPUT to BACKWARD_WEIGHT
    traffic: dict[str, dict[str, int]]  # phase (forward, input, weight) -> axis -> bytes sent inside it
    groups: tuple[str, ...] = ()  # over which they are sent
    recompute: bool = False  # whether FORWARD keeps its input alone, and RECOMPUTE makes the rest again
    makes: tuple[Handed, ...] = ()
    reads: tuple[Read, ...] = ()
    loss: bool = False  # whether it adds to the loss; the last unit does, and has no other output
    adds: bool = False  # only adds to its input: keeps nothing of it, and hands its output's gradient on as
    # it is
    running_bytes: int = 0  # of its output, where that is a running softmax, not the residual stream


class Reduction(NamedTuple):
    """One sum of a unit's gradient over a group of ranks."""

    group: str
    ranks: int  # in the group
    takes: str  # kind of slot
    makes: str
    numel: int  # elements that are summed
    bytes: int  # of an element on its way
    staged: bool = False  # whether it is cast in the staging buffer where it travels in another dtype


@dataclass(frozen=True)
class ParameterUnit:
    name: str
    positions: tuple[int, ...]  # pipeline positions that hold it (two for a tied embedding)
    numel: int  # this rank's elements, padded to a multiple of its shards
    padding: int  # of them, padding
    shard_group: str  # the group over which it is sharded,
    shards: int  # and the ranks in it
    reductions: tuple[Reduction, ...]  # of its gradient, in order
    state_home: Tier = Tier.DEVICE  # where its optimizer state lives, and is stepped (disk: through the host)
    weight_home: Tier = Tier.DEVICE  # where this rank's part of the parameters lives
    whole: bool = True  # stays whole from its first use in a step to its last, in a buffer of its own (not so
    # in ZeRO-3)


@dataclass(frozen=True)
class Elements:
    """Bytes of an element."""

    param: int = 4  # as compute reads it: 4 or 2
    grad: int = 4  # of an accumulated gradient
    reduce: int = 4  # of a gradient on its way over dp


@dataclass(frozen=True)
class ZeroSettings:
    """What the pass in zero/plan reads."""

    stage: int = 0
    reduce_every: int = 1  # micro-batches between two reductions of a gradient
    residency: int | str = "step"  # units that are not whole and may be gathered at a time; stage: those of
    # the largest
    prefetch: int = 0  # uses ahead of its own that a unit is gathered


@dataclass(frozen=True)
class ActivationSettings:
    """What the passes in activation/plan read."""

    partition: str = ""  # the group over which a kept input is cut; empty: it is whole
    parts: int = 1  # ranks in that group
    offload: bool = False  # whether it then goes to the host
    contiguous: bool = False  # whether kept inputs lie in one arena


@dataclass(frozen=True)
class UpdateSettings:
    """What the passes in offload/plan read of the optimizer's step, and what it keeps."""

    buffers: tuple[Buffer, ...] = ()  # what the optimizer keeps of each element
    master: bool = False  # whether STEP updates an fp32 copy of a 16-bit weight
    delayed: bool = False  # whether gradients are stepped in the step after theirs
    snapshots: bool = False  # whether checkpoints are written from a copy on the host, while the run goes on


@dataclass(frozen=True)
class Table:
    units: tuple[ComputeUnit, ...]
    parameters: dict[int, ParameterUnit]
    stage_positions: tuple[int, ...]  # pipeline position of each stage
    num_microbatches: int
    act_bytes: int  # of one act slot (and of one grad slot)
    elements: Elements = Elements()
    zero: ZeroSettings = ZeroSettings()
    activation: ActivationSettings = ActivationSettings()
    update: UpdateSettings = UpdateSettings()

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

    @cached_property
    def known(self) -> dict[Instruction, Any]:
        """What `effects` remembers of this table."""
        return {}

    @cached_property
    def _held(self) -> dict[int, tuple[int, ...]]:
        return {position: tuple(p for p, unit in self.parameters.items() if position in unit.positions)
                for position in range(self.num_positions)}

    def held(self, position: int) -> tuple[int, ...]:
        """Parameter units that a position holds."""
        return self._held[position]

    def makes_loss(self, position: int) -> bool:
        """Whether a unit of a position adds to the loss."""
        return any(self.units[unit].loss for unit in self.units_of(position))

    def keeps_stream(self, unit: int) -> bool:
        """Whether the input that a compute unit keeps for RECOMPUTE is the residual stream: the first unit
        reads tokens, which all ranks have; one that only adds keeps nothing; and some read a running
        softmax."""
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
        """Whether optimizer state, and so what STEP updates, is cut over the shard group."""
        return self.zero.stage >= 1

    def reductions(self, unit: int) -> tuple[Reduction, ...]:
        """Those of a parameter unit's gradient, in order; none where there is no such unit."""
        return self.parameters[unit].reductions if unit in self.parameters else ()

    def shard_numel(self, unit: int) -> int:
        """Elements of a parameter unit that a rank steps."""
        held = self.parameters[unit]
        return held.numel // (held.shards if self.sharded else 1)

    def seam(self, position: int, program: str = "train", end: bool = False) -> set[Slot]:
        """Slots alive between two programs, before this one or after it: what a checkpoint saves."""
        stays = {slot for p in self.held(position) for slot in (self.weight(p), self.state(p))}
        if self.update.snapshots:  # the last one, which may still be under way
            stays |= {Slot("snapshot", p, tier=Tier.HOST) for p in self.held(position)
                      if self.saves(position, p)}
        if self.update.delayed and program in (("enter", "train", WAITING) if end
                                               else ("train", "drain", WAITING)):
            stays |= {Slot("gprev", p, tier=Tier.HOST) for p in self.held(position)}
        return stays

    def saves(self, position: int, unit: int) -> bool:
        """Whether ranks of a position write a parameter unit into checkpoints: a tied embedding is written
        once."""
        return self.parameters[unit].positions[0] == position

    @property
    def kept_kinds(self) -> int:
        """Tensors that a checkpoint keeps of a parameter: weights, the optimizer's, and what waits for the
        next step."""
        return 1 + len(self.update.buffers) + self.update.delayed

    def state_bytes(self, home: Tier) -> int:
        """Of an element of optimizer state on a tier: its buffers, and the fp32 master where that is a
        separate copy."""
        master = 4 if self.update.master or home != Tier.DEVICE else 0
        return sum(BYTES[buffer.dtype] for buffer in self.update.buffers) + master

    def weight(self, unit: int) -> Slot:
        """Where what STEP updates of a parameter unit lives."""
        return Slot("pshard" if self.sharded else "param", unit, tier=self.parameters[unit].weight_home)

    def state(self, unit: int) -> Slot:
        """Where the optimizer state of a parameter unit lives."""
        return Slot("state", unit, tier=self.parameters[unit].state_home)

    def streams(self, unit: int) -> bool:
        """Whether each reduced part of a gradient goes down at once and is added up there. (What is still to
        be summed over other groups is added up on the device, and goes down after that.)"""
        held = self.parameters[unit]
        return (held.state_home != Tier.DEVICE and self.zero.stage >= 2
                and held.reductions[-1].group == held.shard_group)

    def size(self, slot: Slot) -> int:
        """Bytes of a slot on one rank."""
        if slot.kind in ("loss", "scale", "wsum"):  # `wsum` is summed in place
            return 0
        if slot.kind in PARAMETER_KINDS:
            return self._size_of_parameters(slot)
        unit = self.units[slot.unit]
        if slot.kind in ("kept", "kpart"):
            return self._size_of_kept(slot)
        if slot.kind in ("act", "grad"):
            return unit.running_bytes or self.act_bytes
        if slot.kind in self.handed:
            return dict(unit.makes)[self.handed[slot.kind]]
        return {"saved": unit.saved_bytes, "operands": unit.operand_bytes}[slot.kind]

    def _size_of_kept(self, slot: Slot) -> int:
        if not self.keeps_stream(slot.unit):
            return self.units[slot.unit - 1].running_bytes if slot.unit > 0 else 0
        return self.act_bytes // (self.activation.parts if slot.kind == "kpart" else 1)

    def _size_of_parameters(self, slot: Slot) -> int:
        unit = self.parameters[slot.unit]
        if slot.kind == "param":
            return unit.numel * self.elements.param
        if slot.kind == "pshard":  # that of a unit that stays whole is a part of the whole one's buffer
            inside = unit.whole and slot.tier == Tier.DEVICE
            return 0 if inside else self.shard_numel(slot.unit) * self.elements.param
        if slot.kind == "state":
            return self.shard_numel(slot.unit) * self.state_bytes(slot.tier)
        if slot.kind == "wgrad":
            return unit.numel * self.elements.grad
        # in fp32; one of the groups that share a copy writes it, whatever the stage
        if slot.kind == "snapshot":
            return unit.numel // unit.shards * 4 * self.kept_kinds
        return self.shard_numel(slot.unit) * self.elements.grad

    def sent(self, instruction: Instruction) -> dict[str, int]:
        """Bytes that a rank sends for an instruction, by axis."""
        op, unit = instruction.op, instruction.unit
        if op in PHASES:
            return add_up(self.units[unit].traffic[phase] for phase in PHASES[op])
        if op == Op.JOIN:
            size = ring(self.size(Slot("kept", unit)), self.activation.parts)
            return {GROUPS[self.activation.partition].counts: size}
        if op == Op.SEND:
            return {GROUPS["pp"].counts: self.act_bytes}
        if op == Op.GATHER:
            held = self.parameters[unit]
            return {GROUPS[instruction.group].counts: ring(held.numel * self.elements.param, held.shards)}
        if op == Op.REDUCE:
            step = next(each for each in self.reductions(unit) if each.group == instruction.group)
            return {GROUPS[step.group].counts: self._reduced_bytes(self.parameters[unit], step)}
        return {}

    def _reduced_bytes(self, unit: ParameterUnit, step: Reduction) -> int:
        part = ring(step.numel * step.bytes, step.ranks)
        if step.group != unit.shard_group:
            return 2 * part
        # Not sharded, the parts are gathered after they are summed.
        return part if self.sharded else part + ring(step.numel * self.elements.grad, step.ranks)

    def moved(self, instruction: Instruction) -> dict[str, int]:
        """Bytes that an instruction moves between tiers, by lane."""
        if instruction.op not in (Op.OFFLOAD, Op.FETCH):
            return {}
        down, slot = instruction.op == Op.OFFLOAD, instruction.slot
        if slot.kind == "snapshot":
            return {"d2h": self.size(slot)}
        size = self.size(slot)
        if not down and size == 0 and slot.kind in PARAMETER_KINDS:  # into a part of the whole
            size = self.size(slot.on(Tier.HOST))
        if slot.tier == Tier.HOST:
            return {"write" if down else "read": size}
        return {"d2h" if down else "h2d": size}


# What each op of compute does: the forward pass, the input's gradient, the weights' gradients.
PHASES: dict[Op, tuple[str, ...]] = {Op.FORWARD: ("forward",), Op.RECOMPUTE: ("forward",),
                                     Op.BACKWARD: ("input", "weight"), Op.BACKWARD_INPUT: ("input",),
                                     Op.BACKWARD_WEIGHT: ("weight",)}


def add_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of each name."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


def gradient_kind(name: str) -> str:
    """The kind of the slot in which the gradient of a handed tensor is added up."""
    return f"g{name}"


@dataclass(frozen=True)
class Plan:
    """All positions' programs, by name, with the table. `programs[name][position]`.

    train      a step of the run. With delayed updates it steps the gradients of the step before, and is one
               of four:
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
    config: Config | None = field(default=None, compare=False, repr=False)  # that it was made of, if any

    @cached_property
    def digest(self) -> str:
        """Two ranks with equal digests will do the same thing."""
        text = json.dumps([asdict(self.table), self.programs], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return sum(len(program) for programs in self.programs.values() for program in programs)

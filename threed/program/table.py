"""The table: the units, their positions, and the size of everything. Table and programs together are a plan.

Sizes are bytes of one rank of a pipeline position (its dp and tp peers have the same). Traffic is the bytes
that a rank sends, by the ring formulas: for a buffer of S bytes over n ranks, all-gather and reduce-scatter
send S (n-1)/n, and all-reduce sends twice as much.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from threed.base.mesh import GROUPS
from threed.base.quantity import add_up, ring
from threed.optim.base import BYTES, Buffer
from threed.program.digest import digest_of
from threed.program.entries import WHOLE_MESSAGES, Handed, LogitsSettings, MessageSettings, Read, Reduction
from threed.program.instruction import PARAMETER_KINDS, WHOLES, Instruction, Op, Slot, Tier
from threed.schema import Config
from threed.spec.kernels import Kernel
from threed.spec.parameter import Outflow

# Names of programs that `Plan` describes.
EVALUATE, GENERATE, VERIFY = "evaluate", "generate", "verify"
SNAPSHOT, WAITING = "snapshot", "snapshot_waiting"
FORWARD_ONLY = (EVALUATE, GENERATE)
# Programs of delayed updates -> the step whose gradients STEP applies: the one before (prev), this one ("").
DELAYED_STEPS: dict[str, tuple[str, ...]] = {"enter": (), "train": ("prev",), "drain": ("prev", "")}


@dataclass(frozen=True)
class ComputeUnit:
    name: str
    layers: tuple[int, int]  # first, one past the last
    stage: int
    parameters: tuple[int, ...]  # parameter units that it uses
    kernels: tuple[Kernel, ...]  # of a micro-batch, this rank's share
    saved_bytes: int  # kept from FORWARD to BACKWARD, a micro-batch
    operand_bytes: int  # kept from BACKWARD_INPUT to BACKWARD_WEIGHT
    traffic: dict[str, dict[str, int]]  # phase (forward, input, weight) -> axis -> bytes sent in that phase
    recompute: bool = False  # whether FORWARD keeps only its input, and RECOMPUTE computes the rest again
    makes: tuple[Handed, ...] = ()
    reads: tuple[Read, ...] = ()
    loss: bool = False  # whether it adds to the loss; the last unit does, and has no other output
    adds: bool = False  # whether it only adds to its input: it keeps nothing, and passes its gradient on
    output: Outflow | None = None  # None: the residual stream
    again: tuple[Kernel, ...] = ()  # kernels of forward that BACKWARD computes again

    @property
    def forward_flops(self) -> int:
        """Of products of a micro-batch, this rank's share."""
        return sum(kernel.flops for kernel in self.kernels)


@dataclass(frozen=True)
class ParameterUnit:
    name: str
    positions: tuple[int, ...]  # pipeline positions that hold it (two for a tied embedding)
    numel: int  # this rank's elements, padded to a multiple of its shards
    padding: int  # elements of numel that are padding
    shard_group: str  # the group over which it is sharded
    shards: int  # ranks in that group
    reductions: tuple[Reduction, ...]  # of its gradient, in order
    state_home: Tier = Tier.DEVICE  # tier of its optimizer state and its STEP (disk: STEP runs on the host)
    weight_home: Tier = Tier.DEVICE  # tier of this rank's part of the parameters
    # Whether it stays whole from its first use in a step to its last (under ZeRO-3: small), in its buffer.
    whole: bool = True
    # False: it is frozen. It has no gradient, no state and no STEP; and where it stays whole, every rank
    # holds all of it all the time, and nothing is gathered.
    trains: bool = True


@dataclass(frozen=True)
class Elements:
    """Bytes of an element."""

    param: int = 4  # as compute reads it: 4 or 2
    grad: int = 4  # of an accumulated gradient
    reduce: int = 4  # of a gradient in a message over dp


@dataclass(frozen=True)
class ZeroSettings:
    """The settings that the pass in features/zero/plan reads."""

    stage: int = 0
    reduce_every: int = 1  # micro-batches between two reductions of a gradient
    residency: int | str = "step"  # units that may be gathered at a time; stage: as many as the largest has
    prefetch: int = 0  # how many uses ahead of its own a unit is gathered


@dataclass(frozen=True)
class ActivationSettings:
    """The settings that the passes in features/activation/plan read."""

    partition: str = ""  # the group over which a kept input is cut; empty: it is whole
    parts: int = 1  # ranks in that group
    offload: bool = False  # whether kept inputs go to the host
    contiguous: bool = False  # whether kept inputs are in one arena


@dataclass(frozen=True)
class UpdateSettings:
    """The settings of the optimizer's step that the passes in features/offload/plan read."""

    buffers: tuple[Buffer, ...] = ()  # the optimizer's tensors for each parameter
    master: bool = False  # whether STEP updates an fp32 copy of a 16-bit weight
    delayed: bool = False  # whether STEP applies gradients one step later
    snapshots: bool = False  # whether checkpoints are written from a copy on the host, while the run goes on


@dataclass(frozen=True)
class Table:
    """What passes know of a model on a mesh: its units, their sizes and ranks, and settings."""

    units: tuple[ComputeUnit, ...]
    parameters: dict[int, ParameterUnit]
    stage_positions: tuple[int, ...]  # pipeline position of each stage
    num_microbatches: int
    act_bytes: int  # of the residual stream: of one act slot, and of one grad slot
    elements: Elements = Elements()
    zero: ZeroSettings = ZeroSettings()
    activation: ActivationSettings = ActivationSettings()
    update: UpdateSettings = UpdateSettings()
    logits: LogitsSettings | None = None  # None: no program makes any
    trains: bool = True  # False: no program trains, and there are no gradients
    messages: MessageSettings = WHOLE_MESSAGES

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
        return tuple(p for p, unit in self.parameters.items() if position in unit.positions)

    def stepped(self, position: int) -> tuple[int, ...]:
        """Parameter units that a position holds and trains."""
        return tuple(p for p in self.held(position) if self.parameters[p].trains)

    def microbatches(self, program: str) -> int:
        """Micro-batches of a program."""
        return self.logits.microbatches if self.logits and program == GENERATE else self.num_microbatches

    def makes_logits(self, unit: int) -> bool:
        """Whether a unit makes logits in the program `generate`."""
        return self.logits is not None and unit in self.logits.bytes

    def groups_of(self, item: Instruction) -> tuple[str, ...]:
        """The groups over which a compute instruction sends. The group with an axis's name is all ranks along
        it."""
        if item.keep == "logits" and self.logits and item.unit in self.logits.sent:
            sent = [self.logits.sent[item.unit]]
        else:
            sent = [self.units[item.unit].traffic[phase] for phase in PHASES[item.op]]
        return tuple(sorted({axis for sizes in sent for axis, size in sizes.items() if size}))

    def makes_loss(self, position: int) -> bool:
        """Whether a unit of a position adds to the loss."""
        return any(self.units[unit].loss for unit in self.units_of(position))

    def keeps_stream(self, unit: int) -> bool:
        """Whether a unit keeps what it reads for RECOMPUTE, in a form that moves: not the first unit
        (tokens), one that only adds to its input (it keeps nothing), or one that reads a running softmax."""
        before = self.units[unit - 1].output
        return unit > 0 and not self.units[unit].adds and (before is None or before.flat)

    def cut_over(self, kind: str) -> tuple[str, int]:
        """The group over which SPLIT cuts a kind of slot, empty where there is none, and its ranks."""
        settings = self.activation
        return ((settings.partition, settings.parts) if kind == "kept" else
                (self.messages.group, self.messages.parts))

    def sent_in_parts(self, kind: str, unit: int) -> bool:
        """Whether an act or a grad can be cut: it is one flat buffer, and its elements divide."""
        if not self.messages.group or not 0 <= unit < len(self.units) or kind not in ("act", "grad"):
            return False
        output = self.units[unit].output
        elements = self.size(Slot(kind, unit)) // self.elements.param
        return (output is None or output.flat) and elements > 0 and elements % self.messages.parts == 0

    @property
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
        """The reductions of a parameter unit's gradient, in order; none for a unit that does not exist."""
        return self.parameters[unit].reductions if unit in self.parameters else ()

    def shard_numel(self, unit: int) -> int:
        """Elements of a parameter unit that a rank steps, or keeps of a frozen one."""
        held = self.parameters[unit]
        return held.numel // (held.shards if self.is_cut(unit) else 1)

    def is_cut(self, unit: int) -> bool:
        """Whether the weights of a parameter unit are cut over its shard group, and gathered."""
        held = self.parameters[unit]
        return self.sharded and (held.trains or not held.whole)

    def seam(self, position: int, program: str = "train", end: bool = False) -> set[Slot]:
        """Slots alive before a program, or after its end: the values that a checkpoint saves."""
        slots = {self.weight(p) for p in self.held(position)}
        slots |= {self.state(p) for p in self.stepped(position)}
        if self.update.snapshots:  # the last snapshot may still be in progress
            slots |= {Slot("snapshot", p, tier=Tier.HOST) for p in self.copied(position)}
        waiting = ("enter", "train", WAITING) if end else ("train", "drain", WAITING)
        if self.update.delayed and program in waiting:
            slots |= {Slot("gprev", p, tier=Tier.HOST) for p in self.stepped(position)}
        if end and program == GENERATE and self.logits:  # the engine hands them out
            slots |= {Slot("logits", unit, microbatch) for unit in self.logits.bytes
                      if self.position(unit) == position for microbatch in range(self.logits.microbatches)}
        return slots

    def saves(self, position: int, unit: int) -> bool:
        """Whether a position writes a parameter unit into checkpoints: a tied embedding is written once."""
        return self.parameters[unit].positions[0] == position

    def copied(self, position: int) -> list[int]:
        """Parameter units of which ranks of a position copy to the host what a checkpoint saves. (A frozen
        one is not copied: it does not change while it is written.)"""
        return [p for p in self.stepped(position) if self.saves(position, p)]

    @property
    def kept_kinds(self) -> int:
        """Tensors that a checkpoint saves for a parameter: its weight, the optimizer's buffers, and a
        gradient that waits for the next step."""
        return 1 + len(self.update.buffers) + self.update.delayed

    def state_bytes(self, home: Tier) -> int:
        """Bytes of optimizer state for an element, on a tier: the buffers, and the fp32 master where this is
        a separate copy."""
        master = 4 if self.update.master or home != Tier.DEVICE else 0
        return sum(BYTES[buffer.dtype] for buffer in self.update.buffers) + master

    def weight(self, unit: int) -> Slot:
        """The slot of a parameter unit's weights that stays from step to step, and that STEP updates."""
        return Slot("pshard" if self.is_cut(unit) else "param", unit, tier=self.parameters[unit].weight_home)

    def state(self, unit: int) -> Slot:
        """The slot of a parameter unit's optimizer state."""
        return Slot("state", unit, tier=self.parameters[unit].state_home)

    def streams(self, unit: int) -> bool:
        """Whether each reduced part of a gradient goes to the host at once and is added up there. (A gradient
        that is still to be summed over other groups is added up on the device, and goes down after that.)"""
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
        if (whole := WHOLES.get(slot.kind)) is not None:
            return self.size(slot._replace(kind=whole)) // self.cut_over(whole)[1]
        if slot.kind == "kept":
            return self._size_of_kept(slot)
        if slot.kind in ("act", "grad"):
            made = unit.output or Outflow(self.act_bytes, self.act_bytes)
            return made.bytes if slot.kind == "act" else made.grad_bytes
        for handed in unit.makes:
            if slot.kind in (handed.name, gradient_kind(handed.name)):
                return handed.bytes
        if slot.kind == "logits":
            return self.logits.bytes[slot.unit] if self.logits else 0
        return {"saved": unit.saved_bytes, "operands": unit.operand_bytes}[slot.kind]

    def _size_of_kept(self, slot: Slot) -> int:
        if slot.unit == 0 or not (self.keeps_stream(slot.unit) or self.units[slot.unit - 1].output):
            return 0
        return self.size(Slot("act", slot.unit - 1))

    def _size_of_parameters(self, slot: Slot) -> int:
        unit = self.parameters[slot.unit]
        if slot.kind == "param":
            return unit.numel * self.elements.param
        if slot.kind == "pshard":  # the shard of a unit that stays whole is a part of the whole unit's buffer
            inside = unit.whole and slot.tier == Tier.DEVICE
            return 0 if inside else self.shard_numel(slot.unit) * self.elements.param
        if slot.kind == "state":
            return self.shard_numel(slot.unit) * self.state_bytes(slot.tier)
        if slot.kind == "wgrad":
            return unit.numel * self.elements.grad
        # A snapshot is fp32; at every ZeRO stage, each rank of one shard group copies its part of it.
        if slot.kind == "snapshot":
            return unit.numel // unit.shards * 4 * self.kept_kinds
        return self.shard_numel(slot.unit) * self.elements.grad

    def sent(self, instruction: Instruction) -> dict[str, int]:
        """Bytes that a rank sends for an instruction, by axis."""
        op, unit = instruction.op, instruction.unit
        if instruction.keep == "logits" and self.logits and unit in self.logits.sent:
            return self.logits.sent[unit]
        if op in PHASES:
            return add_up(self.units[unit].traffic[phase] for phase in PHASES[op])
        if op == Op.JOIN:
            group, ranks = self.cut_over(instruction.kind)
            return {GROUPS[group].counts: ring(self.size(instruction.slot), ranks)}
        if op == Op.SEND:
            return {GROUPS["pp"].counts: self.size(instruction.slot)}
        if op == Op.GATHER:
            held = self.parameters[unit]
            return {GROUPS[instruction.group].counts: ring(held.numel * self.elements.param, held.shards)}
        if op == Op.REDUCE:
            step = next(step for step in self.reductions(unit) if step.group == instruction.group)
            return {GROUPS[step.group].counts: self._reduced_bytes(self.parameters[unit], step)}
        return {}

    def _reduced_bytes(self, unit: ParameterUnit, step: Reduction) -> int:
        part = ring(step.numel * step.bytes, step.ranks)
        if step.group != unit.shard_group:
            return 2 * part
        # Where gradients are not sharded, the summed parts are gathered again.
        return part if self.sharded else part + ring(step.numel * self.elements.grad, step.ranks)

    def moved(self, instruction: Instruction) -> int:
        """Bytes that an instruction moves between tiers, on its lane."""
        if instruction.op not in (Op.OFFLOAD, Op.FETCH):
            return 0
        slot = instruction.slot
        inside = instruction.op == Op.FETCH and slot.kind == "pshard" and self.size(slot) == 0
        return self.size(slot.on(Tier.HOST) if inside else slot)  # inside: of a whole unit's buffer


# The phases that each compute op runs: the forward pass, the input's gradient, the weights' gradients.
PHASES: dict[Op, tuple[str, ...]] = {Op.FORWARD: ("forward",), Op.RECOMPUTE: ("forward",),
                                     Op.BACKWARD: ("input", "weight"), Op.BACKWARD_INPUT: ("input",),
                                     Op.BACKWARD_WEIGHT: ("weight",)}


def gradient_kind(name: str) -> str:
    """The kind of the slot in which the gradient of a handed tensor is added up."""
    return f"g{name}"


@dataclass(frozen=True)
class Plan:
    """All positions' programs, by name, with the table. `programs[name][position]`.

    train      a step of the run; with delayed updates it applies the gradients of the step before
    plain      with delayed updates: a step that applies its own gradients
    enter      with delayed updates: the first delayed step, which applies no gradients
    drain      with delayed updates: the last step, which applies the waiting gradients and its own
    verify     a step without its update: the first run of a step that is computed twice (run.verify_every)
    evaluate   forward only
    generate   forward only: makes the logits of each sequence's last token, and no loss
    snapshot   between two steps: copies to the host what a checkpoint saves, while the next step begins
    snapshot_waiting   the same while gradients wait for their STEP
    """

    table: Table
    programs: dict[str, list[tuple[Instruction, ...]]]
    config: Config | None = field(default=None, compare=False, repr=False)  # None: not made from a config

    @property
    def digest(self) -> str:
        """Two ranks with equal digests will do the same thing. It is computed each time that it is read."""
        return digest_of(self.table, self.programs)

    def __len__(self) -> int:
        return sum(len(program) for programs in self.programs.values() for program in programs)

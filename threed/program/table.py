"""The table: the units, their positions, and the size of everything. Table and programs together are a plan.

Sizes are bytes of one rank of a pipeline position (its dp and tp peers have the same).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from threed.base.quantity import BYTES
from threed.optim.base import Buffer
from threed.optim.registry import optimizer_called
from threed.program.entries import ComputeUnit, ParameterUnit, Reduction, gradient_kind
from threed.program.instruction import PARAMETER_KINDS, WHOLES, Instruction, Slot, Tier
from threed.program.names import GENERATE
from threed.program.settings import (
    WHOLE_MESSAGES,
    ActivationSettings,
    Elements,
    LogitsSettings,
    MessageSettings,
    PairSettings,
    UpdateSettings,
    ZeroSettings,
)
from threed.spec.parameter import Outflow


@dataclass(frozen=True)
class Table:
    """What passes know of a model on a mesh: its units, their sizes and ranks, and settings."""

    units: tuple[ComputeUnit, ...]
    parameters: dict[int, ParameterUnit]
    stage_positions: tuple[int, ...]  # pipeline position of each stage
    num_microbatches: int
    act_bytes: int  # of the residual stream: of one act slot, and of one grad slot
    elements: Elements = field(default_factory=Elements)
    zero: ZeroSettings = field(default_factory=ZeroSettings)
    activation: ActivationSettings = field(default_factory=ActivationSettings)
    update: UpdateSettings = field(default_factory=UpdateSettings)
    logits: LogitsSettings | None = None  # None: no program makes any
    trains: bool = True  # False: no program trains, and there are no gradients
    messages: MessageSettings = WHOLE_MESSAGES
    pair: PairSettings | None = None  # None: forwards and backwards are computed one after the other

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
            sent = [self.units[item.unit].traffic.get(phase, {}) for phase in item.phases]
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
        """The group over which RELEASE cuts a kind of slot, empty where there is none, and its ranks."""
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
        made = [each for unit in self.units for each in unit.makes]
        handed = {name: each.grad for each in made
                  for name in (each.name, *([each.trip.becomes] if each.trip else []))}
        return {**{name: name for name in handed},
                **{gradient_kind(name): name for name, grad in handed.items() if grad}}

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

    def param_bytes(self, unit: int) -> int:
        """Bytes of an element of a parameter unit, as compute reads it."""
        return BYTES.get(self.parameters[unit].dtype, self.elements.param)

    def is_cut(self, unit: int) -> bool:
        """Whether the weights of a parameter unit are cut over its shard group, and gathered."""
        held = self.parameters[unit]
        return self.sharded and (held.trains or not held.whole)

    def saves(self, position: int, unit: int) -> bool:
        """Whether a position writes a parameter unit into checkpoints: a tied embedding is written once."""
        return self.parameters[unit].positions[0] == position

    def copied(self, position: int) -> list[int]:
        """Parameter units of which ranks of a position copy to the host what a checkpoint saves. (A frozen
        one is not copied: it does not change while it is written.)"""
        return [p for p in self.stepped(position) if self.saves(position, p)]

    def buffers(self, unit: int) -> tuple[Buffer, ...]:
        """The tensors of the optimizer that steps a parameter unit."""
        own = self.parameters[unit].optimizer
        return optimizer_called(own).buffers if own else self.update.buffers

    def kept_kinds(self, unit: int) -> int:
        """Tensors that a checkpoint saves for a parameter: its weight and the optimizer's buffers."""
        return 1 + len(self.buffers(unit))

    def has_master(self, home: Tier, unit: int) -> bool:
        """Whether STEP, on a tier, updates an fp32 copy of a parameter unit's weights."""
        return home != Tier.DEVICE or (self.update.master and self.param_bytes(unit) < 4)

    def state_bytes(self, home: Tier, unit: int) -> int:
        """Bytes of optimizer state for an element of a parameter unit, on a tier: the buffers, and the fp32
        master where this is a separate copy."""
        master = 4 if self.has_master(home, unit) else 0
        return sum(BYTES[buffer.dtype] for buffer in self.buffers(unit)) + master

    def weight(self, unit: int) -> Slot:
        """The slot of a parameter unit's weights that stays from step to step, and that STEP updates."""
        return Slot("pshard" if self.is_cut(unit) else "param", unit, tier=self.parameters[unit].weight_home)

    def state(self, unit: int) -> Slot:
        """The slot of a parameter unit's optimizer state."""
        return Slot("state", unit, tier=self.parameters[unit].state_home)

    def away(self, unit: int) -> bool:
        """Whether a parameter unit's optimizer state is off the device: the host steps it."""
        return self.parameters[unit].state_home != Tier.DEVICE

    def streams(self, unit: int) -> bool:
        """Whether each reduced part of a gradient goes to the host at once and is added up there. (A gradient
        that is still to be summed over other groups is added up on the device.)"""
        held = self.parameters[unit]
        return (self.zero.streams and self.away(unit) and self.zero.stage >= 2
                and held.reductions[-1].group == held.shard_group)

    def adds_on_host(self, unit: int) -> bool:
        """Whether several parts of a gradient go to the host, which adds them up."""
        return self.streams(unit) and self.zero.reduce_every < self.num_microbatches

    def in_place(self, unit: int) -> bool:
        """Whether the reduced gradient is a part of the whole one, which has memory of its own and is reduced
        once a step. From ZeRO-2 on a part is smaller than the whole, and gets its own memory, unless one rank
        keeps all of it."""
        held = self.parameters[unit]
        return self.zero.stage < 2 or (self.away(unit) and held.shards == 1 and not self.streams(unit))

    def gradient(self, unit: int) -> Slot:
        """The reduced gradient, as CLIP reads it."""
        return Slot("gshard", unit, tier=Tier.HOST if self.streams(unit) else Tier.DEVICE)

    def waiting(self, position: int) -> tuple[Slot, ...]:
        """The gradients of a position that wait for a STEP in the next program."""
        return tuple(self.gradient(p)._replace(kind="gprev") for p in self.stepped(position)
                     if self.update.overlap and self.away(p))

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
            if handed.trip and slot.kind in (handed.trip.becomes, gradient_kind(handed.trip.becomes)):
                return handed.trip.bytes
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
            return unit.numel * self.param_bytes(slot.unit)
        if slot.kind == "pshard":  # the shard of a unit that stays whole is a part of the whole unit's buffer
            inside = unit.whole and slot.tier == Tier.DEVICE
            return 0 if inside else self.shard_numel(slot.unit) * self.param_bytes(slot.unit)
        if slot.kind == "state":
            return self.shard_numel(slot.unit) * self.state_bytes(slot.tier, slot.unit)
        if slot.kind == "wgrad":
            return unit.numel * self.elements.grad
        # A snapshot is fp32; at every ZeRO stage, each rank of one shard group copies its part of it.
        if slot.kind == "snapshot":
            return unit.numel // unit.shards * 4 * self.kept_kinds(slot.unit)
        return self.shard_numel(slot.unit) * self.elements.grad

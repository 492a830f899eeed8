"""The table: the units, their positions, and the size of everything. Table and programs together are a plan.
`Table.shards` says what a rank has of each parameter unit.

Sizes are bytes of one rank of a pipeline position (its dp and tp peers have the same).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from threed.program.entries import ComputeUnit, ParameterUnit, gradient_kind
from threed.program.instruction import PARAMETER_KINDS, SENT, WHOLES, Instruction, Slot, SlotKind
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
from threed.program.shards import Shards
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

    @cached_property
    def shards(self) -> Shards:
        """What a rank has of each parameter unit."""
        return Shards(self.parameters, self.elements, self.zero, self.update, self.num_microbatches)

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

    def keeps_stream(self, unit: int) -> bool:
        """Whether a unit keeps what it reads for RECOMPUTE, in a form that moves: not the first unit
        (tokens), one that only adds to its input (it keeps nothing), or one that reads a running softmax."""
        before = self.units[unit - 1].output
        return unit > 0 and not self.units[unit].adds and (before is None or before.flat)

    def cut_over(self, kind: str) -> tuple[str, int]:
        """The group over which RELEASE cuts a kind of slot, empty where there is none, and its ranks."""
        settings = self.activation
        return ((settings.partition, settings.parts) if kind == SlotKind.KEPT else
                (self.messages.group, self.messages.parts))

    def sent_in_parts(self, kind: str, unit: int) -> bool:
        """Whether an act or a grad can be cut: it is one flat buffer, and its elements divide."""
        if not self.messages.group or not 0 <= unit < len(self.units) or kind not in SENT:
            return False
        output = self.units[unit].output
        elements = self.size(Slot(kind, unit)) // self.elements.param
        return (output is None or output.flat) and elements > 0 and elements % self.messages.parts == 0

    @property
    def handed(self) -> dict[str, str]:
        """Kinds of slots of the tensors that units hand on, and of their gradients -> the tensor's name."""
        made = [each for unit in self.units for each in unit.makes]
        handed = {name: each.grad for each in made
                  for name in (each.name, *([each.becomes] if each.over else []))}
        return {**{name: name for name in handed},
                **{gradient_kind(name): name for name, grad in handed.items() if grad}}

    def units_of(self, position: int) -> list[int]:
        return [u for u in range(len(self.units)) if self.position(u) == position]

    def saves(self, position: int, unit: int) -> bool:
        """Whether a position writes a parameter unit into checkpoints: a tied embedding is written once."""
        return self.parameters[unit].positions[0] == position

    def copied(self, position: int) -> list[int]:
        """Parameter units of which ranks of a position copy to the host what a checkpoint saves. (A frozen
        one is not copied: it does not change while it is written.)"""
        return [p for p in self.stepped(position) if self.saves(position, p)]

    def waiting(self, position: int) -> tuple[Slot, ...]:
        """The gradients of a position that wait for a STEP in the next program."""
        return tuple(self.shards.gradient(p)._replace(kind=SlotKind.PREVIOUS_GRAD)
                     for p in self.stepped(position) if self.update.overlap and self.shards.away(p))

    def size(self, slot: Slot) -> int:
        """Bytes of a slot on one rank."""
        if slot.kind in (SlotKind.LOSS, SlotKind.SCALE, SlotKind.TP_SUM):  # `wsum` is summed in place
            return 0
        if slot.kind in PARAMETER_KINDS:
            return self.shards.size(slot)
        unit = self.units[slot.unit]
        if (whole := WHOLES.get(slot.kind)) is not None:
            return self.size(slot._replace(kind=whole)) // self.cut_over(whole)[1]
        if slot.kind == SlotKind.KEPT:
            return self._size_of_kept(slot)
        if slot.kind in SENT:
            made = unit.output or Outflow(self.act_bytes, self.act_bytes)
            return made.bytes if slot.kind == SlotKind.ACT else made.grad_bytes
        for handed in unit.makes:
            wide = 4 // self.elements.param if handed.again else 1  # a gradient in fp32
            for name, size in ((handed.name, handed.bytes), (handed.becomes, handed.arriving_bytes)):
                if slot.kind in (name, gradient_kind(name)):
                    return size * (1 if slot.kind == name else wide)
        if slot.kind == SlotKind.LOGITS:
            return self.logits.bytes[slot.unit] if self.logits else 0
        sizes: dict[str, int] = {SlotKind.SAVED: unit.saved_bytes, SlotKind.OPERANDS: unit.operand_bytes}
        return sizes[slot.kind]

    def _size_of_kept(self, slot: Slot) -> int:
        if slot.unit == 0 or not (self.keeps_stream(slot.unit) or self.units[slot.unit - 1].output):
            return 0
        return self.size(Slot(SlotKind.ACT, slot.unit - 1))

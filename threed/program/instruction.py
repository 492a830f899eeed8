"""The nouns of a program: op, slot, instruction.

One optimizer step of one pipeline position is a flat list of instructions. Ranks that share a position (its
dp and tp peers) run the same program, so a plan holds one program a position, whatever the size of the mesh.

A **slot** is a named value, such as `act u3 m1`, the output of compute unit 3 for micro-batch 1, or
`gshard p3`, this rank's shard of the gradient of parameter unit 3. `SlotKind` has the kinds. A tensor that a
unit hands to later units of its stage is a kind of its own: `normed u3 m1` is a norm's output, which tiles
share, and `gnormed u3 m1` its gradient, added up over those units.

A slot is on a tier: the device, its host, or a disk. The name of a slot that is not on the device begins with
its tier: `host_kept u3 m1`.

A compute unit is written u3 and a parameter unit p3. u3 uses p3, with two exceptions: a tied embedding is a
parameter unit of its own, which the first and the last compute unit use; and the small parameters of a
compute unit that stay whole under ZeRO-3 are a second unit (zero.persist_below).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from operator import itemgetter
from typing import NamedTuple


class Op(StrEnum):
    """What an instruction does."""

    __hash__ = str.__hash__  # that of Enum is a Python function, and plans are read by dictionaries of slots

    FORWARD = "FORWARD"
    RECOMPUTE = "RECOMPUTE"
    BACKWARD = "BACKWARD"
    BACKWARD_INPUT = "BACKWARD_INPUT"
    BACKWARD_WEIGHT = "BACKWARD_WEIGHT"
    SEND = "SEND"
    RECV = "RECV"
    GATHER = "GATHER"
    RELEASE = "RELEASE"
    OFFLOAD = "OFFLOAD"
    FETCH = "FETCH"
    REDUCE = "REDUCE"
    EXCHANGE = "EXCHANGE"
    CLIP = "CLIP"
    STEP = "STEP"


BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
COMPUTE = (Op.FORWARD, Op.RECOMPUTE, *BACKWARDS)
# The phases that each compute op runs: the forward pass and what RECOMPUTE does not repeat of it (in training
# alone), the input's gradient, the weights' gradients.
PHASES: dict[Op, tuple[str, ...]] = {Op.FORWARD: ("forward", "once"), Op.RECOMPUTE: ("forward",),
                                     Op.BACKWARD: ("input", "weight"), Op.BACKWARD_INPUT: ("input",),
                                     Op.BACKWARD_WEIGHT: ("weight",)}
MESSAGES = (Op.SEND, Op.RECV)
MOVES = (Op.OFFLOAD, Op.FETCH)  # they move a slot to another tier, and back

# They take part in a collective: of a parameter unit, or of a slot of a micro-batch.
COLLECTIVES = (Op.GATHER, Op.REDUCE, Op.EXCHANGE)

# The fields that an op uses. The others must keep their defaults: they are not printed.
FIELDS: dict[Op, tuple[str, ...]] = {
    Op.FORWARD: ("unit", "microbatch", "keep"),
    **dict.fromkeys((Op.RECOMPUTE, *BACKWARDS), ("unit", "microbatch")),
    **dict.fromkeys(MOVES, ("unit", "microbatch", "kind", "tier")),
    Op.OFFLOAD: ("unit", "microbatch", "kind", "tier", "age"),
    **dict.fromkeys(MESSAGES, ("unit", "microbatch", "kind", "peer")),
    **dict.fromkeys(COLLECTIVES, ("unit", "microbatch", "kind", "group")),
    Op.RELEASE: ("unit", "microbatch", "kind"),
    Op.STEP: ("unit", "age", "part"),
    Op.CLIP: ("gradients",),
}
# The words that a field may hold.
WORDS: dict[str, tuple[str, ...]] = {
    "keep": ("all", "input", "none", "logits"),  # logits: none, and the head makes logits in place of a loss
    "gradients": ("step", "wait", "drop", "none"),
    "age": ("", "prev"),
    "part": ("", "begin", "turn", "end"),
}


class Tier(StrEnum):
    """The memory that a slot is in."""

    __hash__ = str.__hash__  # as of Op

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    @property
    def below(self) -> Tier:
        """The next tier down. Raises IndexError for the lowest."""
        return _TIERS[_TIERS.index(self) + 1]

    @property
    def depth(self) -> int:
        """0 on the device."""
        return _TIERS.index(self)


_TIERS = list(Tier)


class SlotKind(StrEnum):
    """What a slot holds, besides tensors that units hand on. Plans print the values; digests hash them."""

    __hash__ = str.__hash__  # as of Op

    # of a compute unit and a micro-batch
    ACT = "act"  # the unit's output, which FORWARD of the next unit reads
    ACT_PART = "actpart"  # this tp rank's part of it, on its way to another position
    GRAD = "grad"  # the loss's gradient with respect to the output
    GRAD_PART = "gradpart"  # this tp rank's part of it, on its way to another position
    SAVED = "saved"  # what FORWARD keeps for BACKWARD
    KEPT = "kept"  # what FORWARD keeps for RECOMPUTE: the unit's input
    KEPT_PART = "kpart"  # this tp rank's part of it
    OPERANDS = "operands"  # what BACKWARD_INPUT leaves for BACKWARD_WEIGHT
    LOGITS = "logits"  # those of each sequence's last token, which FORWARD makes to generate text
    # of a parameter unit
    PARAM = "param"  # all of it (this tp rank's part), as compute units read it
    PARAM_SHARD = "pshard"  # this rank's shard, which STEP updates
    STATE = "state"  # optimizer state of that shard
    WEIGHT_GRAD = "wgrad"  # the gradient, accumulated over micro-batches on this rank
    TP_SUM = "wsum"  # the same, summed over tp (where tp ranks hold partial gradients)
    SHARD_SUM = "gpart"  # the same, summed over dp or over one shard group, on the rank that keeps it
    REPLICA_SUM = "gfull"  # the same, summed over all shard groups, without the other end of a tied embedding
    GRAD_SHARD = "gshard"  # the gradient, reduced over everything, which CLIP and STEP read
    PREVIOUS_GRAD = "gprev"  # that of the step before, which waits for its STEP (offload.overlap=next)
    SNAPSHOT = "snapshot"  # a copy of what the next checkpoint saves of the unit
    # of a parameter unit whose matrices are turned
    UPDATE = "update"  # this rank's shard of what is to be turned
    MATRIX = "matrix"  # the matrices that this rank owns, whole
    TURNED = "turned"  # the same, turned
    DIRECTION = "direction"  # of the step of what this rank updates
    # of a position
    LOSS = "loss"  # the sum of losses
    SCALE = "scale"  # the factor by which STEP multiplies gradients, which CLIP computes


SENT = SlotKind.ACT, SlotKind.GRAD  # by positions to each other
# What RELEASE cuts over tp ranks -> the kind of a rank's part, from which GATHER makes the whole
PARTS: dict[str, str] = {SlotKind.KEPT: SlotKind.KEPT_PART, SlotKind.ACT: SlotKind.ACT_PART,
                         SlotKind.GRAD: SlotKind.GRAD_PART}
WHOLES = {part: kind for kind, part in PARTS.items()}
# What EXCHANGE takes to the owners of matrices, or back -> what arrives
TO_OWNERS: dict[str, str] = {SlotKind.UPDATE: SlotKind.MATRIX, SlotKind.TURNED: SlotKind.DIRECTION}
OF_MATRICES = (*TO_OWNERS, *TO_OWNERS.values())
# What a step of matrices on the host takes to the device, and back -> the move
CARRIED: dict[str, Op] = {SlotKind.UPDATE: Op.FETCH, SlotKind.DIRECTION: Op.OFFLOAD}
PARAMETER_KINDS: frozenset[str] = frozenset({
    *OF_MATRICES, SlotKind.PARAM, SlotKind.PARAM_SHARD, SlotKind.STATE, SlotKind.WEIGHT_GRAD, SlotKind.TP_SUM,
    SlotKind.SHARD_SUM, SlotKind.REPLICA_SUM, SlotKind.GRAD_SHARD, SlotKind.PREVIOUS_GRAD, SlotKind.SNAPSHOT})


class Slot(NamedTuple):
    kind: str  # a SlotKind, or the name of a tensor that a unit hands on, or of its gradient
    unit: int = -1
    microbatch: int = -1
    tier: Tier = Tier.DEVICE

    @property
    def name(self) -> str:
        """The kind, after the tier where the tier is not the device."""
        return self.kind if self.tier == Tier.DEVICE else f"{self.tier}_{self.kind}"

    @property
    def below(self) -> Slot:
        """The same value one tier down."""
        return self._replace(tier=self.tier.below)

    def on(self, tier: Tier) -> Slot:
        """The same value on another tier."""
        return self._replace(tier=tier)

    def __str__(self) -> str:
        letter = "p" if self.kind in PARAMETER_KINDS else "u"
        numbers = ((letter, self.unit), ("m", self.microbatch))
        return " ".join([self.name, *(f"{of}{number}" for of, number in numbers if number >= 0)])


class Instruction(NamedTuple):
    """One entry of a program: an op, and what it works on. What the op does not use has its default."""

    op: Op
    unit: int = -1  # compute unit of COMPUTE and of slots of compute units; else parameter unit
    microbatch: int = -1
    kind: str = ""  # MESSAGES, MOVES, COLLECTIVES and RELEASE of a slot: of the slot
    tier: Tier = Tier.DEVICE  # MOVES: of the slot, the upper one of the two
    group: str = ""  # COLLECTIVES: the ranks that take part
    peer: int = -1  # MESSAGES: the other pipeline position
    keep: str = "all"  # FORWARD: what it keeps for backward: all, its input, or none
    # CLIP: STEP applies the gradients, they wait for the next step, they are dropped, or there are none.
    gradients: str = "step"
    age: str = ""  # prev: STEP applies gradients of the step before, OFFLOAD of a snapshot copies them too
    part: str = ""  # STEP of a unit whose matrices are turned: which of the three parts of its step

    @property
    def of_slot(self) -> bool:
        """Of COLLECTIVES and RELEASE: whether it is about a slot of a compute unit, not a parameter unit."""
        named = self.microbatch >= 0 or bool(self.kind)
        turns = self.op == Op.EXCHANGE and self.kind in TO_OWNERS
        return named and not turns and (self.op in COLLECTIVES or self.op == Op.RELEASE)

    @property
    def slot(self) -> Slot:
        """The slot that MESSAGES, MOVES, and others of a slot name."""
        return Slot(self.kind, self.unit, self.microbatch, self.tier)

    @property
    def phases(self) -> tuple[str, ...]:
        """Of COMPUTE: the phases that it runs. A forward that keeps nothing, in evaluation or generation, has
        no part that a RECOMPUTE would not repeat."""
        phases = PHASES.get(self.op, ())
        return phases if self.keep in ("all", "input") else tuple(each for each in phases if each != "once")

    @property
    def turn(self) -> tuple[int, int]:
        """Unit and micro-batch, which a forward shares with its backward."""
        return self.unit, self.microbatch

    def __str__(self) -> str:
        if self.op in MESSAGES:
            arrow = "->" if self.op == Op.SEND else "<-"
            return f"{self.op} {self.kind} u{self.unit} m{self.microbatch} {arrow} pp{self.peer}"
        if self.op in MOVES:
            return f"{self.op} {self.slot}{' with waiting gradients' if self.age else ''}"
        parts: list[str] = [self.op]
        if self.of_slot or (self.kind and self.op in COLLECTIVES):
            return f"{self.op} {self.slot}{f' ({self.group})' if self.group else ''}"
        if self.unit >= 0:
            parts.append(f"{'u' if self.op in COMPUTE else 'p'}{self.unit}")
        if self.microbatch >= 0:
            parts.append(f"m{self.microbatch}")
        parts += [self.part] if self.part else []
        parts += [f"({word})" for word in (self.group, self.age) if word]
        parts += [f"{name}={value}" for name, value in (("keep", self.keep), ("gradients", self.gradients))
                  if value != self._field_defaults[name]]
        return " ".join(parts)

    def strays(self) -> list[str]:
        """Fields that are set although the op does not use them."""
        return [name for name, default in self._field_defaults.items()
                if getattr(self, name) != default and name not in FIELDS[self.op]]


MICROBATCH_AT = Instruction._fields.index("microbatch")
# The other fields, as a tuple, which instructions of one form have in common
form_key = itemgetter(*(at for at in range(len(Instruction._fields)) if at != MICROBATCH_AT))

Programs = list[list[Instruction]]  # one program a position, while passes work on them


def insert(program: Sequence[Instruction], before: Mapping[int, Sequence[Instruction]],
           after: Mapping[int, Sequence[Instruction]]) -> list[Instruction]:
    """A program with instructions before and after some of its own, which are named by their index."""
    out, start = list[Instruction](), 0
    for index in sorted({*before, *after}):
        out += program[start:index]
        out += (*before.get(index, ()), program[index], *after.get(index, ()))
        start = index + 1
    return [*out, *program[start:]]

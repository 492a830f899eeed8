"""The nouns of a program: op, slot, instruction.

One optimizer step of one pipeline position is a flat list of instructions. Ranks that share a position (its dp and tp
peers) run the same program, so a plan holds one program a position, whatever the size of the mesh.

A **slot** is a named value:

    act u3 m1        output of compute unit 3 for micro-batch 1, what FORWARD of unit 4 reads
    grad u3 m1       the loss's gradient with respect to act u3 m1
    saved u3 m1      what FORWARD keeps for BACKWARD
    kept u3 m1       what FORWARD keeps for RECOMPUTE: its input
    kpart u3 m1      this tp rank's part of it
    operands u3 m1   what BACKWARD_INPUT leaves for BACKWARD_WEIGHT
    normed u3 m1     a tensor that u3 hands to later units of its stage: a norm's output, to tiles
    gnormed u3 m1    the gradient with respect to it, added up over those units
    param p3         a parameter unit, whole (this tp rank's part), as compute units read it
    pshard p3        this rank's shard of it, which STEP updates
    state p3         optimizer state of that shard
    wgrad p3         its gradient, accumulated over micro-batches on this rank
    wsum p3          the same, summed over tp (where tp ranks hold partial gradients)
    gpart p3         the same, summed over dp, or over a shard group of it, on the rank that keeps it
    gfull p3         the same, summed over all shard groups, still without the other half of a tied embedding
    gshard p3        the gradient, reduced over everything: what CLIP and STEP read
    gprev p3         that of the step before, which waits for its STEP (offload.delayed_update)
    loss, scale      sum of losses; what CLIP says STEP must multiply gradients by

A slot on another tier than the device has the tier before its kind: `host_kept u3 m1`.

A compute unit is written u3 and a parameter unit p3. They are one to one (u3 uses p3), but for a tied embedding: it is
a parameter unit of its own, used by the first and the last compute unit.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    FORWARD = "FORWARD"
    RECOMPUTE = "RECOMPUTE"
    BACKWARD = "BACKWARD"
    BACKWARD_INPUT = "BACKWARD_INPUT"
    BACKWARD_WEIGHT = "BACKWARD_WEIGHT"
    SEND = "SEND"
    RECV = "RECV"
    GATHER = "GATHER"
    RELEASE = "RELEASE"
    SPLIT = "SPLIT"
    JOIN = "JOIN"
    OFFLOAD = "OFFLOAD"
    FETCH = "FETCH"
    REDUCE = "REDUCE"
    CLIP = "CLIP"
    STEP = "STEP"


BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
COMPUTE = (Op.FORWARD, Op.RECOMPUTE, *BACKWARDS)
MESSAGES = (Op.SEND, Op.RECV)
MOVES = (Op.SPLIT, Op.JOIN, Op.OFFLOAD, Op.FETCH)  # of a slot, to another form or tier and back

# The fields that an op uses. The others keep their defaults, so that what is printed is all there is.
FIELDS: dict[Op, tuple[str, ...]] = {
    Op.FORWARD: ("unit", "microbatch", "keep"),
    **dict.fromkeys((Op.RECOMPUTE, *BACKWARDS), ("unit", "microbatch")),
    **dict.fromkeys(MOVES, ("unit", "microbatch", "group")),
    Op.OFFLOAD: ("unit", "microbatch", "group", "keep"),
    **dict.fromkeys(MESSAGES, ("unit", "microbatch", "group", "peer")),
    **dict.fromkeys((Op.GATHER, Op.REDUCE), ("unit", "group")),
    Op.RELEASE: ("unit",),
    Op.STEP: ("unit", "group"),
    Op.CLIP: ("keep",),
}


class Slot(NamedTuple):
    kind: str
    unit: int = -1
    microbatch: int = -1

    def __str__(self) -> str:
        letter = "p" if self.kind.removeprefix(f"{tier(self.kind)}_") in PARAMETER_KINDS else "u"
        parts = [self.kind]
        if self.unit >= 0:
            parts.append(f"{letter}{self.unit}")
        if self.microbatch >= 0:
            parts.append(f"m{self.microbatch}")
        return " ".join(parts)


PARAMETER_KINDS = frozenset({"param", "pshard", "state", "wgrad", "wsum", "gpart", "gfull", "gshard", "gprev", "snapshot"})


TIERS = ("device", "host", "disk")


def tier(kind: str) -> str:
    """Where slots of a kind live."""
    return next((name for name in TIERS if kind.startswith(f"{name}_")), "device")


def at(home: str, slot: Slot) -> Slot:
    """The same value on another tier."""
    return slot if home == "device" else slot._replace(kind=f"{home}_{slot.kind}")


def below(slot: Slot) -> Slot:
    """The same value one tier down: device, host, disk."""
    return at("host", slot) if tier(slot.kind) == "device" else slot._replace(kind=f"disk_{slot.kind.removeprefix('host_')}")


class Instruction(NamedTuple):
    op: Op
    unit: int = -1  # compute unit of COMPUTE and of a message's slot; parameter unit of GATHER, RELEASE, REDUCE, STEP
    microbatch: int = -1
    group: str = ""  # GATHER, REDUCE: the group of ranks; SEND, RECV, MOVES: the kind of slot; STEP: prev, of the step before
    peer: int = -1  # SEND, RECV: the other pipeline position
    keep: str = "all"  # FORWARD: what it keeps for backward, all, its input or none; CLIP: all, later (they wait), drop, none;
    # OFFLOAD of a snapshot: all, or later (with gradients that wait)

    def __str__(self) -> str:
        if self.op in MESSAGES:
            arrow = "->" if self.op == Op.SEND else "<-"
            return f"{self.op} {self.group} u{self.unit} m{self.microbatch} {arrow} pp{self.peer}"
        if self.op in MOVES:
            waiting = " with what waits" if self.keep == "later" else ""
            return f"{self.op} {Slot(self.group, self.unit, self.microbatch)}{waiting}"
        parts: list[str] = [self.op]
        if self.unit >= 0:
            parts.append(f"{'u' if self.op in COMPUTE else 'p'}{self.unit}")
        if self.microbatch >= 0:
            parts.append(f"m{self.microbatch}")
        if self.group:
            parts.append(f"({self.group})")
        if self.keep != "all":
            parts.append(f"keep={self.keep}")
        return " ".join(parts)

    def strays(self) -> list[str]:
        """Fields that are set although the op does not use them."""
        defaults = self._field_defaults
        return [name for name, default in defaults.items()
                if getattr(self, name) != default and name not in FIELDS[self.op]]


Programs = list[list[Instruction]]  # of all positions, while passes work on them
